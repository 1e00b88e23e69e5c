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

// load_units() for 2 * kWidth elements of 8 bits.
template <int32_t kDtype>
FLASHATTN_INLINE void load_unit_pair(const char* p, Floats* first, Floats* second) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F8E4M3) {
    load_f8_pair(p, first, second);
  } else {
    *first = load_i8(p);
    *second = load_i8(p + kWidth);
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

// Lane n of the result combines all lanes of rows[n], in the order of sum().
template <int kStep = kWidth / 2, class Combine>
FLASHATTN_INLINE Floats combine_each(Floats (&rows)[kWidth], Combine combine) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    const Words a = as_words(rows[i]), b = as_words(rows[i + kStep]);
    rows[i] = combine(as_floats(exchange<false, kStep>(a, b, lanes)),
                      as_floats(exchange<true, kStep>(a, b, lanes)));
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
