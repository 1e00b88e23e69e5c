// The powers of two by which a CTA of the forward pass scales fp32 tensors before it splits them
// into pairs of fp16, see mma_3xfp16.cuh. They lie in shared memory. Q's is set once; those of K
// and V by their first tile that is not zero.
#pragma once

#include <cfloat>

#include "cuda/device/mma_3xfp16.cuh"

namespace flashattn::cuda::sm80 {

template <int kThreads>
class Fp32BlockScale {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 8, "eight words a tensor");
  // Word offsets: maxima of warps, eight a tensor; then per tensor its scale, 0 if not set yet;
  // whether a value overflowed; the exponent by which the scale is reduced.
  static constexpr int kScale = 24, kOverflowed = 28, kReduction = 32, kWords = 36;

 public:
  enum Tensor { kQ, kK, kV };
  static constexpr int kBytes = kWords * 4;

  __device__ __forceinline__ explicit Fp32BlockScale(uint32_t base) : base_(base) {}

  // All threads call this and the functions below. A barrier must follow before the first split().
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int x = kScale; x < kWords; ++x) store(x, 0);
    }
  }

  // Splits Q, for whose cp.async the thread has waited and which no thread has read. Contains a
  // barrier.
  template <class Tile>
  __device__ __forceinline__ void split_q(Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    own.split(set_scale(kQ, own.max_bits()));
  }

  // Splits a tile of K or V. A barrier must lie between any two calls.
  template <class Tile>
  __device__ __forceinline__ void split(Tensor tensor, Tile tile) const {
    const TileSplit<kThreads, Tile> own(tile);
    float scale = __uint_as_float(load(kScale + tensor));
    if (scale == 0.0f) scale = set_scale(tensor, own.max_bits());
    if (own.split(scale)) store(kOverflowed + tensor, 1);
  }

  // After a barrier: the factor of S that replaces `scale`, which is positive and finite. The
  // result is so, too, so that neither -inf nor 0 becomes NaN. output_factor(): the factor of P V.
  __device__ __forceinline__ float score_factor(float scale) const {
    scale *= 1 / Fp16Pair::kLoScale;
    return fminf(fmaxf(scale * inverse(kQ) * inverse(kK), FLT_MIN), FLT_MAX);
  }
  __device__ __forceinline__ float output_factor() const {
    return inverse(kV) / Fp16Pair::kLoScale;
  }

  // Whether a value overflowed; the mainloop must then run again with smaller scales.
  __device__ __forceinline__ bool must_redo() const {
    __syncthreads();
    const uint32_t k = load(kOverflowed + kK), v = load(kOverflowed + kV);
    if ((k | v) == 0) return false;
    __syncthreads();  // all threads have read the flags
    if (threadIdx.x == 0) {
      reduce_scale(kK, k);
      reduce_scale(kV, v);
    }
    return true;
  }

 private:
  __device__ __forceinline__ float inverse(Tensor tensor) const {
    const uint32_t scale = load(kScale + tensor);
    return scale == 0 ? 1.0f : __uint_as_float((254u << 23) - scale);
  }

  // Sets the tensor's scale; max_bits: of the thread's largest value. Returns the scale.
  __device__ __forceinline__ float set_scale(Tensor tensor, int32_t max_bits) const {
    max_bits = __reduce_max_sync(~0u, max_bits);
    if (threadIdx.x % 32 == 0) store(tensor * 8 + threadIdx.x / 32, max_bits);
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      max_bits = max(max_bits, static_cast<int32_t>(load(tensor * 8 + warp)));
    }
    if (max_bits == 0) return 1.0f;
    // The exponent of the scaled maximum; Q's maximum is final.
    const int32_t above = tensor == kQ ? 3 : 9 - static_cast<int32_t>(load(kReduction + tensor));
    const int32_t exponent = min(max(254 + above - (max_bits >> 23), 1), 253);
    const uint32_t scale = static_cast<uint32_t>(exponent) << 23;
    if (threadIdx.x == 0) store(kScale + tensor, scale);
    return __uint_as_float(scale);
  }

  __device__ __forceinline__ void reduce_scale(Tensor tensor, uint32_t overflowed) const {
    store(kScale + tensor, 0);
    store(kOverflowed + tensor, 0);
    store(kReduction + tensor, load(kReduction + tensor) + overflowed * 12);
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
