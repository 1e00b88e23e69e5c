// Pipelines of stages in shared memory, which producers fill and consumers empty, and the mbarriers
// under them. The methods are named as those of CUTLASS's PipelineAsync and PipelineTmaAsync.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda {

// The shared-memory address, in the other CTA of a cluster of two, that corresponds to `address`.
__device__ __forceinline__ uint32_t peer_address(uint32_t address) {
  return ptx::mapa(address, ptx::cluster_rank() ^ 1);
}

// An mbarrier in shared memory. Its first phase has parity 0.
class Barrier {
 public:
  // A phase completes after `arrivals`, and the transfer of all bytes expected in it.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    ptx::mbarrier_init(address(), arrivals);
  }

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(&word_); }

  __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }
  // Arrives at the same barrier of the other CTA of a cluster of two.
  __device__ __forceinline__ void arrive_peer() {
    ptx::mbarrier_arrive_remote(peer_address(address()));
  }
  // Arrives, and expects bytes that TMA or another CTA will transfer in this phase.
  __device__ __forceinline__ void expect(uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(address(), bytes);
  }

  // Waits for a phase. A waiter may fall behind by at most one phase.
  __device__ __forceinline__ void wait(uint32_t parity) { ptx::mbarrier_wait(address(), parity); }
  __device__ __forceinline__ void wait_with_pair(uint32_t parity, const float (&pair)[2]) {
    ptx::mbarrier_wait_with_pair(address(), parity, pair[0], pair[1]);
  }
  // Waits only if `valid`, without a branch that the compiler sees.
  __device__ __forceinline__ void wait_if(bool valid, uint32_t parity) {
    ptx::mbarrier_wait_if(valid, address(), parity);
  }
  // Also acquires what other CTAs of the cluster released when they arrived.
  __device__ __forceinline__ void wait_cluster(uint32_t parity) {
    ptx::mbarrier_wait_cluster(address(), parity);
  }
  // Whether the phase is complete.
  __device__ __forceinline__ bool test(uint32_t parity) {
    return ptx::mbarrier_test(address(), parity);
  }

 private:
  uint64_t word_;
};

// Stage and phase of a position in a pipeline of kStages stages, in one register.
template <int kStages>
struct PipelineState {
  static_assert((kStages & (kStages - 1)) == 0, "kStages must be a power of two");
  uint32_t count = 0;  // stages passed

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

// The uses of one stage, where they are counted for each stage by itself.
struct StageState {
  int32_t index;
  uint32_t count = 0;  // uses passed

  __device__ __forceinline__ int32_t stage() const { return index; }
  __device__ __forceinline__ uint32_t phase() const { return count & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

// The barriers of a pipeline's stages in one direction, full or empty. Used alone where the other
// direction has barriers of its own. kSubstages: each stage has so many substages, with a barrier
// each.
template <int kStages, int kSubstages = 1, class State_ = PipelineState<kStages>>
class StageBarriers {
 public:
  using State = State_;

  __device__ __forceinline__ void init(uint32_t arrivals) {
    for (auto& stage : barriers_) {
      for (Barrier& barrier : stage) barrier.init(arrivals);
    }
  }

  __device__ __forceinline__ Barrier& at(State state, int32_t substage = 0) {
    return barriers_[state.stage()][substage];
  }

  __device__ __forceinline__ void arrive(State state, int32_t substage = 0) {
    at(state, substage).arrive();
  }
  // Waits for the phase of this use of the stage.
  __device__ __forceinline__ void wait(State state, int32_t substage = 0) {
    at(state, substage).wait(state.phase());
  }
  // Waits for the phase of the use before; the first use has none, and does not wait.
  __device__ __forceinline__ void wait_before(State state, int32_t substage = 0) {
    at(state, substage).wait(state.phase() ^ 1);
  }

 private:
  Barrier barriers_[kStages][kSubstages];
};

// kSubstages: producers fill, and consumers release, so many substages of a stage on their own.
// kCluster: consumers release a stage to both CTAs of a cluster of two, as both fill it.
template <int kStages, int kSubstages = 1, bool kCluster = false,
          class State_ = PipelineState<kStages>>
class Pipeline {
 public:
  using State = State_;

  // Arrivals that fill a substage, and arrivals that release it.
  __device__ __forceinline__ void init(uint32_t producers, uint32_t consumers) {
    full_.init(producers);
    empty_.init(consumers);
  }

  // Waits until the stage is free.
  __device__ __forceinline__ void producer_acquire(State state, int32_t substage = 0) {
    empty_.wait_before(state, substage);
  }
  // Whether the stage is free.
  __device__ __forceinline__ bool producer_test(State state, int32_t substage = 0) {
    return empty_.at(state, substage).test(state.phase() ^ 1);
  }
  // Arrives as a producer, and expects bytes that arrive at full_barrier().
  __device__ __forceinline__ void producer_expect(State state, uint32_t bytes,
                                                  int32_t substage = 0) {
    full_.at(state, substage).expect(bytes);
  }
  __device__ __forceinline__ void producer_commit(State state, int32_t substage = 0) {
    full_.arrive(state, substage);
  }

  __device__ __forceinline__ void consumer_wait(State state, int32_t substage = 0) {
    full_.wait(state, substage);
  }
  // See mbarrier_wait_with_pair().
  __device__ __forceinline__ void consumer_wait_with_pair(State state, const float (&pair)[2]) {
    full_.at(state, 0).wait_with_pair(state.phase(), pair);
  }
  // Waits only if `valid`, without a branch that the compiler sees.
  __device__ __forceinline__ void consumer_wait_if(bool valid, State state, int32_t substage = 0) {
    full_.at(state, substage).wait_if(valid, state.phase());
  }
  // Whether the stage is full.
  __device__ __forceinline__ bool consumer_test(State state, int32_t substage = 0) {
    return full_.at(state, substage).test(state.phase());
  }
  __device__ __forceinline__ void consumer_release(State state, int32_t substage = 0) {
    empty_.arrive(state, substage);
    if constexpr (kCluster) consumer_release_peer(state, substage);
  }
  __device__ __forceinline__ void consumer_release_peer(State state, int32_t substage = 0) {
    empty_.at(state, substage).arrive_peer();
  }

  __device__ __forceinline__ Barrier& full_barrier(State state, int32_t substage = 0) {
    return full_.at(state, substage);
  }
  __device__ __forceinline__ Barrier& empty_barrier(State state, int32_t substage = 0) {
    return empty_.at(state, substage);
  }

 private:
  StageBarriers<kStages, kSubstages, State> full_, empty_;
};

}  // namespace flashattn::cuda
