// dQ reduction of the Hopper backward pass: two threads add dQ, tile by tile, to the fp32
// accumulator in global memory, by bulk reduce-add.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tiles.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// wait_for_order() or claim_initial_store() comes before a KV tile adds to a dQ tile. Both return
// whether the KV tile is the first, which stores instead, so that dQ need not be cleared; see
// BackwardParams::dq_states.
//
// In order (RUN_TO_RUN): KV tiles add one after the other, from the last that the queries see down
// to the first. CTAs take them in that order, so that none waits for a CTA that has not started.
// All begin next to the diagonal: under a causal mask each is a step ahead of the one that waits
// for it.
__device__ __forceinline__ bool wait_for_order(const int32_t* state, int32_t left) {
  int32_t now = ptx::load_acquire(state);
  while (now / kDqPendingTile != left) {
    __nanosleep(20);
    now = ptx::load_acquire(state);
  }
  return !(now & kDqOpen);
}

// In any order: claims the initial store, or waits until the CTA that claimed it has stored. The
// caller's dQ must already be in shared memory, as others wait for its store.
__device__ __forceinline__ bool claim_initial_store(int32_t* state) {
  int32_t now = ptx::fetch_or_acquire(state, kDqClaimed);
  if (!(now & kDqClaimed)) return true;
  while (!(now & kDqOpen)) {
    __nanosleep(20);
    now = ptx::load_acquire(state);
  }
  return false;
}

// Adds the dQ subtiles that arrive in shared memory. Two threads take every other Q tile each: one
// waits for its turn while the other's additions run.
template <class Config>
class DqReducer {
  // A CTA adds all columns; in a cluster its half.
  static constexpr int kBytes = Config::kDqStageBytes, kStages = Config::kDqStages;
  static constexpr int kFills = Config::kDqFills;

 public:
  __device__ __forceinline__ DqReducer(const BackwardParams& params, uint32_t shared,
                                       BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_work_tile(
        storage_, [&](const volatile BwdWorkTile<Config>& work_tile, WorkTileState at) {
          const auto add = [&](int32_t, int32_t, int32_t workspace_tile, QTileEntry) {
            if (iter_++ % 2 == reducer())
              publish(workspace_tile, this->add(work_tile, workspace_tile));
          };
          for_each_tile<Config>(work_tile, params_, add);
          // Where registers are scarce, the stage is found anew.
          storage_.work.consumer_release(
              kHalfWarpPostprocess<Config> ? WorkTileState{no_hoist(at.count)} : at);
        });
    ptx::bulk_wait();
    if constexpr (Config::kInlinePostprocess) {
      if (!ordered() && own_tiles() > 0) decrement_pending((own_tiles() - 1) % kDeferredTiles + 1);
    }
  }

 private:
  __device__ __forceinline__ uint32_t reducer() const { return no_hoist(threadIdx.x) / 32 % 2; }
  __device__ __forceinline__ bool ordered() const { return params_.common.ordered; }

  __device__ __forceinline__ int32_t state_idx(int32_t workspace_tile) const {
    return no_hoist(workspace_tile) * kClusterSize<Config> +
           static_cast<int32_t>(cta_rank<Config>());
  }
  __device__ __forceinline__ int32_t* state(int32_t workspace_tile) const {
    return params_.common.dq_states + state_idx(workspace_tile);
  }

  __device__ __forceinline__ float* dq_at(int32_t workspace_tile) const {
    return params_.common.dq +
           static_cast<int64_t>(state_idx(workspace_tile)) * (kFills * (kBytes / 4));
  }

  // The number of KV tiles still to be added when it is this one's turn.
  __device__ __forceinline__ int32_t tiles_before(const volatile BwdWorkTile<Config>& work_tile,
                                                  int32_t workspace_tile) const {
    if constexpr (Config::kHasBlockMask) {
      return work_tile.q_tile_list[params_.q_tile_list_size + (iter_ - 1 - work_tile.iter_begin)];
    }
    return work_tile.key / Config::kClusterTileKv -
           params_.common.dq_first[no_hoist(workspace_tile)] + 1;
  }

