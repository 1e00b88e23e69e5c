// The warpgroup of the Hopper backward pass that computes dQ = dS K, and leaves it to the thread
// that adds it.
#pragma once

#include "cuda/sm90/backward_config.cuh"
#include "cuda/tile/shared.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

// dS K over all keys of the tile: 64 columns, or 64 queries, by share.
template <class Config>
__device__ __forceinline__ void multiply_dq(float (&dq)[32], uint32_t shared, uint32_t k,
                                            uint32_t slot, int32_t share) {
  constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  const uint32_t columns = kTileQ == 64 ? share * kTileKv * 128 : 0;
  const uint32_t rows = kTileQ == 64 ? 0 : share * 64 * 128;
  const ptx::Matrix keys = ptx::Matrix::at(k + columns, 0);
  const ptx::Matrix scores =
      ptx::Matrix::at(shared + Config::kDs + slot * Config::kScoreBytes + rows, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kTileKv / 16; ++n) {
    ptx::wgmma_ss<typename Config::T, 0, 1>(
        dq, scores.further(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(),
        keys.further(n * 2048).descriptor(), n > 0);
  }
  ptx::wgmma_commit();
}

// To the thread that adds it, in the order of the accumulators: nobody else reads it.
template <class Config>
__device__ __forceinline__ void hand_over_dq(const float (&dq)[32],
                                             BackwardControl<Config>& control, uint32_t shared,
                                             uint32_t adder, int32_t slot) {
  const uint32_t to =
      shared + Config::kDq + slot * Config::kShareBytes + opaque(threadIdx.x) % 128 * 16;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    ptx::store_shared(to + n * 2048, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  }
  ptx::fence_async_proxy();
  __syncwarp();
  if (opaque(threadIdx.x) % 32 == 0) ptx::mbarrier_arrive(barrier_at(control.dq_full[adder][slot]));
}

// The warpgroup that computes dQ: tile by tile, whenever both consumers have left their dS. It
// fills the tensor cores where the consumers wait for their last product or compute exponentials.
template <class Config>
class DqGroup {
 public:
  __device__ __forceinline__ DqGroup(const BackwardParams& params, uint32_t shared,
                                     BackwardControl<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (Items items;; items.advance()) {
      ptx::mbarrier_wait(barrier_at(control_.item_full[items.slot()]), items.phase());
      const volatile BackwardItem& item = control_.items[items.slot()];
      if (item.end) break;
      while (place_.count != item.done) step(keys_at<Config>(shared_, item));
      ptx::named_sync(kDqBarrier, 128);  // all have read the item
      if (leader()) {
        if (item.done != item.before) free_k(control_, item);
        ptx::mbarrier_arrive(barrier_at(control_.item_empty[items.slot()]));
      }
    }
  }

 private:
  __device__ __forceinline__ bool leader() const { return opaque(threadIdx.x) % 128 == 0; }

  // Share by share: registers are the consumers'.
  __device__ __forceinline__ void step(uint32_t keys) {
    constexpr int kShares = Config::kShares, kSlots = Config::kDqSlots;
    ptx::mbarrier_wait(barrier_at(control_.ds_full[place_.slot()]), place_.phase());
#pragma unroll 1
    for (int32_t share = 0; share < kShares; ++share) {
      float dq[32];
      multiply_dq<Config>(dq, shared_, keys, place_.slot(), share);
      const int32_t slot = share % kSlots;
      const uint32_t uses = place_.count * (kShares / kSlots) + share / kSlots;
      ptx::mbarrier_wait(barrier_at(control_.dq_empty[slot]), (uses & 1) ^ 1);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      if (share == kShares - 1 && leader()) {
        ptx::mbarrier_arrive(barrier_at(control_.ds_empty[place_.slot()]));
      }
      hand_over_dq<Config>(dq, control_, shared_, place_.count % 2, slot);
    }
    place_.advance();
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  Ring<Config::kDsStages> place_;  // tiles of queries so far
};

}  // namespace flashattn::cuda::sm90
