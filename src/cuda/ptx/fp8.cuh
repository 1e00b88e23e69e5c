// Conversions to and from E4M3, one PTX instruction per function.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// The type of an operand of 8 bits: 4 of the exponent, 3 of the significand, no infinity; the
// largest number is 448.
struct E4m3 {
  uint8_t bits;
};
constexpr float kMaxE4m3 = 448.0f;

// Rounds to nearest even; numbers beyond the largest become the largest. `low` comes first in
// memory.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
  return pair;
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return pack_e4m3(a, b) | pack_e4m3(c, d) << 16;
}

// The same, where it stands: the compiler does not move it. Between the instructions that make its
// operands and the next barrier, vote or branch ptxas merges both pairs as it converts them, in two
// instructions; elsewhere it needs a third.
__device__ __forceinline__ uint32_t pack_e4m3_here(float a, float b, float c, float d) {
  uint32_t four;
  asm volatile(
      "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Whether unpack_e4m3() is one instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kUnpacksE4m3 = false;
#else
constexpr bool kUnpacksE4m3 = true;
#endif

// Converts the two numbers in the low half of `pair` to fp16, exactly. Only where kUnpacksE4m3.
__device__ __forceinline__ uint32_t unpack_e4m3(uint32_t pair) {
  uint32_t r = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(pair)));
#endif
  return r;
}

}  // namespace flashattn::cuda::ptx
