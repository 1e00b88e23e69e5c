// The warpgroup of the Hopper backward pass that computes dQ = dS K, and leaves it to the thread
// that adds it.
#pragma once

#include "cuda/kernels/sm90/dq_inline_postprocess.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

// To the thread that adds it, in the order of the accumulators, from number `first` on, as much as
// the slot takes: nobody else reads it.
template <class Config, int kSums>
__device__ __forceinline__ void hand_over_dq(const float (&dq)[kSums], int first,
                                             BackwardControl<Config>& control, uint32_t shared,
                                             uint32_t adder, int32_t slot) {
  const uint32_t to =
      shared + Config::kDq + slot * Config::kDqBytes + no_hoist(threadIdx.x) % 128 * 16;
#pragma unroll
  for (int n = 0; n < Config::kDqBytes / 2048; ++n) {
    const float* x = &dq[first + 4 * n];
    ptx::store_shared(to + n * 2048, x[0], x[1], x[2], x[3]);
  }
  ptx::fence_async_proxy();
  __syncwarp();
  if (no_hoist(threadIdx.x) % 32 == 0)
    ptx::mbarrier_arrive(barrier_at(control.dq_full[adder][slot]));
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
    for_each_item(control_, [&](const volatile BackwardItem<Config>& item, uint32_t empty) {
      while (place_.count != item.done) step(keys_at<Config>(shared_, item));
      ptx::named_sync(kDqBarrier, 128);  // all have read the item
      if (leader()) {
        if (item.done != item.before) free_k(control_, item);
        ptx::mbarrier_arrive(empty);
      }
    });
    if constexpr (Config::kConverts) DqConverter<Config>(params_, control_).finish();
  }

 private:
  __device__ __forceinline__ bool leader() const { return no_hoist(threadIdx.x) % 128 == 0; }

  // A few shares at a time: registers are the consumers'.
  __device__ __forceinline__ void step(uint32_t keys) {
    constexpr int kShares = Config::kOwnShares, kSlots = Config::kDqSlots;
    constexpr int kAtOnce = Config::kSharesAtOnce, kSums = 32 * kAtOnce;
    constexpr int kPieces = kSums * 512 / Config::kDqBytes;  // a slot takes one
    await_ds();
#pragma unroll 1
    for (int32_t share = 0; share < kShares; share += kAtOnce) {
      float dq[kSums];
      multiply(dq, keys, share);
      const auto finish = [&] {
        ptx::wgmma_wait<0>();
        ptx::reg_fence(dq);
        if (share == kShares - kAtOnce && leader()) free_ds();
      };
      if (Config::kPair) finish();  // the partner waits for it, too
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int32_t done = share / kAtOnce * kPieces + piece, slot = done % kSlots;
        const uint32_t uses = place_.count * (kShares / kAtOnce * kPieces / kSlots) + done / kSlots;
        ptx::mbarrier_wait(barrier_at(control_.dq_empty[slot]), (uses & 1) ^ 1);
        if (!Config::kPair && piece == 0) finish();
        hand_over_dq<Config>(dq, kSums / kPieces * piece, control_, shared_, place_.count % 2,
                             slot);
      }
    }
    place_.advance();
  }

  // Converts meanwhile, if there is time.
  __device__ __forceinline__ void await_ds() const {
    const uint32_t full = barrier_at(control_.ds_full[place_.slot()]);
    if constexpr (Config::kConverts) {
      const bool there = ptx::mbarrier_test(full, place_.phase());
      if (!__all_sync(~0u, there)) DqConverter<Config>(params_, control_).work();
    }
    ptx::mbarrier_wait(full, place_.phase());
  }

  // dS K over all keys of the item: 64 columns, or 64 queries, a share; of a few shares. A pair:
  // each block has its half of the columns; its own keys first, while the partner's dS comes.
  template <int kSums>
  __device__ __forceinline__ void multiply(float (&dq)[kSums], uint32_t k, int32_t share) const {
    constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
    constexpr int kPanel = kSums > 32 ? kTileKv * 128 : 0;
    const uint32_t columns = kTileQ == 64 ? share * kTileKv * 128 : 0;
    const uint32_t rows = kTileQ == 64 ? 0 : share * 64 * 128;
    const uint32_t half = block_rank<Config>() * (Config::kOwnShares * kTileKv * 128);
    const ptx::SmemDescriptor keys = ptx::SmemDescriptor::at(k + half + columns, kPanel);
    const ptx::SmemDescriptor scores = ptx::SmemDescriptor::at(
        shared_ + Config::kDs + place_.slot() * Config::kScoreBytes + rows, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<typename Config::T, 0, 1>(
          dq, scores.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(),
          keys.advance(n * 2048).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
    if constexpr (Config::kPair) {
      ptx::mbarrier_wait(barrier_at(control_.pair.received[place_.slot()]), place_.phase());
      const ptx::SmemDescriptor others =
          ptx::SmemDescriptor::at(shared_ + Config::kOther + columns, kPanel);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < kTileKv / 16; ++n) {
        ptx::wgmma_ss<typename Config::T, 0, 1>(
            dq, scores.advance(Config::kOwnBytes + n * 32).descriptor(),
            others.advance(n * 2048).descriptor(), 1);
      }
      ptx::wgmma_commit();
    }
  }

  // This dQ is done: it has read dS of this block, and that which the partner has sent.
  __device__ __forceinline__ void free_ds() const {
    arrive_at_all<Config>(control_.ds_empty[place_.slot()]);
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  PipelineState<Config::kDsStages> place_;  // tiles of queries so far
};

}  // namespace flashattn::cuda::sm90
