// A consumer warpgroup of the Hopper forward pass: its work tiles, its rows, its barriers. Its
// epilogue and its score modifications are views of this state.
#pragma once

#include "cuda/kernels/sm90/fwd_stream_k.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// IDs of named barriers; 0 is __syncthreads().
constexpr int kWarpSchedulerBarrier = 1;  // + warpgroup: it may issue its WGMMAs
constexpr int kWarpgroupBarrier = 8;      // + warpgroup: its four warps

template <class Config>
class FwdConsumer : public BiasPosition<Config::kHasDenseBias, Config::kBiasStages> {
 public:
  static constexpr int kConsumers = Config::kConsumers, kTileQ = Config::kTileQ;

  __device__ __forceinline__ FwdConsumer(const ForwardParams& params, uint32_t shared,
                                         SharedStorage<Config>& storage, int32_t warpgroup)
      : params_(params),
        storage_(storage),
        shared_(shared),
        warpgroup_(warpgroup),
        leader_(threadIdx.x % 128 == 0) {}

  // Volatile: fields are read from shared memory at each use, which saves registers for the
  // mainloop.
  __device__ __forceinline__ const volatile WorkTile<kConsumers>& work_tile() const {
    return storage_.work_tiles[work_state_.stage()];
  }
  __device__ __forceinline__ const volatile WarpgroupTile& warpgroup_tile() const {
    return work_tile().warpgroups[warpgroup_];
  }
  // Packed heads only.
  __device__ __forceinline__ const volatile PackedTile& packed_tile() const {
    return storage_.packed_tiles[work_state_.stage()];
  }
  // The results of a work tile are partial if it covers only a range of its rows' keys: a split
  // with packed heads, a partial with stream-K. The one that comes first also adds the sink.
  static constexpr bool kMayBePartial = Config::kPacksHeads || Config::kUseStreamK;
  __device__ __forceinline__ bool is_partial() const {
    return kMayBePartial && work_tile().is_partial;
  }
  __device__ __forceinline__ bool is_first_partial() const {
    if constexpr (Config::kPacksHeads) return packed_tile().split_idx == 0;
    if constexpr (!Config::kUseStreamK) return true;
    if (!is_partial()) return true;
    const StreamK::Partial partial = partial_of(params_, work_tile().work_idx);
    return partial.index == partial.first;
  }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  // This lane has two rows of the tile, row() and row() + 8; `mi` is 0 or 1 for them.
  __device__ __forceinline__ int32_t row() const {
    return warpgroup_ * 64 + no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }

  // Row i is the work tile's `query` plus the row in the tile. These return its query, its query
  // head, and whether the GQA group has that head.
  __device__ __forceinline__ int32_t query_of(int32_t i) const {
    if constexpr (!Config::kPacksHeads) return i;
    return i >> params_.packed.log2_group;
  }
  __device__ __forceinline__ int32_t head_of(int32_t i) const {
    if constexpr (!Config::kPacksHeads) return work_tile().h;
    return work_tile().h + (i & ((1 << params_.packed.log2_group) - 1));
  }
  __device__ __forceinline__ bool has_head(int32_t i) const {
    if constexpr (!Config::kPacksHeads) return true;
    return (i & ((1 << params_.packed.log2_group) - 1)) < params_.problem.q_heads_per_kv_head();
  }
  // Index of row i in partial_o and partial_sums.
  __device__ __forceinline__ int64_t partial_row(int32_t i) const {
    if constexpr (Config::kUseStreamK) {
      const int64_t partial = partial_of(params_, work_tile().work_idx).index;
      return partial * kTileQ + i - work_tile().query;
    } else {
      const int64_t part =
          static_cast<int64_t>(packed_tile().split_idx) * params_.args.shape.batch + work_tile().b;
      return (part * params_.problem.heads_q + head_of(i)) * params_.packed.partial_queries +
             query_of(i);
    }
  }

  // Calls process() for each work tile.
  template <class Process>
  __device__ __forceinline__ void for_each_work_tile(Process process) {
    if (Config::kUseSchedulerBarrier && warpgroup_ == 0)
      ptx::named_arrive(kWarpSchedulerBarrier, 256);
    for (;; work_state_.advance()) {
      storage_.work.consumer_wait(work_state_);
      const WorkKind kind = work_tile().kind;
      if (kind == WorkKind::kEnd) break;
      if (kind == WorkKind::kTile) process();
      __syncwarp();
      if (lane() == 0) {
        if (kind == WorkKind::kDrain) storage_.all_done.arrive();
        storage_.work.consumer_release(work_state_);
      }
    }
    if (leader_) ptx::bulk_wait();
  }

  // Waits for and releases a KV tile that only other warpgroups need. in_order: passes the
  // scheduler barrier, as every step does.
  __device__ __forceinline__ void skip_tile(PipelineState<Config::kStages>& kv_state,
                                            bool in_order) {
    if (in_order) {
      warp_scheduler_sync();
      warp_scheduler_arrive();
    }
    storage_.k.consumer_wait(kv_state);
    storage_.v.consumer_wait(kv_state);
    warpgroup_sync();
    consumer_release(storage_.k, kv_state);
    consumer_release(storage_.v, kv_state);
    kv_state.advance();
  }

  // Skips KV tiles n down to `last`. Not unrolled: usual tiles jump over this code.
  __device__ __forceinline__ void skip_tiles(PipelineState<Config::kStages>& kv_state, int32_t& n,
                                             int32_t last) {
#pragma unroll 1
    for (; n >= last; --n) skip_tile(kv_state, true);
  }

  // Called before a stage is released without a WGMMA, which would synchronise the four warps: none
  // of them may miss a whole phase of the barrier.
  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kWarpgroupBarrier + warpgroup_, 128);
  }

  // Waits until this warpgroup may issue its WGMMAs; lets the next warpgroup issue.
  __device__ __forceinline__ void warp_scheduler_sync() {
    if (Config::kUseSchedulerBarrier) ptx::named_sync(kWarpSchedulerBarrier + warpgroup_, 256);
  }
  __device__ __forceinline__ void warp_scheduler_arrive() {
    if (Config::kUseSchedulerBarrier) {
      ptx::named_arrive(kWarpSchedulerBarrier + (warpgroup_ + 1) % kConsumers, 256);
    }
  }

  // One thread arrives for the warpgroup: the WGMMA that read the stage was one of all four warps.
  __device__ __forceinline__ void consumer_release(
      Pipeline<Config::kStages>& pipeline, const PipelineState<Config::kStages>& state) const {
    if (leader_) pipeline.consumer_release(state);
  }

  __device__ __forceinline__ void release_q() const {
    if (leader_) storage_.q.consumer_release(q_state_, warpgroup_);
  }

  // Advances past the bias of a KV tile, which has been read.
  __device__ __forceinline__ void advance_bias() {
    if constexpr (Config::kHasDenseBias) {
      this->bias_state_.count +=
          BiasPanels<Config::kTileKv>::count(dtype_size(params_.problem.dtype_bias));
    }
  }

  // The number of keys that row mi sees, not counting block masks and biases.
  __device__ __forceinline__ int32_t visible_keys_of(int mi) const {
    const volatile Interval& keys = storage_.visible_kv[row() + mi * 8];
    return max(keys.end - keys.begin, 0);
  }

  const ForwardParams& params_;
  SharedStorage<Config>& storage_;
  const uint32_t shared_;
  const int32_t warpgroup_;
  const bool leader_;
  PipelineState<kWorkStages> work_state_;
  PipelineState<Config::kQStages> q_state_;
};

}  // namespace flashattn::cuda::sm90
