// Epilogue of a consumer warpgroup of the Hopper forward pass: it stores its rows of O, by TMA or
// row by row. Also the state that all layers of the consumer share.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// IDs of named barriers; 0 is __syncthreads().
constexpr int kWarpSchedulerBarrier = 1;  // + warpgroup: it may issue its WGMMAs
constexpr int kWarpgroupBarrier = 8;      // + warpgroup: its four warps

template <class Config>
class FwdEpilogue {
 protected:
  using T = typename Config::T;
  using OAccum = float[Config::kDimV / 2];  // this lane's accumulators of O
  static constexpr int kConsumers = Config::kConsumers, kTileQ = Config::kTileQ;
  // O is stored in kOSubtiles parts of these sizes.
  static constexpr int kPanels = Config::kPanelsV / Config::kOSubtiles;
  static constexpr int kSubtileColumns = Config::kDimV / Config::kOSubtiles;

  __device__ __forceinline__ FwdEpilogue(const ForwardParams& params, uint32_t shared,
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
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  // This lane has two rows of the tile, row() and row() + 8; `mi` is 0 or 1 for them.
  __device__ __forceinline__ int32_t row() const {
    return warpgroup_ * 64 + no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
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

  // Waits for and releases a KV tile that only other warpgroups need. in_order: as every step does,
  // it passes the scheduler barrier.
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

  // Called before a stage is released without a WGMMA, which would synchronise the four warps: none
  // of them may miss a whole phase of the barrier.
  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kWarpgroupBarrier + warpgroup_, 128);
  }

  // The warpgroup's turn to issue its WGMMAs; the next one's turn.
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

  __device__ __forceinline__ char* o_row_ptr(int32_t i, int32_t size) const {
    return tensor_row(params_.args.o, size, work_tile().b, work_tile().h, work_tile().offset_q + i);
  }

  // The number of keys that row mi sees, not counting block masks and biases.
  __device__ __forceinline__ int32_t visible_keys_of(int mi) const {
    const volatile Interval& keys = storage_.visible_kv[row() + mi * 8];
    return max(keys.end - keys.begin, 0);
  }

  __device__ __forceinline__ void store_fp32(const OAccum& o) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t i = work_tile().query + row() + mi * 8;
      const int32_t columns = i < work_tile().query_end ? params_.problem.dim_v : 0;
      float* out = reinterpret_cast<float*>(o_row_ptr(i, 4)) + lane() % 4 * 2;
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        ptx::store_if(x * 8 < columns, out + x * 8, o[4 * x + mi * 2], o[4 * x + mi * 2 + 1]);
      }
    }
  }

  // Shared-memory address of a 16-byte chunk of O: swizzled panels of 64 columns, like Q.
  __device__ __forceinline__ uint32_t staging_address(int32_t row, int32_t chunk) const {
    return shared_ + Config::kOOffset + chunk / 8 * kTileQ * 128 + (warpgroup_ * 64 + row) * 128 +
           ((chunk % 8 ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void store_to_smem(const OAccum& o, int subtile) const {
    // TMA may still read the buffer for the subtile before. A redo also waits until the tile's
    // first result is written, which its own must overwrite.
    if (leader_) {
      if (work_tile().redo_online) {
        ptx::bulk_wait();
        ptx::fence_async_proxy_global();
      } else {
        ptx::bulk_wait_read();
      }
    }
    ptx::named_sync(kWarpgroupBarrier + warpgroup_, 128);
    const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < kSubtileColumns / 16; ++j) {
      const float* x = &o[subtile * (kSubtileColumns / 2) + 8 * j];
      ptx::stmatrix_x4(staging_address(r, 2 * j + lane() / 16), ptx::pack<T>(x[0], x[1]),
                       ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                       ptx::pack<T>(x[6], x[7]));
    }
  }

  __device__ __forceinline__ void store_tma(int subtile) const {
    ptx::fence_async_proxy();
    ptx::named_sync(kWarpgroupBarrier + warpgroup_, 128);
    if (!leader_ || work_tile().query + warpgroup_ * 64 >= work_tile().query_end) return;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_store(&params_.o, staging_address(0, p * 8),
                     {(subtile * kPanels + p) * 64, work_tile().query + warpgroup_ * 64,
                      work_tile().h, work_tile().b});
    }
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void store_rows(int subtile) const {
    constexpr int kChunks = 8 * kPanels;
    __syncwarp();
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + x / kChunks, chunk = x % kChunks;
      const int32_t i = work_tile().query + warpgroup_ * 64 + r;
      const int32_t column = (subtile * kChunks + chunk) * 8;
      if (i >= work_tile().query_end || column >= params_.problem.dim_v) continue;
      *reinterpret_cast<int4*>(o_row_ptr(i, 2) + column * 2) =
          ptx::load_shared_16(staging_address(r, chunk));
    }
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
