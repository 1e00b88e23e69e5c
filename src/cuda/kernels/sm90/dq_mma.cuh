// dQ warpgroup of the Hopper backward pass: computes dQ = dS K and passes it through shared memory
// to the threads of dq_reduce.cuh.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tiles.cuh"
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
                         QTileEntry next = entry_at(work_tile, ds_state_.count);
                         while (ds_state_.count != work_tile.iter_end) {
                           const QTileEntry entry = next;  // the next is loaded a step ahead
                           next = entry_at(work_tile, ds_state_.count + 1);
                           step(k_address<Config>(shared_, work_tile), entry);
                         }
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
  using DsState = PipelineState<Config::kDsStages>;

  __device__ __forceinline__ bool leader() const { return no_hoist(threadIdx.x) % 128 == 0; }

  // Computes dQ of a Q tile, a few subtiles at a time: most registers are the consumers'. entry:
  // kSplitsDs, says for which halves of the keys there is dS.
  __device__ __forceinline__ void step(uint32_t keys, QTileEntry entry) {
    wait_ds_full(entry);
    if constexpr (Config::kSplitsDs) {
      // Votes: no WGMMA may be in a branch that may diverge.
      const int32_t half = __any_sync(~0u, entry.shows_any(0)) ? 0 : 1;
      if (half == 0 && __any_sync(~0u, entry.shows_any(1))) {
        add_subtiles(entry, [&](auto& dq, int32_t n) { gemm_dq<2>(dq, keys, n); });
      } else {
        add_subtiles(entry, [&](auto& dq, int32_t n) { gemm_dq<1>(dq, keys, n, half); });
      }
      half_counts_ = (half_counts_ + entry.shows_any(0) + (entry.shows_any(1) << 16)) & 0x7fff7fff;
    } else {
      add_subtiles(entry, [&](auto& dq, int32_t n) { gemm_dq(dq, keys, n); });
    }
    ds_state_.advance();
  }

  // Calls gemm(dq, n), which issues dQ of subtiles from n on, and passes dQ to the reducers.
  template <class Gemm>
  __device__ __forceinline__ void add_subtiles(QTileEntry entry, Gemm gemm) const {
    constexpr int kDqSubtiles = Config::kCtaDqSubtiles, kStages = Config::kDqStages;
    constexpr int kAtOnce = Config::kDqSubtilesAtOnce, kAccRegs = 32 * kAtOnce;
    constexpr int kFills = kAccRegs * 512 / Config::kDqStageBytes;  // stage fills of these subtiles
#pragma unroll 1
    for (int32_t subtile = 0; subtile < kDqSubtiles; subtile += kAtOnce) {
      float dq[kAccRegs];
      gemm(dq, subtile);
      const auto finish = [&] {
        ptx::wgmma_wait<0>();
        ptx::reg_fence(dq);
        // Releases dS of this CTA and the copy of the peer's.
        if (subtile == kDqSubtiles - kAtOnce) release_ds(entry);
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
  }

  // kSplitsDs: the entry of Q tile `count`, if the work tile has it.
  __device__ __forceinline__ QTileEntry entry_at(const volatile BwdWorkTile<Config>& work_tile,
                                                 uint32_t count) const {
    if (!Config::kSplitsDs || count == work_tile.iter_end) return {};
    const uint32_t* const list = work_tile.q_tile_list;
    return {list[count - work_tile.iter_begin]};
  }

  // The uses of a consumer's stages of dS so far, modulo 2^15: those of both share a register.
  __device__ __forceinline__ DsState half_state(int half) const {
    return {half_counts_ >> 16 * half & 0xffff};
  }

  // Calls work(state, substage) for each part of dS of a Q tile.
  template <class Work>
  __device__ __forceinline__ void for_each_ds(QTileEntry entry, Work work) const {
    if constexpr (Config::kSplitsDs) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (entry.shows_any(half)) work(half_state(half), half);
      }
    } else {
      work(ds_state_, 0);
    }
  }

  // Waits for dS. Converts a complete dQ tile meanwhile, if there is one.
  __device__ __forceinline__ void wait_ds_full(QTileEntry entry) const {
    if constexpr (Config::kInlinePostprocess) {
      bool there = true;
      for_each_ds(entry,
                  [&](DsState at, int half) { there &= storage_.ds.consumer_test(at, half); });
      if (!__all_sync(~0u, there)) DqInlinePostprocess<Config>(params_, storage_).poll();
    }
    for_each_ds(entry, [&](DsState at, int half) { storage_.ds.consumer_wait(at, half); });
  }

  __device__ __forceinline__ void release_ds(QTileEntry entry) const {
    if (!leader()) return;
    for_each_ds(entry, [&](DsState at, int half) { storage_.ds.consumer_release(at, half); });
  }

  // dq = dS K over all keys of the work tile, for a few subtiles of 64 columns or 64 queries. In a
  // cluster each CTA computes half of the columns: over its own keys first, while the peer's dS
  // arrives. kSplitsDs: over kPanels halves of the keys, from `first` on.
  template <int kPanels = Config::kTileKv / 64, int kAccRegs>
  __device__ __forceinline__ void gemm_dq(float (&dq)[kAccRegs], uint32_t k, int32_t subtile,
                                          int32_t first = 0) const {
    constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
    constexpr int kPanel = kAccRegs > 32 ? kTileKv * 128 : 0;
    const uint32_t columns = kTileQ == 64 ? subtile * kTileKv * 128 : 0;
    const uint32_t rows = kTileQ == 64 ? 0 : subtile * 64 * 128;
    const uint32_t half = cta_rank<Config>() * (Config::kCtaDqSubtiles * kTileKv * 128);
    const ptx::SmemDescriptor keys = ptx::SmemDescriptor::at(k + half + columns, kPanel);
    const auto ds_of = [&](int32_t panel) {
      const DsState at = Config::kSplitsDs ? half_state(panel) : ds_state_;
      return ptx::SmemDescriptor::at(shared_ + Config::kDs + at.stage() * Config::kDsBytes + rows,
                                     0)
          .advance(panel * kTileQ * 128);
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < kPanels; ++m) {
      const ptx::SmemDescriptor ds = ds_of(first + m);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        ptx::wgmma_ss<typename Config::T, 0, 1>(
            dq, ds.advance(n * 32).descriptor(),
            keys.advance((first + m) * (64 * 128) + n * 2048).descriptor(), m + n > 0);
      }
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
            dq, ds_of(0).advance(Config::kCtaDsBytes + n * 32).descriptor(),
            others.advance(n * 2048).descriptor(), 1);
      }
      ptx::wgmma_commit();
    }
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
  DsState ds_state_;          // Q tiles so far
  uint32_t half_counts_ = 0;  // kSplitsDs: see half_state()
};

}  // namespace flashattn::cuda::sm90
