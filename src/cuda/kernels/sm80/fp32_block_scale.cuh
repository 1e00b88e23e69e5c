// The powers of two that a block of the forward pass multiplies tensors of fp32 by before it splits
// them, see mma_3xfp16.cuh. They lie in shared memory: of Q from the start, of K and V from the
// first tile on that is not zero.
#pragma once

#include <cfloat>

#include "cuda/device/mma_3xfp16.cuh"

namespace flashattn::cuda::sm80 {

template <int kThreads>
class BlockFactors {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 8, "eight words a tensor");
  // Where, in words: maxima of warps, eight a tensor; then of each tensor its factor, 0 where it is
  // not known; whether a number was too large; by how many powers of two the factor is lowered.
  static constexpr int kFactor = 24, kExceeded = 28, kLowered = 32, kWords = 36;

 public:
  enum Tensor { kQ, kK, kV };
  static constexpr int kBytes = kWords * 4;

  __device__ __forceinline__ explicit BlockFactors(uint32_t base) : base_(base) {}

  // By all threads, as are the others; a barrier must follow before the first split().
  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (int x = kFactor; x < kWords; ++x) put(x, 0);
    }
  }

  // Splits a tile whose copies the thread has waited for; nobody has read it yet. Has a barrier
  // inside.
  template <class Tile>
  __device__ __forceinline__ void split_queries(Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    own.split(measure(kQ, own.largest()));
  }

  // The same, where the block meets at a barrier between any two calls.
  template <class Tile>
  __device__ __forceinline__ void split(Tensor tensor, Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    float factor = __uint_as_float(word(kFactor + tensor));
    if (factor == 0.0f) factor = measure(tensor, own.largest());
    if (own.split(factor)) put(kExceeded + tensor, 1);
  }

  // Once the block has met: what to multiply products of Q and K with instead of `factor`, positive
  // and finite as that is, so that neither -inf nor 0 become NaN; and what sums of V with.
  __device__ __forceinline__ float of_scores(float factor) const {
    factor *= 1 / Halves::kUnit;
    return fminf(fmaxf(factor * inverse(kQ) * inverse(kK), FLT_MIN), FLT_MAX);
  }
  __device__ __forceinline__ float of_output() const { return inverse(kV) / Halves::kUnit; }

  // Whether numbers were too large: then all is to be done again.
  __device__ __forceinline__ bool again() const {
    __syncthreads();
    const uint32_t k = word(kExceeded + kK), v = word(kExceeded + kV);
    if ((k | v) == 0) return false;
    __syncthreads();  // all know
    if (threadIdx.x == 0) {
      lower(kK, k);
      lower(kV, v);
    }
    return true;
  }

 private:
  __device__ __forceinline__ float inverse(Tensor tensor) const {
    const uint32_t factor = word(kFactor + tensor);
    return factor == 0 ? 1.0f : __uint_as_float((254u << 23) - factor);
  }

  // Bits of the largest number of the thread's share to the tensor's factor.
  __device__ __forceinline__ float measure(Tensor tensor, int32_t top) const {
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32 == 0) put(tensor * 8 + threadIdx.x / 32, top);
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      top = max(top, static_cast<int32_t>(word(tensor * 8 + warp)));
    }
    if (top == 0) return 1.0f;
    // Q's maximum does not change any more.
    const int32_t above = tensor == kQ ? 3 : 9 - static_cast<int32_t>(word(kLowered + tensor));
    const int32_t exponent = min(max(254 + above - (top >> 23), 1), 253);
    const uint32_t factor = static_cast<uint32_t>(exponent) << 23;
    if (threadIdx.x == 0) put(kFactor + tensor, factor);
    return __uint_as_float(factor);
  }

  __device__ __forceinline__ void lower(Tensor tensor, uint32_t exceeded) const {
    put(kFactor + tensor, 0);
    put(kExceeded + tensor, 0);
    put(kLowered + tensor, word(kLowered + tensor) + exceeded * 12);
  }

  __device__ __forceinline__ uint32_t word(int index) const {
    return ptx::load_shared(base_ + index * 4);
  }
  __device__ __forceinline__ void put(int index, uint32_t x) const {
    ptx::store_shared(base_ + index * 4, x);
  }

  uint32_t base_;
};

}  // namespace flashattn::cuda::sm80
