// Vectors of 256 bits: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace flashattn::cpu::FLASHATTN_ISA {
constexpr int kWidth = 8;  // floats a vector
constexpr int kPanelVectors = 2;
}  // namespace flashattn::cpu::FLASHATTN_ISA

#include "cpu/simd/portable.h"

namespace flashattn::cpu::FLASHATTN_ISA {

using portable::dot_bf16;
using portable::Exp2Power;
using portable::interleave;
using portable::kExp2FromBelow;
using portable::multiply_subtract;
using portable::pair_bf16;
using portable::reciprocal;
using portable::scale_exp2;
using portable::store_bf16_row;
using portable::store_bytes;
using portable::store_halves;

FLASHATTN_INLINE Longs multiply_low(Longs a, uint32_t b) {
  return reinterpret_cast<Longs>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(b)));
}

// Without it compilers, which have 16 registers, load x again for each product, and loads, two a
// cycle, become the limit.
FLASHATTN_INLINE void hold(Words& x) { __asm__("" : "+x"(x)); }

FLASHATTN_INLINE bool any(Ints mask) {
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
}

FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  const __m256i none = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
  return reinterpret_cast<Floats>(_mm256_blendv_ps(
      reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y), _mm256_castsi256_ps(none)));
}

// maxps and minps return their second operand if one is a NaN.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      _mm256_max_ps(reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(x)));
}
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) {
  return reinterpret_cast<Floats>(
      _mm256_min_ps(reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(x)));
}

// One conversion of all lanes; GCC converts a generic vector in two halves.
FLASHATTN_INLINE Words load_halves(const uint16_t* p) {
  return reinterpret_cast<Words>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// One shuffle, where widening and shifting take three instructions.
FLASHATTN_INLINE Floats load_bf16(const void* p) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i order = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1,
                                         -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return reinterpret_cast<Floats>(_mm256_shuffle_epi8(both, order));
}

FLASHATTN_INLINE Floats load_f16(const void* p) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}

// E4M3's exponent and mantissa in the fields of fp16 are the number divided by 2^8, subnormals
// included. The arithmetic shift leaves the sign there twice; a mask clears the copy. NaN, the
// largest magnitude, becomes a NaN of fp16 by setting all bits.
constexpr float kF8Unit = 256.0f;
FLASHATTN_INLINE Floats load_f8_units(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  const __m128i twice = _mm_srai_epi16(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes), 1);
  const __m128i nan =
      _mm_cmpeq_epi16(_mm_or_si128(twice, _mm_set1_epi16(-0x4000)), _mm_set1_epi16(-0x80));
  const __m128i once = _mm_and_si128(twice, _mm_set1_epi16(-0x4080));
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_or_si128(once, nan)));
}
FLASHATTN_INLINE void load_f8_pair(const void* p, Floats* first, Floats* second) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i order = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1,
                                         8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  const __m256i twice = _mm256_srai_epi16(_mm256_shuffle_epi8(both, order), 1);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_or_si256(twice, _mm256_set1_epi16(-0x4000)),
                                         _mm256_set1_epi16(-0x80));
  const __m256i halves = _mm256_or_si256(_mm256_and_si256(twice, _mm256_set1_epi16(-0x4080)), nan);
  *first = reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  *second = reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

FLASHATTN_INLINE Floats load_i8(const void* p) {
  return reinterpret_cast<Floats>(
      _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)))));
}

// As portable::split_exp2, but the integer comes from vroundps, sooner than from the sum.
template <bool kNonPositive>
FLASHATTN_INLINE Exp2Power split_exp2(Floats& x) {
  if (!kNonPositive) x = min_keep_nan(x, splat(128.0f));
  x = max_keep_nan(x, splat(-127.0f));
  const Floats shifted = x + splat(portable::kRoundingMagic);
  x -= reinterpret_cast<Floats>(
      _mm256_round_ps(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return portable::exp2_power(shifted);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
