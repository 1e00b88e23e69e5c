// Tensor-core mma and conversions of its operands, one PTX instruction per function.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn::cuda::ptx {

// d += a b, 16 x 8 x 16, with fp32 accumulation. With g = lane / 4 and c = lane % 4, d holds (g,
// 2c), (g, 2c+1), (g+8, 2c), (g+8, 2c+1); a pairs of k at (g, 2c), (g+8, 2c), (g, 2c+8), (g+8,
// 2c+8); b pairs of k at (2c, g), (2c+8, g).
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b, 16 x 8 x 8, in TF32: only the sign, the exponent and the 10 highest bits of the
// fraction of each operand count. a holds k at (g, c), (g+8, c), (g, c+4), (g+8, c+4); b k at (c,
// g), (c+4, g).
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Converts two floats to T and packs them, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// pack with ReLU: negative values become 0.
template <class T>
__device__ __forceinline__ uint32_t pack_relu(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_relu<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack_relu<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// pack for Hopper in which numbers beyond the range of fp16 become its largest; those of bf16
// are not limited.
template <class T>
__device__ __forceinline__ uint32_t pack_saturated(float low, float high) {
  return pack<T>(low, high);
}

template <>
__device__ __forceinline__ uint32_t pack_saturated<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The inverse of pack.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  float2 r;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(r.x), "=f"(r.y)
      : "r"(pair));
  return r;
}

// Returns `seen`, whose halves are 0 or NaN, with NaN added where a half of `pair` is not finite.
template <class T>
__device__ __forceinline__ uint32_t add_nonfinite(uint32_t seen, uint32_t pair);

template <>
__device__ __forceinline__ uint32_t add_nonfinite<__nv_bfloat16>(uint32_t seen, uint32_t pair) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(seen) : "r"(pair), "r"(0));
  return seen;
}

template <>
__device__ __forceinline__ uint32_t add_nonfinite<__half>(uint32_t seen, uint32_t pair) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(seen) : "r"(pair), "r"(0));
  return seen;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// max(|x|, |y|) per half; a NaN loses to a number.
__device__ __forceinline__ uint32_t max_abs_f16x2(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("{.reg .b32 a, b; abs.f16x2 a, %1; abs.f16x2 b, %2; max.f16x2 %0, a, b;}"
      : "=r"(r)
      : "r"(x), "r"(y));
  return r;
}

// max(x, |y|) per half, for x >= 0; a NaN loses to a number.
template <class T>
__device__ __forceinline__ uint32_t max_with_abs(uint32_t x, uint32_t y);

template <>
__device__ __forceinline__ uint32_t max_with_abs<__nv_bfloat16>(uint32_t x, uint32_t y) {
  asm("{.reg .b32 a; and.b32 a, %1, 0x7fff7fff; max.bf16x2 %0, %0, a;}" : "+r"(x) : "r"(y));
  return x;
}

template <>
__device__ __forceinline__ uint32_t max_with_abs<__half>(uint32_t x, uint32_t y) {
  asm("{.reg .b32 a; and.b32 a, %1, 0x7fff7fff; max.f16x2 %0, %0, a;}" : "+r"(x) : "r"(y));
  return x;
}

// Per half: all ones if it is not 0, else 0. For both 16-bit types.
__device__ __forceinline__ uint32_t nonzero_mask(uint32_t pair) {
  uint32_t r;
  asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(0));
  return r;
}

// Each of the four digits of `selector` chooses a byte: 0 to 3 of low, 4 to 7 of high; with 8
// added, eight copies of that byte's sign, which __byte_perm() does not know.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}

// Transposes an 8 x 8 matrix of 16-bit elements; a lane holds columns 2 (lane % 4) and the next of
// row lane / 4.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// Per half: all bits equal to its sign bit.
__device__ __forceinline__ uint32_t sign_mask(uint32_t pair) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(r) : "r"(pair));
  return r;
}

// 2^x; 0 below 2^-126.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) within 2^-11 of itself.
__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) of a normal x, as log2f() computes it.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashattn::cuda::ptx
