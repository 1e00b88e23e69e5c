// Pipeline state: the position in a circular buffer that producers fill and consumers empty.
#pragma once

#include <cstdint>

namespace flashattn::cuda::sm90 {

// Stage and mbarrier parity of a pipeline of kStages buffers, in one register.
template <int kStages>
struct PipelineState {
  static_assert((kStages & (kStages - 1)) == 0, "the stage is the low bits");
  uint32_t count = 0;  // stages passed

  __device__ __forceinline__ uint32_t slot() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace flashattn::cuda::sm90
