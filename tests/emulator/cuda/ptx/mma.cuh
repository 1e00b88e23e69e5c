// In place of src/cuda/ptx/mma.cuh.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "emulator.h"

namespace flashattn::cuda::ptx {

template <class T>
constexpr bool kIsBf16 = std::is_same<T, __nv_bfloat16>::value;

template <class T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::multiply_warp(d, a, b0, b1, kIsBf16<T>);
}

// Operands lose their 13 lowest bits; sums of 4 terms are cut off.
inline void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Words* all = emulator::exchange({{a[0], a[1], a[2], a[3], b0, b1, 0, 0}});
  const int lane = emulator::lane(), row = lane / 4, column = lane % 4 * 2;
  const auto number = [](uint32_t x) {
    return static_cast<double>(__uint_as_float(x & 0xffffe000u));
  };
  for (int e = 0; e < 4; ++e) {
    for (int half = 0; half < 2; ++half) {
      double sum = d[e];
      for (int k = 0; k < 4; ++k) {
        sum += number(all[row * 4 + k].word[half * 2 + e / 2]) *
               number(all[(column + e % 2) * 4 + k].word[4 + half]);
      }
      d[e] = static_cast<float>(sum);
      if (std::isfinite(sum) && std::fabs(static_cast<double>(d[e])) > std::fabs(sum)) {
        d[e] = std::nextafter(d[e], 0.0f);
      }
    }
  }
}

template <class T>
uint32_t pack(float low, float high) {
  uint16_t bits[2];
  if constexpr (kIsBf16<T>) {
    bits[0] = __nv_bfloat16_raw(__float2bfloat16_rn(low)).x;
    bits[1] = __nv_bfloat16_raw(__float2bfloat16_rn(high)).x;
  } else {
    bits[0] = __half_raw(__float2half_rn(low)).x;
    bits[1] = __half_raw(__float2half_rn(high)).x;
  }
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
}

template <class T>
uint32_t pack_saturated(float low, float high) {
  const float most = kIsBf16<T> ? INFINITY : 65504.0f;
  const auto limit = [most](float x) { return std::isnan(x) ? x : std::clamp(x, -most, most); };
  return pack<T>(limit(low), limit(high));
}

template <class T>
uint32_t pack_relu(float low, float high) {
  return pack<T>(low < 0.0f ? 0.0f : low, high < 0.0f ? 0.0f : high);
}

template <class T>
float2 unpack(uint32_t pair) {
  return {emulator::as_float(pair & 0xffff, kIsBf16<T>),
          emulator::as_float(pair >> 16, kIsBf16<T>)};
}

template <class T>
uint32_t add_nonfinite(uint32_t seen, uint32_t pair) {
  const float2 before = unpack<T>(seen), x = unpack<T>(pair);
  return pack<T>(x.x * 0.0f + before.x, x.y * 0.0f + before.y);
}

inline uint32_t mul_f16x2(uint32_t x, uint32_t y) {
  const float2 a = unpack<__half>(x), b = unpack<__half>(y);
  return pack<__half>(a.x * b.x, a.y * b.y);
}

inline uint32_t max_abs_f16x2(uint32_t x, uint32_t y) {
  uint32_t r = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t a = x >> shift & 0x7fff, b = y >> shift & 0x7fff;
    const bool a_bad = a > 0x7c00, b_bad = b > 0x7c00;
    r |= (a_bad ? b_bad ? 0x7fff : b : b_bad ? a : max(a, b)) << shift;
  }
  return r;
}

template <class T>
uint32_t max_with_abs(uint32_t x, uint32_t y) {
  uint32_t r = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t a = x >> shift & 0x7fff, b = y >> shift & 0x7fff;
    r |= (b > (kIsBf16<T> ? 0x7f80 : 0x7c00) ? a : max(a, b)) << shift;
  }
  return r;
}

inline uint32_t nonzero_mask(uint32_t pair) {
  return (pair & 0x7fffu ? 0xffffu : 0) | (pair & 0x7fff0000u ? 0xffff0000u : 0);
}

inline uint32_t sign_mask(uint32_t pair) {
  return (pair & 0x8000u ? 0xffffu : 0) | (pair & 0x80000000u ? 0xffff0000u : 0);
}

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t digit = selector >> 4 * n & 15;
    const uint32_t byte = static_cast<uint32_t>(both >> 8 * (digit & 7)) & 0xff;
    result |= (digit < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * n;
  }
  return result;
}

inline uint32_t movmatrix_trans(uint32_t pair) {
  const emulator::Words* rows = emulator::exchange({{pair}});
  const uint32_t lane = emulator::lane();
  uint32_t turned = 0;
  for (uint32_t e = 0; e < 2; ++e) {
    const uint32_t from = rows[(lane % 4 * 2 + e) * 4 + lane / 8].word[0];
    turned |= (from >> lane / 4 % 2 * 16 & 0xffff) << 16 * e;
  }
  return turned;
}

// Results below the normal numbers are 0, and so are such arguments.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2(float x) { return flush(std::exp2(flush(x))); }
inline float tanh(float x) { return std::tanh(x); }
inline float log2(float x) { return ::log2f(x); }
inline float reciprocal(float x) { return flush(1.0f / flush(x)); }

}  // namespace flashattn::cuda::ptx
