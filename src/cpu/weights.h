// From scores to weights, two rows at a time: half as many ends of loops, which no processor
// foresees.
#pragma once

#include "cpu/scores.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Calls body with as many rows of a tile as it is to work on: two that need the same columns, or
// one. Returns how many.
template <class Body>
FLASHATTN_INLINE int32_t with_pair(int32_t row, int32_t left, Body body) {
  static_assert(kMicroRows % 2 == 0, "an even row and the next need the same columns");
  if (left < 2 || row % 2 != 0) return body(std::integral_constant<int, 1>{}), 1;
  return body(std::integral_constant<int, 2>{}), 2;
}

// The highest of the columns of each row, lane by lane; rows `stride` apart. A NaN may be passed
// over: the sum of the weights does not.
template <int kRows>
FLASHATTN_INLINE void highest_of(const float* s, int64_t stride, Interval columns,
                                 Floats* highest) {
  Floats even[kRows], odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = splat(-kInfinity);
  for (int64_t c = columns.begin; c < columns.end; c += 2 * kWidth) {
    for (int r = 0; r < kRows; ++r) {
      even[r] = max_keep_nan(load(s + r * stride + c), even[r]);
      odd[r] = max_keep_nan(load(s + r * stride + c + kWidth), odd[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) highest[r] = max_of_both(even[r], odd[r]);
}

// 2^(factor * s - m) as rows of an A operand, in fp32 in the place of s; dropped where keep, which
// may be NULL, is 0. sums: of each row, lane by lane, dropped or not. Rows of s and keep are
// `stride` apart, those of p half of it.
template <Compute kCompute, int kRows>
FLASHATTN_INLINE void write_weights(float* s, uint32_t* p, const uint8_t* keep, int64_t stride,
                                    Interval columns, const float* factor, const float* m,
                                    Floats* sums) {
  Floats total[kRows] = {};
  const auto write = [&](auto drop) {
    for (int64_t c = columns.begin; c < columns.end; c += 2 * kWidth) {
      Floats x[2 * kRows];
#pragma GCC unroll 4
      for (int n = 0; n < 2 * kRows; ++n) {
        x[n] =
            load(s + n / 2 * stride + c + n % 2 * kWidth) * splat(factor[n / 2]) - splat(m[n / 2]);
      }
      exp2_each<kExp2For<kCompute>>(x);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = r * stride + c;
        total[r] += x[2 * r] + x[2 * r + 1];
        x[2 * r] = drop(x[2 * r], at);
        x[2 * r + 1] = drop(x[2 * r + 1], at + kWidth);
        if constexpr (kCompute == Compute::kF32) {
          store(s + at, x[2 * r]);
          store(s + at + kWidth, x[2 * r + 1]);
        } else {
          store_bf16_row(p + (at >> 1), x[2 * r], x[2 * r + 1]);
        }
      }
    }
  };
  if (keep) {
    write([=](Floats x, int64_t at) { return apply_keep(x, keep + at); });
  } else {
    write([](Floats x, int64_t) { return x; });
  }
  for (int r = 0; r < kRows; ++r) sums[r] = total[r];
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
