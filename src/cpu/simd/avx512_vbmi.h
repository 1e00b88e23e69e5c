// AVX512-VBMI: E4M3 becomes pairs of bf16 by looking up the bytes of each number in tables. Numbers
// are divided by kF8Unit, as load_f8_units() has them.
#pragma once

namespace flashattn::cpu::FLASHATTN_ISA {

// The low and the high byte of each magnitude of E4M3 as bf16.
struct alignas(64) F8Tables {
  uint8_t low[128], high[128];

  constexpr F8Tables() : low(), high() {
    for (int32_t code = 0; code < 128; ++code) {
      // A subnormal is its mantissa times the unit of the smallest exponent.
      int32_t exponent = code < 8 ? 1 : code >> 3, mantissa = code < 8 ? code : 8 + code % 8;
      for (; mantissa > 0 && mantissa < 8; mantissa *= 2) --exponent;
      constexpr int32_t kRebias = 127 - 7 - 8;  // 8: kF8Unit is 2^8
      int32_t bits = mantissa > 0 ? (exponent + kRebias) << 7 | mantissa % 8 << 4 : 0;
      if (code == 127) bits = 0x7fc0;  // NaN
      low[code] = static_cast<uint8_t>(bits & 0xff);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr F8Tables kF8Tables;

// Makes bf16 of 64 numbers: those of bytes 0 to 7 of each 128 bits, and those of bytes 8 to 15.
FLASHATTN_INLINE void f8_to_bf16(__m512i bytes, __m512i* first, __m512i* second) {
  const auto look_up = [=](const uint8_t* table) FLASHATTN_INLINED {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
  };
  constexpr int kOrAnd = 0xf8;  // x | (y & z)
  const __m512i low = look_up(kF8Tables.low);
  const __m512i high =
      _mm512_ternarylogic_epi32(look_up(kF8Tables.high), bytes, _mm512_set1_epi8(-0x80), kOrAnd);
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

// load_byte_pairs() of simd.h.
FLASHATTN_INLINE void load_f8_pairs(const void* p, Words (&words)[2]) {
  // 4 pairs (n, n + 16) of the first 32 numbers, then 4 of the others, in each 128 bits.
  alignas(64) static constexpr uint8_t kOrder[64] = {
      0,  16, 1,  17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51, 4,  20, 5,  21, 6,  22,
      7,  23, 36, 52, 37, 53, 38, 54, 39, 55, 8,  24, 9,  25, 10, 26, 11, 27, 40, 56, 41, 57,
      42, 58, 43, 59, 12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63};
  __m512i pairs[2];
  f8_to_bf16(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder), _mm512_loadu_si512(p)), &pairs[0],
             &pairs[1]);
  words[0] = reinterpret_cast<Words>(pairs[0]);
  words[1] = reinterpret_cast<Words>(pairs[1]);
}

// Puts 4 numbers of each 16 of a row into each 128 bits.
FLASHATTN_INLINE __m512i load_f8_spread(const void* p) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(p));
}

// load_unit_vectors() of simd.h.
FLASHATTN_INLINE void load_f8_vectors(const void* p, Floats (&x)[4]) {
  __m512i pairs[2];
  f8_to_bf16(load_f8_spread(p), &pairs[0], &pairs[1]);
  const __m512i zero = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    x[2 * n] = reinterpret_cast<Floats>(_mm512_unpacklo_epi16(zero, pairs[n]));
    x[2 * n + 1] = reinterpret_cast<Floats>(_mm512_unpackhi_epi16(zero, pairs[n]));
  }
}

// load_byte_columns() of simd.h.
FLASHATTN_INLINE void load_f8_columns(const void* first, const void* second, Words (&words)[4]) {
  const __m512i a = load_f8_spread(first), b = load_f8_spread(second);
  __m512i pairs[4];
  f8_to_bf16(_mm512_unpacklo_epi8(a, b), &pairs[0], &pairs[1]);
  f8_to_bf16(_mm512_unpackhi_epi8(a, b), &pairs[2], &pairs[3]);
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) words[n] = reinterpret_cast<Words>(pairs[n]);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
