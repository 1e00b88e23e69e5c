// Elementary functions of vectors: 2^x and tanh.
#pragma once

#include "cpu/simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// How 2^x is used. kBf16: the result is rounded to bf16, which errs a thousand times as much as
// fp32. kWeights: as kBf16, and the results are also summed; a row's only P need not be 2^0.
enum class Exp2For { kF32, kBf16, kWeights };

// Minimax polynomials of 2^x, 1 at 0: on [0, 1] (kFromBelow) or [-1/2, 1/2], from the highest
// coefficient down. Relative errors: 2e-9, for kBf16 3e-6, for kWeights 8e-8.
template <Exp2For kFor, bool kFromBelow>
struct Exp2Polynomial {  // [-1/2, 1/2]: kF32 and kWeights
  static constexpr float kHighest = 1.535336225e-4f;
  static constexpr float kOthers[] = {1.339887484e-3f, 9.618437360e-3f, 5.550332470e-2f,
                                      2.402264791e-1f, 6.931472029e-1f, 1.0f};
};
template <>
struct Exp2Polynomial<Exp2For::kBf16, false> {
  static constexpr float kHighest = 9.582852945e-3f;
  static constexpr float kOthers[] = {5.590642616e-2f, 2.402409911e-1f, 6.931241751e-1f, 1.0f};
};
template <>
struct Exp2Polynomial<Exp2For::kF32, true> {
  static constexpr float kHighest = 2.161291486e-4f;
  static constexpr float kOthers[] = {1.246784697e-3f, 9.675451554e-3f, 5.548528209e-2f,
                                      2.402293086e-1f, 6.931470633e-1f, 1.0f};
};
template <>
struct Exp2Polynomial<Exp2For::kBf16, true> {
  static constexpr float kHighest = 1.342668384e-2f;
  static constexpr float kOthers[] = {5.224247277e-2f, 2.412801981e-1f, 6.930448413e-1f, 1.0f};
};
template <>
struct Exp2Polynomial<Exp2For::kWeights, true> {
  static constexpr float kHighest = 1.867130050e-3f;
  static constexpr float kOthers[] = {9.017030708e-3f, 5.579991266e-2f, 2.401644439e-1f,
                                      6.931512952e-1f, 1.0f};
};

// Replaces each x by its polynomial. All x take a step before any takes the next: a processor looks
// some hundred instructions ahead, and one x needs twenty that depend on each other.
template <Exp2For kFor, int kCount>
FLASHATTN_INLINE void exp2_polynomial(Floats (&x)[kCount]) {
  using Polynomial = Exp2Polynomial<kFor, kExp2FromBelow>;
  Floats p[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) p[n] = splat(Polynomial::kHighest);
#pragma GCC unroll 8
  for (const float factor : Polynomial::kOthers) {
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) p[n] = p[n] * x[n] + splat(factor);
  }
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] = p[n];
}

// Replaces each x by 2^x, with a relative error below 1e-7 (kBf16: 3e-6; kWeights: 2e-7), and
// exactly 0 below 2^-126. A NaN stays one; infinity stays, or becomes a NaN: a sum shows either.
// kNonPositive: no x is above 0.
template <Exp2For kFor = Exp2For::kF32, bool kNonPositive = false, int kCount>
FLASHATTN_INLINE void exp2_each(Floats (&x)[kCount]) {
  Exp2Power power[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) power[n] = split_exp2<kNonPositive>(x[n]);
  exp2_polynomial<kFor>(x);
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] = scale_exp2(x[n], power[n]);
}

FLASHATTN_INLINE Floats exp2(Floats x) {
  Floats each[] = {x};
  exp2_each(each);
  return each[0];
}

// tanh near 0: an odd minimax polynomial, relative error 1.2e-7.
constexpr float kTanhIsNear0 = 0.625f;
FLASHATTN_INLINE Floats tanh_near_0(Floats x) {
  const Floats square = x * x;
  Floats p = splat(-1.519537339e-2f);
  p = p * square + splat(5.194790459e-2f);
  p = p * square + splat(-1.330817506e-1f);
  p = p * square + splat(3.333234124e-1f);
  return x - x * square * p;
}

// tanh with a relative error below 3e-7. Where it is near 1 its absolute error is below 1.1e-7, for
// its derivative is 1 - tanh^2.
FLASHATTN_INLINE Floats tanh(Floats x) {
  const Floats end = splat(10.0f);
  Floats magnitude = abs(x);
  magnitude = min_keep_nan(magnitude, end);
  // 1 - 2 / (e^2|x| + 1) loses digits near 0.
  const Floats large = 1.0f - 2.0f * reciprocal(exp2(magnitude * splat(2.8853900818f)) + 1.0f);
  const Floats signed_large = as_floats(as_words(large) | (as_words(x) & 0x80000000u));
  return select(magnitude < splat(kTanhIsNear0), tanh_near_0(x), signed_large);
}

// Replaces each x by tanh(x). Most often all x are near 0, which costs a third; the bits are the
// same.
template <int kCount>
FLASHATTN_INLINE void tanh_each(Floats (&x)[kCount]) {
  // Bits of positive numbers compare like the numbers, and those of a NaN are larger.
  Words largest{};
  for (const Floats& each : x) {
    const Words bits = as_words(abs(each));
    largest = bits > largest ? bits : largest;
  }
  if (any(largest >= as_words(splat(kTanhIsNear0)))) {
    for (Floats& each : x) each = tanh(each);
  } else {
    for (Floats& each : x) each = tanh_near_0(each);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
