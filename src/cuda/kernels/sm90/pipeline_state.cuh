// Buffers that producers fill and consumers empty in turn.
#pragma once

#include <cstdint>

namespace flashattn::cuda::sm90 {

// A place in a ring of kLength buffers, and how often it went round: one register.
template <int kLength>
struct PipelineState {
  static_assert((kLength & (kLength - 1)) == 0, "the slot is the low bits");
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t slot() const { return count % kLength; }
  __device__ __forceinline__ uint32_t phase() const { return count / kLength & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace flashattn::cuda::sm90
