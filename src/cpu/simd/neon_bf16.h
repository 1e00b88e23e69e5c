// BF16 of Armv8.2: products of pairs of bf16, and conversion to bf16. In products subnormals count
// as zero, and sums are rounded to odd.
#pragma once

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE Floats dot_bf16(Floats sum, Words a, Words b) {
  return reinterpret_cast<Floats>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum),
                                              reinterpret_cast<bfloat16x8_t>(a),
                                              reinterpret_cast<bfloat16x8_t>(b)));
}

FLASHATTN_INLINE void store_bf16_row(uint32_t* p, Floats first, Floats second) {
  const bfloat16x8_t low = vcvtq_low_bf16_f32(reinterpret_cast<float32x4_t>(first));
  store_words(
      p, reinterpret_cast<Words>(vcvtq_high_bf16_f32(low, reinterpret_cast<float32x4_t>(second))));
}

FLASHATTN_INLINE Words pair_bf16(Floats low, Floats high) {
  const uint16x8_t a =
      vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(reinterpret_cast<float32x4_t>(low)));
  const uint16x8_t b =
      vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(reinterpret_cast<float32x4_t>(high)));
  return reinterpret_cast<Words>(vzip1q_u16(a, b));
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
