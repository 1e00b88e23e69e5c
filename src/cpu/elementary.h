// Elementary functions of vectors: 2^x, 1 / x, tanh.
#pragma once

#include "cpu/simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// What 2^x is for: kBf16: to be rounded to bf16, which errs a thousand times as much; kWeights: the
// same, and to be summed, a row's only weight need not be 2^0.
enum class Exp2For { kF32, kBf16, kWeights };

// x less the next integer below, and 2 to the power of that integer, take an instruction each on
// AVX-512; AMD's, to which avx512_bf16 is left, are faster at rounding to the nearest.
#if defined(__AVX512F__) && (!defined(__AVX512BF16__) || defined(__AMX_BF16__))
#define FLASHATTN_EXP2_FROM_BELOW 1
#else
#define FLASHATTN_EXP2_FROM_BELOW 0
#endif

#if FLASHATTN_EXP2_FROM_BELOW
template <Exp2For kFor>
struct Exp2Factors {  // minimax on [0, 1], and 1 at 0: relative error 2e-9
  static constexpr float kHighest = 2.161291486e-4f;
  static constexpr float kOthers[] = {1.246784697e-3f, 9.675451554e-3f, 5.548528209e-2f,
                                      2.402293086e-1f, 6.931470633e-1f, 1.0f};
};
template <>
struct Exp2Factors<Exp2For::kBf16> {  // 3e-6
  static constexpr float kHighest = 1.342668384e-2f;
  static constexpr float kOthers[] = {5.224247277e-2f, 2.412801981e-1f, 6.930448413e-1f, 1.0f};
};
template <>
struct Exp2Factors<Exp2For::kWeights> {  // 8e-8
  static constexpr float kHighest = 1.867130050e-3f;
  static constexpr float kOthers[] = {9.017030708e-3f, 5.579991266e-2f, 2.401644439e-1f,
                                      6.931512952e-1f, 1.0f};
};
#else
template <Exp2For kFor>
struct Exp2Factors {  // minimax on [-1/2, 1/2], and 1 at 0: relative error 2e-9
  static constexpr float kHighest = 1.535336225e-4f;
  static constexpr float kOthers[] = {1.339887484e-3f, 9.618437360e-3f, 5.550332470e-2f,
                                      2.402264791e-1f, 6.931472029e-1f, 1.0f};
};
template <>
struct Exp2Factors<Exp2For::kBf16> {  // 3e-6
  static constexpr float kHighest = 9.582852945e-3f;
  static constexpr float kOthers[] = {5.590642616e-2f, 2.402409911e-1f, 6.931241751e-1f, 1.0f};
};
#endif

// To 2^x on that interval. Step by step for all: the processor sees some hundred instructions
// ahead, and one x takes twenty that wait for each other.
template <Exp2For kFor, int kCount>
FLASHATTN_INLINE void exp2_near_0(Floats (&x)[kCount]) {
  using Factors = Exp2Factors<kFor>;
  Floats p[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) p[n] = splat(Factors::kHighest);
#pragma GCC unroll 8
  for (const float factor : Factors::kOthers) {
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) p[n] = p[n] * x[n] + splat(factor);
  }
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] = p[n];
}

// To 2^x with a relative error below 1e-7 (kBf16: 3e-6; kWeights: 2e-7), and exactly 0 below
// 2^-126. NaN stays, and infinity stays or becomes one: sums tell of neither less. kNonPositive: of
// no x that is above 0.
template <Exp2For kFor = Exp2For::kF32, bool kNonPositive = false, int kCount>
FLASHATTN_INLINE void exp2_each(Floats (&x)[kCount]) {
#if defined(__AVX512F__)
  __mmask16 normal[kCount];
  __m512 whole[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) {
    const __m512 given = reinterpret_cast<__m512>(x[n]);
    normal[n] = _mm512_cmp_ps_mask(given, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
#if FLASHATTN_EXP2_FROM_BELOW
    whole[n] = given;  // scalef takes the integer below
    x[n] = reinterpret_cast<Floats>(_mm512_reduce_ps(given, _MM_FROUND_TO_NEG_INF));
#else
    whole[n] = _mm512_roundscale_ps(given, _MM_FROUND_TO_NEAREST_INT);
    x[n] = reinterpret_cast<Floats>(given) - reinterpret_cast<Floats>(whole[n]);
#endif
  }
  exp2_near_0<kFor>(x);
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) {
    x[n] = reinterpret_cast<Floats>(
        _mm512_maskz_scalef_ps(normal[n], reinterpret_cast<__m512>(x[n]), whole[n]));
  }
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  Words power[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) {
    if (!kNonPositive) x[n] = min_keep_nan(x[n], splat(128.0f));
    x[n] = max_keep_nan(x[n], splat(-127.0f));
    const Floats shifted = x[n] + magic;
    // shifted holds n in its low bits; (n + 127) << 23 is 2^n, 0 for n = -127 and inf for n = 128.
    power[n] = (as_words(shifted) + (127u - 0x4b400000u)) << 23;
#if defined(__AVX2__)
    x[n] -= reinterpret_cast<Floats>(_mm256_round_ps(  // the same, sooner
        reinterpret_cast<__m256>(x[n]), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    x[n] -= shifted - magic;
#endif
  }
  exp2_near_0<kFor>(x);
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] *= as_floats(power[n]);
#endif
}

FLASHATTN_INLINE Floats exp2(Floats x) {
  Floats each[] = {x};
  exp2_each(each);
  return each[0];
}

// 1 / x with a relative error below 2e-7, for x neither tiny nor huge.
FLASHATTN_INLINE Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats r = reinterpret_cast<Floats>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}

// tanh, where it is near 0: an odd polynomial.
constexpr float kTanhIsNear0 = 0.625f;
FLASHATTN_INLINE Floats tanh_near_0(Floats x) {
  const Floats square = x * x;
  Floats p = splat(-1.519537339e-2f);  // minimax, relative error 1.2e-7
  p = p * square + splat(5.194790459e-2f);
  p = p * square + splat(-1.330817506e-1f);
  p = p * square + splat(3.333234124e-1f);
  return x - x * square * p;
}

// tanh with a relative error below 3e-7, and where it is near 1 an absolute one below 1.1e-7: its
// derivative is 1 - tanh^2.
FLASHATTN_INLINE Floats tanh(Floats x) {
  const Floats end = splat(10.0f);
  Floats magnitude = abs(x);
  magnitude = min_keep_nan(magnitude, end);
  // 1 - 2 / (e^2|x| + 1) loses digits near 0.
  const Floats large = 1.0f - 2.0f * reciprocal(exp2(magnitude * splat(2.8853900818f)) + 1.0f);
  const Floats signed_large = as_floats(as_words(large) | (as_words(x) & 0x80000000u));
  return select(magnitude < splat(kTanhIsNear0), tanh_near_0(x), signed_large);
}

// The same bits for all x: most often all are near 0, which costs a third.
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
