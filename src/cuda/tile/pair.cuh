// Two neighbouring numbers of a row, as operands hold them and as shared memory and arrays do: one
// word of 16-bit elements, two of fp32.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

template <class T>
struct Pair {
  uint32_t word;

  static __device__ __forceinline__ Pair of(float x, float y) { return {ptx::pack<T>(x, y)}; }
  static __device__ __forceinline__ Pair load_shared(uint32_t from) {
    return {ptx::load_shared(from)};
  }
  __device__ __forceinline__ void store_shared(uint32_t to) const { ptx::store_shared(to, word); }
  __device__ __forceinline__ void store_if(bool condition, char* to) const {
    ptx::store_if(condition, to, word);
  }
  __device__ __forceinline__ float2 numbers() const { return ptx::unpack<T>(word); }
  // 0 where the other is 0, whatever stands here.
  __device__ __forceinline__ Pair where(Pair other) const {
    return {word & ptx::not_zero(other.word)};
  }
};

template <>
struct Pair<float> {
  float2 pair;

  static __device__ __forceinline__ Pair of(float x, float y) { return {make_float2(x, y)}; }
  static __device__ __forceinline__ Pair load_shared(uint32_t from) {
    return {ptx::load_shared_pair(from)};
  }
  __device__ __forceinline__ void store_shared(uint32_t to) const {
    ptx::store_shared_pair(to, pair);
  }
  __device__ __forceinline__ void store_if(bool condition, char* to) const {
    ptx::store_if(condition, reinterpret_cast<float*>(to), pair.x, pair.y);
  }
  __device__ __forceinline__ float2 numbers() const { return pair; }
  __device__ __forceinline__ Pair where(Pair other) const {
    return of(other.pair.x == 0.0f ? 0.0f : pair.x, other.pair.y == 0.0f ? 0.0f : pair.y);
  }
};

}  // namespace flashattn::cuda
