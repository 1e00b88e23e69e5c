// Conversions to and from E4M3 on every architecture.
#pragma once

#include "cuda/ptx/fp8.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// Converts two numbers, `low` first in memory: rounds to nearest even, and to 448 beyond the range.
__device__ __forceinline__ uint32_t to_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  const auto convert = [](float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
    // Adding 2^14 leaves multiples of 2^-9, the unit of E4M3's subnormals, in the low bits.
    const uint32_t tiny = __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - 0x46800000u;
    const uint32_t rounded = magnitude >= 0x43e00000u  ? 0x7eu
                             : magnitude < 0x3c800000u ? tiny
                                                       : normal;
    return magnitude > 0x7f800000u ? 0x7fu : rounded | (bits & 0x80000000u) >> 24;
  };
  return convert(low) | convert(high) << 8;
#else
  return ptx::pack_e4m3(low, high);
#endif
}

__device__ __forceinline__ uint32_t to_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a, b) | to_e4m3(c, d) << 16;
}

// Converts the bytes of a word to fp16, exactly: pairs of neighbours (kStride 1: bytes 0 and 1, 2
// and 3), or of bytes 0 and 2, 1 and 3 (kStride 2).
template <int kStride>
__device__ __forceinline__ void f16_of_e4m3(uint32_t word, uint32_t (&pairs)[2]) {
  if (ptx::kUnpacksE4m3) {
    const uint32_t ordered = kStride == 1 ? word : __byte_perm(word, 0, 0x3120);
    pairs[0] = ptx::unpack_e4m3(ordered);
    pairs[1] = ptx::unpack_e4m3(ordered >> 16);
  } else {
    // In fp16 the exponent of E4M3 means 2^8 times less, also that of subnormals. A carry out of
    // the magnitude tells NaN.
    const auto convert = [](uint32_t high) {
      const uint32_t magnitude = high & 0x7f007f00u;
      const uint32_t carry = (magnitude + 0x01000100u) & 0x80008000u;
      return ptx::mul_f16x2((high & 0x80008000u) | magnitude >> 1 | carry >> 1, 0x5c005c00u);
    };
    pairs[0] = convert(__byte_perm(word, 0, kStride == 1 ? 0x1404 : 0x2404));
    pairs[1] = convert(__byte_perm(word, 0, kStride == 1 ? 0x3424 : 0x3414));
  }
}

}  // namespace flashattn::cuda
