// The powers of two that a block of the forward pass multiplies tensors of fp32 by before it splits
// them, see mma_3xfp16.cuh. They lie in shared memory: of Q from the start, of K and V from the
// first tile on that is not zero.
#pragma once

#include <cfloat>

#include "cuda/device/mma_3xfp16.cuh"

namespace flashattn::cuda::sm80 {

template <int kThreads>
class Fp32BlockScale {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 8, "eight words a tensor");
  // Where, in words: maxima of warps, eight a tensor; then of each tensor its factor, 0 where it is
  // not known; whether a number was too large; by how many powers of two the factor is lowered.
  static constexpr int kScale = 24, kExceeded = 28, kReduction = 32, kWords = 36;

 public:
  enum Tensor { kQ, kK, kV };
  static constexpr int kBytes = kWords * 4;

  __device__ __forceinline__ explicit Fp32BlockScale(uint32_t base) : base_(base) {}

  // By all threads, as are the others; a barrier must follow before the first split().
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int x = kScale; x < kWords; ++x) store(x, 0);
    }
  }

  // Splits a tile whose copies the thread has waited for; nobody has read it yet. Has a barrier
  // inside.
  template <class Tile>
  __device__ __forceinline__ void split_q(Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    own.split(set_scale(kQ, own.max_bits()));
  }

  // The same, where the block meets at a barrier between any two calls.
  template <class Tile>
  __device__ __forceinline__ void split(Tensor tensor, Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    float scale = __uint_as_float(load(kScale + tensor));
    if (scale == 0.0f) scale = set_scale(tensor, own.max_bits());
    if (own.split(scale)) store(kExceeded + tensor, 1);
  }

  // Once the block has met: what to multiply products of Q and K with instead of `factor`, positive
  // and finite as that is, so that neither -inf nor 0 become NaN; and what sums of V with.
  __device__ __forceinline__ float score_factor(float scale) const {
    scale *= 1 / Fp16Pair::kLoScale;
    return fminf(fmaxf(scale * inverse(kQ) * inverse(kK), FLT_MIN), FLT_MAX);
  }
  __device__ __forceinline__ float output_factor() const {
    return inverse(kV) / Fp16Pair::kLoScale;
  }

  // Whether numbers were too large: then all is to be done again.
  __device__ __forceinline__ bool redo() const {
    __syncthreads();
    const uint32_t k = load(kExceeded + kK), v = load(kExceeded + kV);
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
    const uint32_t scale = load(kScale + tensor);
    return scale == 0 ? 1.0f : __uint_as_float((254u << 23) - scale);
  }

  // Bits of the largest number of the thread's share to the tensor's factor.
  __device__ __forceinline__ float set_scale(Tensor tensor, int32_t max_bits) const {
    max_bits = __reduce_max_sync(~0u, max_bits);
    if (threadIdx.x % 32 == 0) store(tensor * 8 + threadIdx.x / 32, max_bits);
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      max_bits = max(max_bits, static_cast<int32_t>(load(tensor * 8 + warp)));
    }
    if (max_bits == 0) return 1.0f;
    // Q's maximum does not change any more.
    const int32_t above = tensor == kQ ? 3 : 9 - static_cast<int32_t>(load(kReduction + tensor));
    const int32_t exponent = min(max(254 + above - (max_bits >> 23), 1), 253);
    const uint32_t scale = static_cast<uint32_t>(exponent) << 23;
    if (threadIdx.x == 0) store(kScale + tensor, scale);
    return __uint_as_float(scale);
  }

  __device__ __forceinline__ void lower(Tensor tensor, uint32_t exceeded) const {
    store(kScale + tensor, 0);
    store(kExceeded + tensor, 0);
    store(kReduction + tensor, load(kReduction + tensor) + exceeded * 12);
  }

  __device__ __forceinline__ uint32_t load(int index) const {
    return ptx::load_shared(base_ + index * 4);
  }
  __device__ __forceinline__ void store(int index, uint32_t x) const {
    ptx::store_shared(base_ + index * 4, x);
  }

  uint32_t base_;
};

}  // namespace flashattn::cuda::sm80
