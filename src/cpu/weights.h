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

// A row's weights are 2 to the power of its scores less m, the running maximum. On tile registers m
// stays the highest of the first chunk of keys that a row sees some of, whose weight is exactly 1,
// as long as the sum of the row's weights over a chunk is not larger than this.
template <Compute kCompute>
constexpr bool kKeepsReference = kHasAmx && kCompute == Compute::kBf16Pairs;
constexpr float kLargestSum = 0x1p16f;

// sum += x, and to rest what rounding took from it: of the equal weights of many chunks it would
// take the same, again and again.
FLASHATTN_INLINE void add_up(Floats& sum, Floats& rest, Floats x) {
  x += rest;
  const Floats before = sum;
  sum = before + x;
  rest = x - (sum - before);
}

// 2^(factor * s - m) as rows of an A operand, in fp32 in the place of s; dropped where keep, which
// may be NULL, is 0. sums: to those of each row, lane by lane, the weights are added, dropped or
// not. Rows of s and keep are `stride` apart, those of p p_stride.
template <Compute kCompute, int kRows>
FLASHATTN_INLINE void write_weights(float* s, int64_t stride, uint32_t* p, int64_t p_stride,
                                    const uint8_t* keep, Interval columns, const float* factor,
                                    const float* m, Floats* sums) {
  Floats total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = sums[r];
  const auto write = [&](auto drop) FLASHATTN_INLINED {
    for (int64_t c = columns.begin; c < columns.end; c += 2 * kWidth) {
      Floats x[2 * kRows];
#pragma GCC unroll 4
      for (int n = 0; n < 2 * kRows; ++n) {
        x[n] =
            load(s + n / 2 * stride + c + n % 2 * kWidth) * splat(factor[n / 2]) - splat(m[n / 2]);
      }
      exp2_each<kKeepsReference<kCompute> ? Exp2For::kWeights : kExp2For<kCompute>>(x);
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
          store_bf16_row(p + r * p_stride + (c >> 1), x[2 * r], x[2 * r + 1]);
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

// o += weights of `keys` times their values, key by key and only where a weight is not 0:
// infinities and NaN in V must not touch it. p: of a row, from the key `first` on.
template <Compute kCompute>
inline void weigh_exactly(const Rows& values, int32_t dtype, int32_t dim, const uint32_t* p,
                          int32_t first, Interval keys, float* o) {
  constexpr int kU = kUnit<kCompute>;
  for (int32_t j = keys.begin; j < keys.end; ++j) {
    const int32_t c = j - first;
    const uint32_t shift = kU == 2 && c % 2 == 0 ? 16 : 0;
    const uint32_t weight = p[c / kU];
    const Floats each = as_floats(splat_word(kU == 2 ? weight << shift & 0xffff0000u : weight));
    if (each[0] == 0) continue;
    with_dtype(dtype, [&](auto tag) {
      constexpr int32_t kDtype = decltype(tag)::value;
      for (int32_t at = 0; at < dim; at += kWidth) {
        const Floats v = load_first<kDtype>(values.row(j) + at * kSize<kDtype>, dim - at);
        store(o + at, load(o + at) + each * v);
      }
    });
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
