// Tile scheduler of the Hopper forward pass: a warp that plans work tiles, and again those whose
// base overflowed.
#pragma once

#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"
#include "cuda/kernels/sm90/fwd_packed.cuh"
#include "cuda/kernels/sm90/fwd_stream_k.cuh"

namespace flashattn::cuda::sm90 {

// The dynamic tile scheduler, one warp: it plans work tiles, up to kWorkStages ahead. work_idx is
// the index of a Q tile in the order of L2Swizzle; with stream-K see is_split().
template <class Config>
class SchedulerWarp {
 public:
  __device__ __forceinline__ SchedulerWarp(const ForwardParams& params,
                                           SharedStorage<Config>& storage)
      : params_(params), storage_(storage), leader_(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void run() {
    const int32_t end = first_of(work_items());
    int32_t next = first_of(blockIdx.x);
    if (next == 0) clear_counter();
    int32_t redo_slot = 0;  // tiles since the last drain
    bool redo = false;
    for (;;) {
      int32_t work_idx = -1;
      bool taken = false;
      if (redo && redo_slot < kRedoCapacity) {
        work_idx = *static_cast<volatile int32_t*>(&storage_.redo_queue[redo_slot]) - 1;
        __syncwarp();
        if (leader_) storage_.redo_queue[redo_slot] = 0;
      } else if (!redo && redo_slot < kRedoCapacity && next < end) {
        work_idx = next;
        taken = true;
      } else {
        redo = !redo && drain();
        if (!redo && next >= end) break;
        redo_slot = 0;
        continue;
      }
      if (work_idx >= 0) {
        storage_.work.producer_acquire(work_state_);
        WorkTile<Config::kConsumers>& work_tile = storage_.work_tiles[work_state_.stage()];
        if (leader_) work_tile.redo_slot = redo_slot;
        if (plan(work_idx, redo, work_tile)) {
          if constexpr (kMayHideTiles<Config>) {
            commit_visible_tiles(work_tile);
          } else {
            producer_commit();
          }
          // The next tile is taken as late as possible, which balances the load of CTAs.
          storage_.prefetch_next.wait(phases_ >> 1);
          phases_ ^= 2;
        }
      }
      if (taken) next = has_second(work_idx) ? work_idx + 1 : next_tile();
      if (work_idx >= 0 || redo) ++redo_slot;
    }
    send(WorkKind::kEnd);
  }

 private:
  __device__ __forceinline__ int32_t work_items() const {
    if constexpr (Config::kUseStreamK) return params_.stream_k.work_items;
    return params_.swizzle.count();
  }
  // first_of(): the first work tile of a work item. has_second(): whether the item of work tile
  // work_idx has another after it.
  static __device__ __forceinline__ int32_t first_of(int32_t work_item) {
    return Config::kUseStreamK ? 2 * work_item : work_item;
  }
  __device__ __forceinline__ bool has_second(int32_t work_idx) const {
    if constexpr (!Config::kUseStreamK) return false;
    return is_split(params_, work_idx) && partial_of(params_, work_idx).more;
  }

  __device__ __forceinline__ bool plan(int32_t work_idx, bool redo,
                                       WorkTile<Config::kConsumers>& work_tile) {
    if constexpr (Config::kPacksHeads) {
      return plan_packed_tile<Config>(params_, work_idx, redo, work_tile,
                                      storage_.packed_tiles[work_state_.stage()]);
    } else if constexpr (Config::kUseStreamK) {
      return plan_stream_k_tile<Config>(params_, work_idx, redo, work_tile);
    } else {
      return plan_work_tile<Config>(params_, work_idx, work_idx, {}, redo, work_tile);
    }
  }

  __device__ __forceinline__ int32_t next_tile() {
    if (params_.tile_counter == nullptr) return kNoWork;
    int32_t taken = 0;
    if (leader_) {
      TileCounter& counter = *params_.tile_counter;
      while (!counter_cleared_) {
        counter_cleared_ = ptx::load_acquire(&counter.stamp) == params_.stamp;
        if (!counter_cleared_) __nanosleep(100);
      }
      taken = atomicAdd(&counter.taken, 1);
      if (taken == work_items() - 1) ptx::store_relaxed(&counter.stamp, uint64_t{0});
    }
    return first_of(static_cast<int32_t>(gridDim.x) + __shfl_sync(~0u, taken, 0));
  }

  __device__ __forceinline__ void clear_counter() const {
    if (params_.tile_counter == nullptr || !leader_) return;
    params_.tile_counter->taken = 0;
    ptx::store_release(&params_.tile_counter->stamp, params_.stamp);
  }

  // Lanes that have written a WarpgroupTile arrive.
  __device__ __forceinline__ void producer_commit() {
    __syncwarp();
    if (threadIdx.x % 32 < Config::kConsumers) storage_.work.producer_commit(work_state_);
    work_state_.advance();
  }

  // Limits all warpgroups to the KV tiles from the first to the last that the block mask does not
  // hide, sends the work tile, and then the windows of its KV tiles.
  __device__ __forceinline__ void commit_visible_tiles(WorkTile<Config::kConsumers>& work_tile) {
    __syncwarp();
    // Volatile: fields are read from shared memory at each use, as registers are scarce.
    const volatile WorkTile<Config::kConsumers>& at = work_tile;
    BlockSparseTiles<ForwardParams, Config::kTileQ, Config::kTileKv, Config::kConsumers> tiles(
        params_);
    int32_t begin = at.kv_begin, end = at.kv_end;
    if (begin < end) {
      tiles.fetch_ahead(at, (end - 1) / 32);  // while the first tile is sought
      begin = tiles.first_visible(at, begin, end);
      end = begin < end ? tiles.last_visible(at, end - 1, begin) + 1 : begin;
    }
    __syncwarp();
    if (leader_) {
      work_tile.kv_begin = begin;
      work_tile.kv_end = end;
#pragma unroll
      for (int n = 0; n < Config::kConsumers; ++n) {
        work_tile.warpgroups[n].kv_begin = begin;
        work_tile.warpgroups[n].kv_end = end;
      }
    }
    producer_commit();
    if (!(params_.problem.mask & FLASHATTN_MASK_BLOCKS) || begin >= end) return;
    int32_t left = (end - 1) / 32 - begin / 32;
#pragma unroll 1
    for (;;) {
      send_window(tiles.window());
      if (left-- == 0) break;
      tiles.look_below(at);
    }
  }

  // Sends a window to the producers, if it has a visible tile.
  __device__ __forceinline__ void send_window(const KvTileWindow<Config::kConsumers>& window) {
    if (window.visible() == 0) return;
    storage_.windows.producer_acquire(window_state_);
    __syncwarp();  // all lanes have seen this phase
    if (leader_) {
      storage_.window_of_stage[window_state_.stage()] = window;
      storage_.windows.producer_commit(window_state_);
    }
    window_state_.advance();
  }

  __device__ __forceinline__ void send(WorkKind kind) {
    storage_.work.producer_acquire(work_state_);
    if (leader_) storage_.work_tiles[work_state_.stage()].kind = kind;
    producer_commit();
  }

  // Waits until all work tiles so far are done. Returns whether some must be recomputed.
  __device__ __forceinline__ bool drain() {
    send(WorkKind::kDrain);
    storage_.all_done.wait(phases_ & 1);
    phases_ ^= 1;
    const bool base_overflowed = *static_cast<volatile int32_t*>(&storage_.base_overflowed) != 0;
    __syncwarp();
    if (leader_) storage_.base_overflowed = 0;
    return base_overflowed;
  }

  const ForwardParams& params_;
  SharedStorage<Config>& storage_;
  const bool leader_;
  PipelineState<kWorkStages> work_state_;
  PipelineState<kWindowStages> window_state_;
  uint32_t phases_ = 0;  // parities: bit 0 of all_done, bit 1 of prefetch_next
  bool counter_cleared_ = false;
};

}  // namespace flashattn::cuda::sm90
