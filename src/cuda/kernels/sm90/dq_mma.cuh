// dQ warpgroup of the Hopper backward pass: computes dQ = dS K and passes it through shared memory
// to the threads of dq_reduce.cuh.
#pragma once

#include "cuda/kernels/sm90/dq_inline_postprocess.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

// Passes dQ to a reducer: stores accumulators from index `first` on, as many as a stage holds, in
// accumulator order, which the reducer keeps.
template <class Config, int kAccRegs>
__device__ __forceinline__ void store_dq_to_smem(const float (&dq)[kAccRegs], int first,
                                                 BwdSharedStorage<Config>& storage, uint32_t shared,
                                                 uint32_t reducer, int32_t stage) {
  const uint32_t to =
      shared + Config::kDq + stage * Config::kDqStageBytes + no_hoist(threadIdx.x) % 128 * 16;
#pragma unroll
  for (int n = 0; n < Config::kDqStageBytes / 2048; ++n) {
    const float* x = &dq[first + 4 * n];
    ptx::store_shared(to + n * 2048, x[0], x[1], x[2], x[3]);
  }
  ptx::fence_async_proxy();
  __syncwarp();
  if (no_hoist(threadIdx.x) % 32 == 0) storage.dq.producer_commit(reducer, stage);
}

// Computes dQ of a Q tile once both consumers have stored their dS. Its WGMMAs fill the tensor
// cores while the consumers wait for their last WGMMA or compute exponentials.
template <class Config>
class DqMmaWarpgroup {
 public:
  __device__ __forceinline__ DqMmaWarpgroup(const BackwardParams& params, uint32_t shared,
                                            BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_work_tile(storage_,
                       [&](const volatile BwdWorkTile<Config>& work_tile, WorkTileState at) {
                         while (ds_state_.count != work_tile.iter_end)
                           step(k_address<Config>(shared_, work_tile));
                         ptx::named_sync(kDqBarrier, 128);  // all have read the work tile
                         if (leader()) {
                           if (work_tile.iter_end != work_tile.iter_begin)
                             release_k(storage_, work_tile);
                           storage_.work.consumer_release(at);
                         }
                       });
    if constexpr (Config::kInlinePostprocess)
      DqInlinePostprocess<Config>(params_, storage_).finish();
  }

 private:
  __device__ __forceinline__ bool leader() const { return no_hoist(threadIdx.x) % 128 == 0; }

  // Computes dQ of a Q tile, a few subtiles at a time: most registers are the consumers'.
  __device__ __forceinline__ void step(uint32_t keys) {
    constexpr int kDqSubtiles = Config::kCtaDqSubtiles, kStages = Config::kDqStages;
    constexpr int kAtOnce = Config::kDqSubtilesAtOnce, kAccRegs = 32 * kAtOnce;
    constexpr int kFills = kAccRegs * 512 / Config::kDqStageBytes;  // stage fills of these subtiles
    wait_ds_full();
#pragma unroll 1
    for (int32_t subtile = 0; subtile < kDqSubtiles; subtile += kAtOnce) {
      float dq[kAccRegs];
      gemm_dq(dq, keys, subtile);
      const auto finish = [&] {
        ptx::wgmma_wait<0>();
        ptx::reg_fence(dq);
        // Releases dS of this CTA and the copy of the peer's.
        if (subtile == kDqSubtiles - kAtOnce && leader()) storage_.ds.consumer_release(ds_state_);
      };
      if (Config::kTwoCta) finish();  // the peer waits for it, too
#pragma unroll
      for (int fill = 0; fill < kFills; ++fill) {
        const int32_t done = subtile / kAtOnce * kFills + fill, stage = done % kStages;
        const uint32_t uses =
            ds_state_.count * (kDqSubtiles / kAtOnce * kFills / kStages) + done / kStages;
        storage_.dq.producer_acquire(stage, uses);
        if (!Config::kTwoCta && fill == 0) finish();
        store_dq_to_smem<Config>(dq, kAccRegs / kFills * fill, storage_, shared_,
                                 ds_state_.count % 2, stage);
      }
    }
    ds_state_.advance();
  }

  // Waits for dS. Converts a complete dQ tile meanwhile, if there is one.
  __device__ __forceinline__ void wait_ds_full() const {
    if constexpr (Config::kInlinePostprocess) {
      const bool there = storage_.ds.consumer_test(ds_state_);
      if (!__all_sync(~0u, there)) DqInlinePostprocess<Config>(params_, storage_).poll();
    }
    storage_.ds.consumer_wait(ds_state_);
  }

  // dq = dS K over all keys of the work tile, for a few subtiles of 64 columns or 64 queries. In a
  // cluster each CTA computes half of the columns: over its own keys first, while the peer's dS
  // arrives.
  template <int kAccRegs>
  __device__ __forceinline__ void gemm_dq(float (&dq)[kAccRegs], uint32_t k,
                                          int32_t subtile) const {
    constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
    constexpr int kPanel = kAccRegs > 32 ? kTileKv * 128 : 0;
    const uint32_t columns = kTileQ == 64 ? subtile * kTileKv * 128 : 0;
    const uint32_t rows = kTileQ == 64 ? 0 : subtile * 64 * 128;
    const uint32_t half = cta_rank<Config>() * (Config::kCtaDqSubtiles * kTileKv * 128);
    const ptx::SmemDescriptor keys = ptx::SmemDescriptor::at(k + half + columns, kPanel);
    const ptx::SmemDescriptor ds = ptx::SmemDescriptor::at(
        shared_ + Config::kDs + ds_state_.stage() * Config::kDsBytes + rows, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<typename Config::T, 0, 1>(
          dq, ds.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(),
          keys.advance(n * 2048).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
    if constexpr (Config::kTwoCta) {
      storage_.two_cta.peer_ds_full.wait(ds_state_);
      const ptx::SmemDescriptor others =
          ptx::SmemDescriptor::at(shared_ + Config::kPeerK + columns, kPanel);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < kTileKv / 16; ++n) {
        ptx::wgmma_ss<typename Config::T, 0, 1>(
            dq, ds.advance(Config::kCtaDsBytes + n * 32).descriptor(),
            others.advance(n * 2048).descriptor(), 1);
      }
      ptx::wgmma_commit();
    }
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
  PipelineState<Config::kDsStages> ds_state_;  // Q tiles so far
};

}  // namespace flashattn::cuda::sm90
