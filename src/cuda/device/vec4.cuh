// Vectors of four neighbouring elements in memory.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda {

// kAligned: the address is aligned to 16 bytes, or to 8 for 16-bit types.
template <bool kAligned, class T>
__device__ __forceinline__ float4 load_vec4(const T* from) {
  if constexpr (!kAligned) {
    return {to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
  } else if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    const float2 x = ptx::unpack<T>(pairs.x), y = ptx::unpack<T>(pairs.y);
    return {x.x, x.y, y.x, y.y};
  }
}

// kAligned: the address is aligned to 8 bytes.
template <bool kAligned, class T>
__device__ __forceinline__ void store_vec4(T* to, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      if constexpr (kAligned) {
        *reinterpret_cast<float2*>(to + n) = {x[n], x[n + 1]};
      } else {
        to[n] = x[n];
        to[n + 1] = x[n + 1];
      }
    }
  } else {
    const uint2 pairs{ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3])};
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(to) = pairs;
    } else {
      uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
#pragma unroll
      for (int n = 0; n < 4; ++n) halves[n] = (n < 2 ? pairs.x : pairs.y) >> n % 2 * 16;
    }
  }
}

}  // namespace flashattn::cuda