  // Starts to add the next dQ tile. Returns whether it is the initial store.
  __device__ __forceinline__ bool add(const volatile BwdWorkTile<Config>& work_tile,
                                      int32_t workspace_tile) {
    bool first =
        ordered() ? wait_for_order(state(workspace_tile), tiles_before(work_tile, workspace_tile))
                  : !(ptx::load_acquire(state(workspace_tile)) & kDqOpen);
    ptx::fence_async_proxy_global();
    uint32_t uses = (own_tiles() - 1) * (kFills / kStages);  // earlier fills for this reducer
    storage_.dq.consumer_wait(reducer(), 0, uses);
    if (!ordered() && first) {
      first = claim_initial_store(state(workspace_tile));
      ptx::fence_async_proxy_global();
    }
    float* to = dq_at(workspace_tile);
#pragma unroll 1
    for (int n = 0; n < kFills; n += kStages, ++uses) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage, to += kBytes / 4) {
        storage_.dq.consumer_wait(reducer(), stage, uses);
        if (first) {
          ptx::bulk_store(to, shared_ + Config::kDq + stage * kBytes, kBytes);
        } else {
          ptx::bulk_reduce_add(to, shared_ + Config::kDq + stage * kBytes, kBytes, ptx::kEvictLast);
        }
        ptx::bulk_commit();
      }
      release_stages(Config::kDqWriters > 1 ? n / kStages : 0);
    }
    return first;
  }

  // Publishes that a dQ tile has been added: in order at once, otherwise a few tiles together, as
  // additions take long while many CTAs add to the same tile, and so does the fence.
  __device__ __forceinline__ void publish(int32_t workspace_tile, bool first) const {
    if (ordered()) {
      ptx::bulk_wait();
      ptx::red_add_release(state(workspace_tile),
                           (first ? kDqClaimed + kDqOpen : 0) - kDqPendingTile);
    } else {
      if (first) {
        ptx::bulk_wait();
        // An or, not an add: if sequences overlap, the tile may have been converted for another
        // one, and have all bits set.
        ptx::red_or_release(state(workspace_tile), kDqOpen);
      }
      if constexpr (Config::kInlinePostprocess) {
        if (own_tiles() > kDeferredTiles && own_tiles() % kDeferredTiles == 1) {
          ptx::bulk_wait<kFills>();
          decrement_pending(kDeferredTiles);
        }
        storage_.dq_postprocess.deferred[reducer()][own_tiles() % kDeferredTiles] = workspace_tile;
      }
    }
  }

  // Decrements the KV tiles still to be added for the last `tiles` deferred dQ tiles.
  __device__ __forceinline__ void decrement_pending(uint32_t tiles) const {
    ptx::fence_gpu();
#pragma unroll 1
    for (uint32_t n = 1; n <= tiles; ++n) {
      const int32_t workspace_tile =
          storage_.dq_postprocess.deferred[reducer()][n % kDeferredTiles];
      ptx::red_add_relaxed(state(workspace_tile), -kDqPendingTile);
    }
  }

  // This thread's Q tiles so far, the current one included.
  __device__ __forceinline__ uint32_t own_tiles() const { return (iter_ + 1 - reducer()) / 2; }

  // Releases the dQ stages one by one, as the bulk copies have read them.
  template <int kStage = 0>
  __device__ __forceinline__ void release_stages(int32_t writer) const {
    if constexpr (kStage < kStages) {
      ptx::bulk_wait_read<kStages - 1 - kStage>();
      storage_.dq.consumer_release(kStage, writer);
      release_stages<kStage + 1>(writer);
    }
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
  uint32_t iter_ = 0;  // Q tiles so far, of both reducers
};

}  // namespace flashattn::cuda::sm90
