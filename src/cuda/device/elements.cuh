// Neighbouring elements of a row, by type, to and from fp32.
#pragma once

#include "cuda/device/e4m3.cuh"
#include "cuda/device/vec4.cuh"

namespace flashattn::cuda {

// kCount elements: 1, or 8 that are aligned to 16 bytes, or to 8 in E4M3.
template <class T, int kCount>
__device__ __forceinline__ void load_elements(const T* from, float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (sizeof(T) == 1) {
      uint32_t pairs[2];
      f16_of_e4m3<1>(from->bits, pairs);
      x[0] = ptx::unpack<__half>(pairs[0]).x;
    } else {
      x[0] = to_float(*from);
    }
  } else if constexpr (sizeof(T) == 1) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    uint32_t pairs[2][2];
    f16_of_e4m3<1>(words.x, pairs[0]);
    f16_of_e4m3<1>(words.y, pairs[1]);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      const float2 two = ptx::unpack<__half>(pairs[n / 4][n / 2 % 2]);
      x[n] = two.x, x[n + 1] = two.y;
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + n);
      x[n] = four.x, x[n + 1] = four.y, x[n + 2] = four.z, x[n + 3] = four.w;
    }
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      const float2 two = ptx::unpack<T>(pairs[n / 2]);
      x[n] = two.x, x[n + 1] = two.y;
    }
  }
}

template <class T, int kCount>
__device__ __forceinline__ void store_elements(T* to, const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (sizeof(T) == 4) {
      *to = x[0];
    } else if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(ptx::pack<T>(x[0], 0.0f));
    } else {
      to->bits = static_cast<uint8_t>(to_e4m3(x[0], 0.0f));
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      *reinterpret_cast<float4*>(to + n) = {x[n], x[n + 1], x[n + 2], x[n + 3]};
    }
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint4*>(to) = {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]),
                                     ptx::pack<T>(x[4], x[5]), ptx::pack<T>(x[6], x[7])};
  } else {
    *reinterpret_cast<uint2*>(to) = {to_e4m3(x[0], x[1], x[2], x[3]),
                                     to_e4m3(x[4], x[5], x[6], x[7])};
  }
}

// The operand (q, k or v) that this CTA works on. In a grid the CTAs of an operand are consecutive.
template <class Operand>
__device__ __forceinline__ const Operand& operand_of_cta(const Operand (&operands)[3]) {
  return operands[blockIdx.x >= operands[2].first_cta   ? 2
                  : blockIdx.x >= operands[1].first_cta ? 1
                                                        : 0];
}

}  // namespace flashattn::cuda
