// Numbers rounded to E4M3 on every architecture.
#pragma once

#include "cuda/ptx/fp8.cuh"

namespace flashattn::cuda {

// Two numbers, `low` first in memory: to nearest even, and 448 beyond.
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

}  // namespace flashattn::cuda
