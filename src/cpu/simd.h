// Vectors of fp32, as wide as the instruction set that this source is compiled for. Most operations
// are the compilers' generic vectors, so that one source serves every instruction set and
// architecture. A header of simd/ gives an instruction set's widths and those operations that it
// does better: a new instruction set is a header there.
//
// Everything lives in a namespace named after the instruction set. Nothing here may call an inline
// function or a template of another namespace that is not always inlined: the linker may keep the
// copy that older processors cannot run.
#pragma once

#if defined(FLASHATTN_NEON)
#include "cpu/simd/neon.h"
#elif defined(FLASHATTN_SVE)
#include "cpu/simd/sve.h"
#elif defined(__AVX512F__)
#include "cpu/simd/avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "cpu/simd/avx2.h"
#else
#include "cpu/simd/baseline.h"
#endif

namespace flashattn::cpu::FLASHATTN_ISA {

// Whether products of pairs of bf16 are instructions: of vectors (vdpbf16ps, bfdot) or of tiles
// (AMX).
#if defined(__AVX512BF16__) || defined(__AMX_BF16__) || defined(FLASHATTN_NEON_BF16)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

// Loads kWidth elements at p as fp32.
template <int32_t kDtype>
FLASHATTN_INLINE Floats load_as_floats(const void* p) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F32) {
    return load(static_cast<const float*>(p));
  } else if constexpr (kDtype == FLASHATTN_DTYPE_BF16) {
    return load_bf16(p);
  } else if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) {
    return load_f8_units(p) * splat(kF8Unit);
  } else if constexpr (kDtype == FLASHATTN_DTYPE_I8) {
    return load_i8(p);
  } else {
    return load_f16(p);
  }
}

// Loads kWidth elements as fp32, each divided by kUnit of the type. The caller multiplies the
// product that follows by kUnit.
template <int32_t kDtype>
constexpr float kUnit = kDtype == FLASHATTN_DTYPE_F8E4M3 ? kF8Unit : 1.0f;
template <int32_t kDtype>
FLASHATTN_INLINE Floats load_units(const void* p) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) {
    return load_f8_units(p);
  } else {
    return load_as_floats<kDtype>(p);
  }
}

// load_units() for as many elements of 8 bits as are best widened at once.
#if defined(__AVX512VBMI__)
constexpr int kByteVectors = 4;
#else
constexpr int kByteVectors = 2;
#endif
template <int32_t kDtype>
FLASHATTN_INLINE void load_unit_vectors(const char* p, Floats (&x)[kByteVectors]) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) {
#if defined(__AVX512VBMI__)
    load_f8_vectors(p, x);
#else
    load_f8_pair(p, &x[0], &x[1]);
#endif
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < kByteVectors; ++v) x[v] = load_i8(p + v * kWidth);
  }
}

// Pairs of bf16 made of the high halves of floats: exact for those of 8 significant bits.
FLASHATTN_INLINE Words high_halves(Floats low, Floats high) {
  return as_words(low) >> 16 | (as_words(high) & 0xffff0000u);
}

// Loads 4 * kWidth elements of 8 bits, which bf16 holds exactly, in units of kUnit. Word n of
// words[g] is the pair of elements n and n + kWidth of the g-th 2 * kWidth.
template <int32_t kDtype>
FLASHATTN_INLINE void load_byte_pairs(const char* p, Words (&words)[2]) {
#if defined(__AVX512VBMI__)
  if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) return load_f8_pairs(p, words);
#endif
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g, p += 2 * kWidth) {
    words[g] = high_halves(load_units<kDtype>(p), load_units<kDtype>(p + kWidth));
  }
}

// Likewise 4 * kWidth columns of two rows: word n is the pair of column n of both.
template <int32_t kDtype>
FLASHATTN_INLINE void load_byte_columns(const char* first, const char* second, Words (&words)[4]) {
#if defined(__AVX512VBMI__)
  if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) return load_f8_columns(first, second, words);
#endif
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    words[g] = high_halves(load_units<kDtype>(first + g * kWidth),
                           load_units<kDtype>(second + g * kWidth));
  }
}

template <int32_t kDtype>
FLASHATTN_INLINE void store_floats(void* p, Floats x) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F32) {
    store(static_cast<float*>(p), x);
  } else if constexpr (kDtype == FLASHATTN_DTYPE_BF16) {
    store_halves(static_cast<uint16_t*>(p), to_bf16(x));
  } else if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) {
    store_bytes(p, to_f8(x));
  } else if constexpr (kDtype == FLASHATTN_DTYPE_I8) {
    store_bytes(p, to_i8(x));
  } else {
    store_halves(static_cast<uint16_t*>(p), to_f16(x));
  }
}

