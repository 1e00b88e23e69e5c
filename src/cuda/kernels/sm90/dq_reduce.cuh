// The threads of the Hopper backward pass that add dQ, tile by tile, to the sums in global memory.
#pragma once

#include "cuda/kernels/sm90/bwd_config.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// Before a tile of keys adds to dQ of a tile of queries; whether it is the first to do so, and
// stores instead: nobody has to clear dQ. See dq_states.
//
// In order: tiles of keys add one after the other, the last that the queries see first, in the
// order in which blocks take them, so that nobody waits for a block that has not started. All begin
// next to the diagonal: under a causal mask each is a step ahead of the one that waits for it.
__device__ __forceinline__ bool await_turn(const int32_t* state, int32_t left) {
  int32_t now = ptx::load_acquire(state);
  while (now / kDqPendingTile != left) {
    __nanosleep(20);
    now = ptx::load_acquire(state);
  }
  return !(now & kDqOpen);
}

// In any order: until the first to come has stored. That one must have at hand what it stores.
__device__ __forceinline__ bool claim(int32_t* state) {
  int32_t now = ptx::fetch_or_acquire(state, kDqClaimed);
  if (!(now & kDqClaimed)) return true;
  while (!(now & kDqOpen)) {
    __nanosleep(20);
    now = ptx::load_acquire(state);
  }
  return false;
}

// Adds the shares of dQ, as those who compute them leave them in shared memory. Two threads do,
// each every other tile: one waits for its turn under the other's sums.
template <class Config>
class DqAdder {
  // The block adds its half of the columns, or all.
  static constexpr int kBytes = Config::kDqBytes, kSlots = Config::kDqSlots;
  static constexpr int kPieces = Config::kDqPieces;

 public:
  __device__ __forceinline__ DqAdder(const BackwardParams& params, uint32_t shared,
                                     BackwardControl<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_item(control_, [&](const volatile BackwardItem<Config>& item, uint32_t empty) {
      const auto add = [&](int32_t, int32_t, int32_t place) {
        if (count_++ % 2 == adder()) settle(place, this->add(item, place));
      };
      const auto skip = [&](int32_t place) {
        if (adder() != 0) return;
        if (ordered()) {
          await_turn(state(place), turn(item, place));
          ptx::add_release(state(place), -kDqPendingTile);
        } else if constexpr (Config::kConverts) {
          ptx::add_relaxed(state(place), -kDqPendingTile);
        }
      };
      for_each_tile<Config>(item, params_, add, skip);
      ptx::mbarrier_arrive(empty);
    });
    ptx::bulk_wait();
    if constexpr (Config::kConverts) {
      if (!ordered() && own() > 0) count((own() - 1) % kDqLater + 1);
    }
  }

 private:
  __device__ __forceinline__ uint32_t adder() const { return no_hoist(threadIdx.x) / 32 % 2; }
  __device__ __forceinline__ bool ordered() const { return params_.common.ordered; }

  __device__ __forceinline__ int32_t part(int32_t place) const {
    return no_hoist(place) * kBlocks<Config> + static_cast<int32_t>(block_rank<Config>());
  }
  __device__ __forceinline__ int32_t* state(int32_t place) const {
    return params_.common.dq_states + part(place);
  }

  __device__ __forceinline__ float* sums_at(int32_t place) const {
    return params_.common.dq + static_cast<int64_t>(part(place)) * (kPieces * (kBytes / 4));
  }

  // How many tiles of keys have yet to add when it is this one's turn.
  __device__ __forceinline__ int32_t turn(const volatile BackwardItem<Config>& item,
                                          int32_t place) const {
    return item.key / Config::kItemKv - params_.common.dq_first[no_hoist(place)] + 1;
  }

  // Starts to add the next tile; whether nothing lies there yet.
  __device__ __forceinline__ bool add(const volatile BackwardItem<Config>& item, int32_t place) {
    bool first = ordered() ? await_turn(state(place), turn(item, place))
                           : !(ptx::load_acquire(state(place)) & kDqOpen);
    ptx::fence_async_proxy_global();
    uint32_t uses = (own() - 1) * (kPieces / kSlots);  // of this thread's buffers
    ptx::mbarrier_wait(barrier_at(control_.dq_full[adder()][0]), uses & 1);
    if (!ordered() && first) {
      first = claim(state(place));
      ptx::fence_async_proxy_global();
    }
    float* to = sums_at(place);
#pragma unroll 1
    for (int n = 0; n < kPieces; n += kSlots, ++uses) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot, to += kBytes / 4) {
        ptx::mbarrier_wait(barrier_at(control_.dq_full[adder()][slot]), uses & 1);
        if (first) {
          ptx::bulk_store(to, shared_ + Config::kDq + slot * kBytes, kBytes);
        } else {
          ptx::bulk_reduce_add(to, shared_ + Config::kDq + slot * kBytes, kBytes, ptx::kEvictLast);
        }
        ptx::bulk_commit();
      }
      free_slots();
    }
    return first;
  }

  // When the sums have changed, says so. In order at once; else of a few tiles together: additions
  // take long while many blocks add to the same tile, and so does the fence.
  __device__ __forceinline__ void settle(int32_t place, bool first) const {
    if (ordered()) {
      ptx::bulk_wait();
      ptx::add_release(state(place), (first ? kDqClaimed + kDqOpen : 0) - kDqPendingTile);
    } else {
      if (first) {
        ptx::bulk_wait();
        // Not added: of sequences that overlap another may have been converted, and all bits set.
        ptx::or_release(state(place), kDqOpen);
      }
      if constexpr (Config::kConverts) {
        if (own() > kDqLater && own() % kDqLater == 1) {
          ptx::bulk_wait<kPieces>();
          count(kDqLater);
        }
        control_.convert.later[adder()][own() % kDqLater] = place;
      }
    }
  }

  // Of some tiles: one tile of keys less has yet to add.
  __device__ __forceinline__ void count(uint32_t tiles) const {
    ptx::fence_gpu();
#pragma unroll 1
    for (uint32_t n = 1; n <= tiles; ++n) {
      const int32_t place = control_.convert.later[adder()][n % kDqLater];
      ptx::add_relaxed(state(place), -kDqPendingTile);
    }
  }

  // Of this thread's tiles, the one at work included.
  __device__ __forceinline__ uint32_t own() const { return (count_ + 1 - adder()) / 2; }

  // Frees the buffers of dQ one by one, as they have been read.
  template <int kSlot = 0>
  __device__ __forceinline__ void free_slots() const {
    if constexpr (kSlot < kSlots) {
      ptx::bulk_wait_read<kSlots - 1 - kSlot>();
      ptx::mbarrier_arrive(barrier_at(control_.dq_empty[kSlot]));
      free_slots<kSlot + 1>();
    }
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  uint32_t count_ = 0;  // of tiles
};

}  // namespace flashattn::cuda::sm90
