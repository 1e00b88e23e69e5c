// From scores to weights, two rows at a time: half as many ends of loops, which no processor
// foresees.
#pragma once

#include "cpu/dropout.h"
#include "cpu/mask.h"
#include "cpu/score_mod.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Weights and gradients of scores are operands of a product next.
template <Compute kCompute>
constexpr Exp2For kExp2For = kCompute == Compute::kBf16Pairs ? Exp2For::kBf16 : Exp2For::kF32;

// Calls body with as many rows of a tile as it is to work on: two that need the same columns, or
// one. Returns how many.
template <class Body>
FLASHATTN_INLINE int32_t for_row_pair(int32_t row, int32_t left, Body body) {
  static_assert(kMicroKernelRows % 2 == 0, "an even row and the next need the same columns");
  if (left < 2 || row % 2 != 0) return body(std::integral_constant<int, 1>{}), 1;
  return body(std::integral_constant<int, 2>{}), 2;
}

// The highest of the columns of each row, lane by lane; rows `stride` apart. A NaN may be passed
// over: the sum of the weights does not.
template <int kRows>
FLASHATTN_INLINE void max_of_rows(const float* s, int64_t stride, Interval columns,
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

// A row's weights are e to the power of its scores less m, the running maximum, whose own is
// exactly 1 however large it is: a row of one key is that key's value. On tile registers m stays
// the highest of the first chunk of keys that a row sees some of, as long as the sum of the row's
// weights over a chunk is not larger than this.
template <Compute kCompute>
constexpr bool kFixedBase = kHasAmx && kCompute == Compute::kBf16Pairs;
constexpr float kMaxRowSum = 0x1p16f;
// There the exponent of a weight is one multiply-add: what is subtracted is m in units of log2(e),
// rounded, and the weight of m is 2 to the power of that rounding. Up to this size, in the same
// units, it is 1 once it is rounded to bf16.
constexpr float kMaxBase = 0x1p14f;

// sum += x, and to rest what rounding took from it: of the equal weights of many chunks it would
// take the same, again and again.
FLASHATTN_INLINE void add_compensated(Floats& sum, Floats& rest, Floats x) {
  x += rest;
  const Floats before = sum;
  sum = before + x;
  rest = x - (sum - before);
}

// What is subtracted from scores with the maximum m. Where no key was visible so far the weights
// are zero.
FLASHATTN_INLINE Floats exponent_shift(Floats m, Floats factor, bool reference) {
  return select(m == -kInfinity, Floats{}, reference ? m * factor : m);
}

// By what sums relative to `before` shrink when the maximum is `top`.
FLASHATTN_INLINE Floats rescale_factor(Floats before, Floats top, Floats factor, bool reference) {
  const Floats change =
      exponent_shift(before, factor, reference) - exponent_shift(top, factor, reference);
  return exp2(reference ? change : change * factor);
}

// Whether the reference m of a row is small enough. Makes l, the sum of its weights, relative to m,
// whose own weight errs by a rounding: exactly 1 where that is the only one.
FLASHATTN_INLINE bool base_serves(float m, float factor, float* l) {
  if (m == -kInfinity) return true;
  const Floats shift = splat(m) * splat(factor);
  Floats own[] = {multiply_subtract(splat(m), splat(factor), shift)};
  exp2_each<Exp2For::kWeights>(own);
  const float relative = *l / own[0][0];
  *l = __builtin_fabsf(relative - 1) <= 0x1p-22f ? 1.0f : relative;
  return __builtin_fabsf(shift[0]) <= kMaxBase;
}

// 2^(factor * (s - m)), where m is no less than any s, or, kShifted, 2^(factor * s - m) as rows of
// an A operand, in fp32 in the place of s; dropped where keep, which may be NULL, is 0. sums: to
// those of each row, lane by lane, the weights are added, dropped or not. Rows of s and keep are
// `stride` apart, those of p p_stride.
template <Compute kCompute, int kRows, bool kShifted>
FLASHATTN_INLINE void compute_p(float* s, int64_t stride, uint32_t* p, int64_t p_stride,
                                const uint8_t* keep, Interval columns, const float* factor,
                                const float* m, Floats* sums) {
  Floats total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = sums[r];
  const auto write = [&](auto drop) FLASHATTN_INLINED {
    for (int64_t c = columns.begin; c < columns.end; c += 2 * kWidth) {
      Floats x[2 * kRows];
#pragma GCC unroll 4
      for (int n = 0; n < 2 * kRows; ++n) {
        x[n] = load(s + n / 2 * stride + c + n % 2 * kWidth);
        if constexpr (kShifted) {
          x[n] = multiply_subtract(x[n], splat(factor[n / 2]), splat(m[n / 2]));
        } else {
          x[n] = (x[n] - splat(m[n / 2])) * splat(factor[n / 2]);
        }
      }
      exp2_each<kFixedBase<kCompute> ? Exp2For::kWeights : kExp2For<kCompute>, !kShifted>(x);
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

// What ends a row.
struct RowResult {
  float factor;  // of the sum of its weighted values
  double lse;
};

// Of a row whose weights, relative to the score m, add up to l; nothing visible: m = -inf, l = 0.
// sink: -inf where there is none. It joins the sum here: however far above or below the scores it
// lies, their weights keep their digits.
inline RowResult normalize_row(float m, double l, double nats, float sink) {
  double lse = l == 0 ? -double{kInfinity} : m * nats + __builtin_log(l);
  double factor = l == 0 ? 0.0 : 1.0 / l;
  if (sink != -kInfinity) {
    const double base = l == 0 ? lse : m * nats;
    const double top = base > double{sink} ? base : double{sink};
    const double keys = __builtin_exp(base - top);
    const double total = l * keys + __builtin_exp(double{sink} - top);
    lse = top + __builtin_log(total);
    factor = keys / total;
  }
  return {static_cast<float>(factor), lse};
}

// As the caller gets it: what is finite stays finite.
FLASHATTN_INLINE float rounded_lse(double lse) {
  const float nearest = static_cast<float>(lse);
  if (__builtin_fabs(lse) == double{kInfinity} || __builtin_fabsf(nearest) <= kMaxFloat) {
    return nearest;
  }
  return lse > 0 ? kMaxFloat : lse < 0 ? -kMaxFloat : nearest;
}

// o += weights of `keys` times their values, key by key and only where a weight is not 0:
// infinities and NaN in V must not touch it. p: of a row, from the key `first` on.
template <Compute kCompute>
inline void add_pv_nonzero(const TokenRows& values, int32_t dtype, int32_t dim, const uint32_t* p,
                           int32_t first, Interval keys, float* o) {
  constexpr int kU = kWordElements<kCompute>;
  for (int32_t j = keys.begin; j < keys.end; ++j) {
    const int32_t c = j - first;
    const uint32_t shift = kU == 2 && c % 2 == 0 ? 16 : 0;
    const uint32_t weight = p[c / kU];
    const Floats each = as_floats(splat_word(kU == 2 ? weight << shift & 0xffff0000u : weight));
    if (each[0] == 0) continue;
    with_dtype(dtype, [&](auto tag) {
      constexpr int32_t kDtype = decltype(tag)::value;
      for (int32_t at = 0; at < dim; at += kWidth) {
        const Floats v = load_first<kDtype>(values.row(j) + at * kElementBytes<kDtype>, dim - at);
        store(o + at, load(o + at) + each * v);
      }
    });
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
