// Vectors of 512 bits: AVX-512 F, BW, DQ and VL, and the products of bf16 where there are any.
#pragma once

#include <immintrin.h>

namespace flashattn::cpu::FLASHATTN_ISA {
constexpr int kWidth = 16;  // floats a vector
constexpr int kPanelVectors = 4;
}  // namespace flashattn::cpu::FLASHATTN_ISA

#include "cpu/simd/portable.h"

#if defined(__AVX512BF16__)
#include "cpu/simd/avx512_bf16.h"
#endif
#if defined(__AVX512VBMI__)
#include "cpu/simd/avx512_vbmi.h"
#endif

namespace flashattn::cpu::FLASHATTN_ISA {

using portable::hold;

FLASHATTN_INLINE Longs multiply_low(Longs a, uint32_t b) {
  return reinterpret_cast<Longs>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(b)));
}

FLASHATTN_INLINE bool any(Ints mask) {
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
}

FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return reinterpret_cast<Floats>(_mm512_mask_mov_ps(
      reinterpret_cast<__m512>(y), _mm_test_epi8_mask(bytes, bytes), reinterpret_cast<__m512>(x)));
}

// maxps and minps return their second operand if one is a NaN.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      _mm512_max_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
}
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      _mm512_min_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
}

FLASHATTN_INLINE Floats multiply_subtract(Floats x, Floats y, Floats z) {
  return reinterpret_cast<Floats>(_mm512_fmsub_ps(
      reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(z)));
}

FLASHATTN_INLINE Floats reciprocal(Floats x) {
  const Floats r = reinterpret_cast<Floats>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return r * (2.0f - x * r);
}

// One conversion of all lanes; GCC converts generic vectors in two halves.
FLASHATTN_INLINE Words load_halves(const uint16_t* p) {
  return reinterpret_cast<Words>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
FLASHATTN_INLINE void store_halves(uint16_t* p, Words bits) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
}
FLASHATTN_INLINE Floats load_bf16(const void* p) {
  return from_bf16(load_halves(static_cast<const uint16_t*>(p)));
}
// AVX512-FP16 would not avoid fp32: its multiply-adds round every sum to fp16.
FLASHATTN_INLINE Floats load_f16(const void* p) {
  return reinterpret_cast<Floats>(
      _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
}

// As in simd/avx2.h: E4M3 as fp16, divided by 2^8.
constexpr float kF8Unit = 256.0f;
FLASHATTN_INLINE Floats load_f8_units(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  const __m256i twice = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_or_si256(twice, _mm256_set1_epi16(-0x4000)),
                                                _mm256_set1_epi16(-0x80));
  const __m256i once = _mm256_and_si256(twice, _mm256_set1_epi16(-0x4080));
  return reinterpret_cast<Floats>(
      _mm512_cvtph_ps(_mm256_mask_mov_epi16(once, nan, _mm256_set1_epi16(-1))));
}
FLASHATTN_INLINE void load_f8_pair(const void* p, Floats* first, Floats* second) {
  const __m256i bytes = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  const __m512i twice = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_or_si512(twice, _mm512_set1_epi16(-0x4000)),
                                                _mm512_set1_epi16(-0x80));
  const __m512i once = _mm512_and_si512(twice, _mm512_set1_epi16(-0x4080));
  const __m512i halves = _mm512_mask_mov_epi16(once, nan, _mm512_set1_epi16(-1));
  *first = reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
  *second = reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
}
FLASHATTN_INLINE Floats load_i8(const void* p) {
  return reinterpret_cast<Floats>(
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))));
}
FLASHATTN_INLINE void store_bytes(void* p, Words bits) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(bits)));
}

#if !defined(__AVX512BF16__)
using portable::dot_bf16;
using portable::pair_bf16;

FLASHATTN_INLINE void store_bf16_row(uint32_t* p, Floats first, Floats second) {
  store_halves(reinterpret_cast<uint16_t*>(p), to_bf16(first));
  store_halves(reinterpret_cast<uint16_t*>(p) + kWidth, to_bf16(second));
}
#endif

FLASHATTN_INLINE void interleave(Words a, Words b, Words* first, Words* second) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  *first = reinterpret_cast<Words>(_mm512_permutex2var_epi16(x, low, y));
  *second = reinterpret_cast<Words>(_mm512_permutex2var_epi16(x, high, y));
}

// vreduceps gives x less the next integer below, and vscalefps takes that integer from x itself:
// one instruction each. AMD's processors, for which avx512_bf16 is chosen, are faster at rounding
// to the nearest integer.
#if !defined(__AVX512BF16__) || defined(__AMX_BF16__)
constexpr bool kExp2FromBelow = true;
#else
constexpr bool kExp2FromBelow = false;
#endif

struct Exp2Power {
  __mmask16 normal;  // lanes whose 2^x is at least 2^-126; others become 0
  __m512 whole;
};

template <bool kNonPositive>
FLASHATTN_INLINE Exp2Power split_exp2(Floats& x) {
  const __m512 given = reinterpret_cast<__m512>(x);
  Exp2Power power;
  power.normal = _mm512_cmp_ps_mask(given, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  if constexpr (kExp2FromBelow) {
    power.whole = given;
    x = reinterpret_cast<Floats>(_mm512_reduce_ps(given, _MM_FROUND_TO_NEG_INF));
  } else {
    power.whole = _mm512_roundscale_ps(given, _MM_FROUND_TO_NEAREST_INT);
    x = reinterpret_cast<Floats>(given) - reinterpret_cast<Floats>(power.whole);
  }
  return power;
}

FLASHATTN_INLINE Floats scale_exp2(Floats x, Exp2Power power) {
  return reinterpret_cast<Floats>(
      _mm512_maskz_scalef_ps(power.normal, reinterpret_cast<__m512>(x), power.whole));
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
