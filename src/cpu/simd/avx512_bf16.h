// AVX512-BF16: products of pairs of bf16, and conversion to bf16. Subnormals count as zero in both.
#pragma once

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE Floats dot_bf16(Floats sum, Words a, Words b) {
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}

FLASHATTN_INLINE void store_bf16_row(uint32_t* p, Floats first, Floats second) {
  store_words(p, reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second),
                                                             reinterpret_cast<__m512>(first))));
}

FLASHATTN_INLINE Words pair_bf16(Floats low, Floats high) {
  const __m512bh halves =
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return reinterpret_cast<Words>(
      _mm512_permutexvar_epi16(index, reinterpret_cast<__m512i>(halves)));
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