// ---- Across lanes ----

template <int kStep, int... kLane>
FLASHATTN_INLINE Floats swap_lanes_of(Floats x, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (kLane ^ kStep)...);
#else
  return __builtin_shuffle(x, Ints{(kLane ^ kStep)...});
#endif
}
// Lane n of the result is lane n ^ kStep of x.
template <int kStep>
FLASHATTN_INLINE Floats swap_lanes(Floats x) {
  return swap_lanes_of<kStep>(x, std::make_integer_sequence<int, kWidth>{});
}

FLASHATTN_INLINE float sum(Floats x) {
  if constexpr (kWidth > 8) x += swap_lanes<8>(x);
  if constexpr (kWidth > 4) x += swap_lanes<4>(x);
  x += swap_lanes<2>(x);
  x += swap_lanes<1>(x);
  return x[0];
}

// The larger of x and y; a NaN on either side is kept.
FLASHATTN_INLINE Floats max_of_both(Floats x, Floats y) {
  return select(x == x, max_keep_nan(y, x), x);
}

// Takes lanes in blocks of kStep: even blocks from a, odd ones from b, the low (kHigh: the high)
// block of each pair of blocks.
template <bool kHigh, int kStep, int... kLane>
FLASHATTN_INLINE Words exchange(Words a, Words b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b,
      ((kLane & kStep) ? kWidth + kLane - (kHigh ? 0 : kStep) : kLane + (kHigh ? kStep : 0))...);
#else
  return __builtin_shuffle(
      a, b,
      Words{static_cast<uint32_t>((kLane & kStep) ? kWidth + kLane - (kHigh ? 0 : kStep)
                                                  : kLane + (kHigh ? kStep : 0))...});
#endif
}

template <int kStep>
FLASHATTN_INLINE void transpose_steps(Words (&rows)[kWidth]) {
  if constexpr (kStep < kWidth) {
    constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i & kStep) continue;
      const Words a = rows[i], b = rows[i + kStep];
      rows[i] = exchange<false, kStep>(a, b, lanes);
      rows[i + kStep] = exchange<true, kStep>(a, b, lanes);
    }
    transpose_steps<kStep * 2>(rows);
  }
}

FLASHATTN_INLINE void transpose(Words (&rows)[kWidth]) { transpose_steps<1>(rows); }

// In blocks of kStep lanes: the even ones of a and the odd ones of b where they are.
template <int kStep, int... kLane>
FLASHATTN_INLINE Floats blend_blocks(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return select(Ints{(kLane & kStep ? -1 : 0)...}, b, a);
}

// The odd blocks of a and the even ones of b, each in the other's place.
template <int kStep, int... kLane>
FLASHATTN_INLINE Floats swap_blocks(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((kLane & kStep ? kWidth + kLane : kLane) ^ kStep)...);
#else
  return __builtin_shuffle(a, b, Ints{((kLane & kStep ? kWidth + kLane : kLane) ^ kStep)...});
#endif
}

// Lane n of the result combines all lanes of rows[n], in the order of sum(); combine() is
// commutative.
template <int kStep = kWidth / 2, class Combine>
FLASHATTN_INLINE Floats combine_each(Floats (&rows)[kWidth], Combine combine) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    const Floats a = rows[i], b = rows[i + kStep];
    if constexpr (kWidth == 16) {
      // A blend and a shuffle take less time than two shuffles.
      rows[i] = combine(blend_blocks<kStep>(a, b, lanes), swap_blocks<kStep>(a, b, lanes));
    } else {
      rows[i] = combine(as_floats(exchange<false, kStep>(as_words(a), as_words(b), lanes)),
                        as_floats(exchange<true, kStep>(as_words(a), as_words(b), lanes)));
    }
  }
  if constexpr (kStep == 1) {
    return rows[0];
  } else {
    return combine_each<kStep / 2>(rows, combine);
  }
}

FLASHATTN_INLINE Floats sum_each(Floats (&rows)[kWidth]) {
  return combine_each(rows, [](Floats x, Floats y) { return x + y; });
}

// Lane n of the result is the maximum of rows[n]. A NaN is kept.
FLASHATTN_INLINE Floats max_each(Floats (&rows)[kWidth]) {
  return combine_each(rows, [](Floats x, Floats y) { return max_of_both(x, y); });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
