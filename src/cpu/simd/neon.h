// Vectors of 128 bits: Advanced SIMD of AArch64, and the products of bf16 where there are any.
#pragma once

#include <arm_neon.h>

namespace flashattn::cpu::FLASHATTN_ISA {
constexpr int kWidth = 4;  // floats a vector
constexpr int kPanelVectors = 4;
}  // namespace flashattn::cpu::FLASHATTN_ISA

#include "cpu/simd/portable.h"

#if defined(FLASHATTN_NEON_BF16)
#include "cpu/simd/neon_bf16.h"
#endif

namespace flashattn::cpu::FLASHATTN_ISA {

using portable::Exp2Power;
using portable::kExp2FromBelow;
using portable::load_halves;
using portable::load_i8;
using portable::multiply_subtract;
using portable::reciprocal;
using portable::scale_exp2;
using portable::split_exp2;
using portable::store_halves;

FLASHATTN_INLINE Longs multiply_low(Longs a, uint32_t b) {
  return reinterpret_cast<Longs>(
      vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)), vdup_n_u32(b)));
}

FLASHATTN_INLINE void hold(Words& x) { __asm__("" : "+w"(x)); }

FLASHATTN_INLINE bool any(Ints mask) { return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0; }

// kWidth bytes, twice.
FLASHATTN_INLINE uint8x8_t load_bytes(const void* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return vreinterpret_u8_u32(vdup_n_u32(bytes));
}

FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
  const uint32x4_t bytes = vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p))));
  return reinterpret_cast<Floats>(vbslq_f32(
      vtstq_u32(bytes, bytes), reinterpret_cast<float32x4_t>(x), reinterpret_cast<float32x4_t>(y)));
}

// fmax and fmin return a NaN if either operand is one.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      vmaxq_f32(reinterpret_cast<float32x4_t>(x), reinterpret_cast<float32x4_t>(y)));
}
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      vminq_f32(reinterpret_cast<float32x4_t>(x), reinterpret_cast<float32x4_t>(y)));
}

FLASHATTN_INLINE Floats load_bf16(const void* p) {
  return reinterpret_cast<Floats>(vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(p)), 16));
}
FLASHATTN_INLINE Floats load_f16(const void* p) {
  const uint16x4_t bits = vld1_u16(static_cast<const uint16_t*>(p));
  return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(bits)));
}

// As in simd/avx2.h: E4M3 as fp16, divided by 2^8.
constexpr float kF8Unit = 256.0f;
FLASHATTN_INLINE void widen_f8(uint8x8_t bytes, Floats* first, Floats* second) {
  const int16x8_t twice = vshll_n_s8(vreinterpret_s8_u8(bytes), 7);
  const uint16x8_t nan = vceqq_s16(vorrq_s16(twice, vdupq_n_s16(-0x4000)), vdupq_n_s16(-0x80));
  const int16x8_t once = vandq_s16(twice, vdupq_n_s16(-0x4080));
  const float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(vreinterpretq_u16_s16(once), nan));
  *first = reinterpret_cast<Floats>(vcvt_f32_f16(vget_low_f16(halves)));
  *second = reinterpret_cast<Floats>(vcvt_high_f32_f16(halves));
}
FLASHATTN_INLINE Floats load_f8_units(const void* p) {
  Floats first, second;
  widen_f8(load_bytes(p), &first, &second);
  return first;
}
FLASHATTN_INLINE void load_f8_pair(const void* p, Floats* first, Floats* second) {
  widen_f8(vld1_u8(static_cast<const uint8_t*>(p)), first, second);
}
FLASHATTN_INLINE void store_bytes(void* p, Words bits) {
  const uint16x4_t halves = vmovn_u32(reinterpret_cast<uint32x4_t>(bits));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
  const uint32_t word = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  __builtin_memcpy(p, &word, sizeof word);
}

#if !defined(FLASHATTN_NEON_BF16)
using portable::dot_bf16;
using portable::pair_bf16;
using portable::store_bf16_row;
#endif

FLASHATTN_INLINE void interleave(Words a, Words b, Words* first, Words* second) {
  const uint16x8_t x = reinterpret_cast<uint16x8_t>(a), y = reinterpret_cast<uint16x8_t>(b);
  *first = reinterpret_cast<Words>(vzip1q_u16(x, y));
  *second = reinterpret_cast<Words>(vzip2q_u16(x, y));
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
