// The pipeline of dQ in the Hopper backward kernels.
#pragma once

#include "cuda/device/pipeline.cuh"

namespace flashattn::cuda::sm90 {

// dQ from the warpgroups that compute it to the two reducers, which take Q tiles in turn: a stage
// has a `full` barrier for each reducer. `uses` counts earlier fills of a stage: for producers
// those by this writer, for consumers those for this reducer. kWriters: warpgroups that fill each
// stage in turn; a stage has an `empty` barrier for each, which says that its fill has been read.
template <int kStages, int kWriters = 1>
class DqPipeline {
 public:
  __device__ __forceinline__ void init(uint32_t producers, uint32_t consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full_[0][stage].init(producers);
      full_[1][stage].init(producers);
      for (int writer = 0; writer < kWriters; ++writer) empty_[writer][stage].init(consumers);
    }
  }

  // Waits until fill `uses - 1` by this writer has been read.
  __device__ __forceinline__ void producer_acquire(int32_t stage, uint32_t uses,
                                                   int32_t writer = 0) {
    empty_[writer][stage].wait((uses & 1) ^ 1);
  }
  __device__ __forceinline__ void producer_commit(uint32_t reducer, int32_t stage) {
    full_[reducer][stage].arrive();
  }
  __device__ __forceinline__ void consumer_wait(uint32_t reducer, int32_t stage, uint32_t uses) {
    full_[reducer][stage].wait(uses & 1);
  }
  __device__ __forceinline__ void consumer_release(int32_t stage, int32_t writer = 0) {
    empty_[writer][stage].arrive();
  }

 private:
  Barrier full_[2][kStages], empty_[kWriters][kStages];
};

}  // namespace flashattn::cuda::sm90
