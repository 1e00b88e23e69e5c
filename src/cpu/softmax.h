// From scores to P, two rows at a time: that halves the number of loop ends, which branch
// predictors miss.
#pragma once

#include "cpu/amax.h"
#include "cpu/dropout.h"
#include "cpu/mask.h"
#include "cpu/score_mod.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// How exact 2^x must be: P and dS become operands of a product next.
template <Compute kCompute>
constexpr Exp2For kExp2For = kCompute == Compute::kBf16Pairs ? Exp2For::kBf16 : Exp2For::kF32;

// Calls body(count), count a constant: 2 if this row and the next have the same columns, else 1.
// Returns the count.
template <class Body>
FLASHATTN_INLINE int32_t for_row_pair(int32_t row, int32_t left, Body body) {
  static_assert(kMicroKernelRows % 2 == 0, "an even row and the next need the same columns");
  if (left < 2 || row % 2 != 0) return body(std::integral_constant<int, 1>{}), 1;
  return body(std::integral_constant<int, 2>{}), 2;
}

// The maximum of each lane over the columns of kRows rows, which are `stride` apart. A NaN may be
// lost here; the sum of P shows it.
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

// P is e^(score - m), m the running maximum. P of the maximum itself is exactly 1, however large
// the score is: O of a row that sees one key is that key's value.
//
// On tile registers m is a fixed base: the maximum of the first subtile of which a row sees some
// key. It stays while the sum of the row's P over a subtile is at most kMaxRowSum.
template <Compute kCompute>
constexpr bool kFixedBase = kHasAmx && kCompute == Compute::kBf16Pairs;
constexpr float kMaxRowSum = 0x1p16f;
// With a fixed base the exponent of P is one multiply-add: score * factor - shift, shift being m in
// units of log2(e), rounded. P of m itself is then 2 to the power of that rounding error. Up to
// kMaxBase, in the same units, it is 1 once it is rounded to bf16.
constexpr float kMaxBase = 0x1p14f;

// Compensated summation: sum += x, and rest receives what rounding took from it. Without it the
// equal P of many subtiles would lose the same amount each time.
FLASHATTN_INLINE void add_compensated(Floats& sum, Floats& rest, Floats x) {
  x += rest;
  const Floats before = sum;
  sum = before + x;
  rest = x - (sum - before);
}

// The base that is subtracted from scores whose maximum is m. 0 as long as no key was visible, so
// that P is 0.
FLASHATTN_INLINE Floats exponent_shift(Floats m, Floats factor, bool fixed_base) {
  return select(m == -kInfinity, Floats{}, fixed_base ? m * factor : m);
}

// The factor for sums relative to `before` once the maximum is `top`.
FLASHATTN_INLINE Floats rescale_factor(Floats before, Floats top, Floats factor, bool fixed_base) {
  const Floats change =
      exponent_shift(before, factor, fixed_base) - exponent_shift(top, factor, fixed_base);
  return exp2(fixed_base ? change : change * factor);
}

// Whether the fixed base m of a row was small enough. Divides l, the sum of P, by P of m itself,
// which differs from 1 by a rounding; l becomes exactly 1 if that was the only term.
FLASHATTN_INLINE bool base_serves(float m, float factor, float* l) {
  if (m == -kInfinity) return true;
  const Floats shift = splat(m) * splat(factor);
  Floats own[] = {multiply_subtract(splat(m), splat(factor), shift)};
  exp2_each<Exp2For::kWeights>(own);
  const float relative = *l / own[0][0];
  *l = __builtin_fabsf(relative - 1) <= 0x1p-22f ? 1.0f : relative;
  return __builtin_fabsf(shift[0]) <= kMaxBase;
}

// P = 2^(factor * (s - m)), m no less than any s; or, kShifted, 2^(factor * s - m). In fp32 it
// replaces s, otherwise it goes to p as rows of an A operand. Where keep, which may be NULL, is 0,
// P is dropped. sums: P is added, dropped or not, lane by lane. Rows of s and keep are `stride`
// apart, those of p p_stride.
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

struct RowResult {
  float factor;  // makes the sum P V the output
  double lse;
};

// The result of a row with the maximum m and the sum l of P; if nothing was visible m = -inf and l
// = 0. sink: -inf if there is none. It joins the sum here, so that P keeps its digits however far
// above or below the scores the sink lies.
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

// Rounds lse to fp32; a finite lse stays finite.
FLASHATTN_INLINE float rounded_lse(double lse) {
  const float nearest = static_cast<float>(lse);
  if (__builtin_fabs(lse) == double{kInfinity} || __builtin_fabsf(nearest) <= kMaxFloat) {
    return nearest;
  }
  return lse > 0 ? kMaxFloat : lse < 0 ? -kMaxFloat : nearest;
}

// o += P V of the keys `keys`, key by key and only where P is not 0, because 0 must not meet
// infinities and NaN in V. p: the row of P, which begins with key `first`.
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
      const float unit = unit_of<kDtype>(values, j);
      for (int32_t at = 0; at < dim; at += kWidth) {
        const Words v = as_words(
            load_first_units<kDtype>(values.row(j) + at * kElementBytes<kDtype>, dim - at));
        store(o + at, load(o + at) + each * as_floats(in_unit<kDtype>(v, unit)));
      }
    });
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
