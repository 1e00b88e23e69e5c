// Vectors of SVE, of 256 bits: the compiler fixes the length, and processors of another length do
// not run this code.
#pragma once

#include <arm_sve.h>

static_assert(__ARM_FEATURE_SVE_BITS == 256, "compiled with -msve-vector-bits=256");

namespace flashattn::cpu::FLASHATTN_ISA {
constexpr int kWidth = 8;  // floats a vector
constexpr int kPanelVectors = 4;
}  // namespace flashattn::cpu::FLASHATTN_ISA

#include "cpu/simd/portable.h"

namespace flashattn::cpu::FLASHATTN_ISA {

using portable::dot_bf16;
using portable::Exp2Power;
using portable::kExp2FromBelow;
using portable::multiply_low;
using portable::multiply_subtract;
using portable::pair_bf16;
using portable::reciprocal;
using portable::scale_exp2;
using portable::split_exp2;
using portable::store_bf16_row;

FLASHATTN_INLINE svbool_t all_lanes() { return svptrue_b32(); }

FLASHATTN_INLINE void hold(Words& x) { __asm__("" : "+w"(x)); }

FLASHATTN_INLINE bool any(Ints mask) {
  return svptest_any(all_lanes(), svcmpne_n_s32(all_lanes(), svint32_t(mask), 0));
}

FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
  const svuint32_t bytes = svld1ub_u32(all_lanes(), static_cast<const uint8_t*>(p));
  const svbool_t some = svcmpne_n_u32(all_lanes(), bytes, 0);
  return Floats(svsel_f32(some, svfloat32_t(x), svfloat32_t(y)));
}

// fmax and fmin return a NaN if either operand is one.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) {
  return Floats(svmax_f32_x(all_lanes(), svfloat32_t(x), svfloat32_t(y)));
}
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) {
  return Floats(svmin_f32_x(all_lanes(), svfloat32_t(x), svfloat32_t(y)));
}

FLASHATTN_INLINE Words load_halves(const uint16_t* p) { return Words(svld1uh_u32(all_lanes(), p)); }
FLASHATTN_INLINE void store_halves(uint16_t* p, Words bits) {
  svst1h_u32(all_lanes(), p, svuint32_t(bits));
}
FLASHATTN_INLINE Floats load_bf16(const void* p) {
  return from_bf16(load_halves(static_cast<const uint16_t*>(p)));
}

// fcvt takes the low halves of words.
FLASHATTN_INLINE Floats widen_f16(Words bits) {
  return Floats(svcvt_f32_f16_x(all_lanes(), svreinterpret_f16_u32(svuint32_t(bits))));
}
FLASHATTN_INLINE Floats load_f16(const void* p) {
  return widen_f16(load_halves(static_cast<const uint16_t*>(p)));
}

// As in simd/avx2.h: E4M3 as fp16, divided by 2^8.
constexpr float kF8Unit = 256.0f;
FLASHATTN_INLINE Floats load_f8_units(const void* p) {
  const Ints twice = Ints(svld1sb_s32(all_lanes(), static_cast<const int8_t*>(p))) << 7;
  const Ints nan = (twice | -0x4000) == -0x80;
  return widen_f16(reinterpret_cast<Words>((twice & -0x4080) | nan));
}
FLASHATTN_INLINE Floats load_i8(const void* p) {
  return __builtin_convertvector(Ints(svld1sb_s32(all_lanes(), static_cast<const int8_t*>(p))),
                                 Floats);
}
FLASHATTN_INLINE void load_f8_pair(const void* p, Floats* first, Floats* second) {
  *first = load_f8_units(p);
  *second = load_f8_units(static_cast<const char*>(p) + kWidth);
}
FLASHATTN_INLINE void store_bytes(void* p, Words bits) {
  svst1b_u32(all_lanes(), static_cast<uint8_t*>(p), svuint32_t(bits));
}

FLASHATTN_INLINE void interleave(Words a, Words b, Words* first, Words* second) {
  const svuint16_t x = svreinterpret_u16_u32(svuint32_t(a));
  const svuint16_t y = svreinterpret_u16_u32(svuint32_t(b));
  *first = Words(svreinterpret_u32_u16(svzip1_u16(x, y)));
  *second = Words(svreinterpret_u32_u16(svzip2_u16(x, y)));
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
