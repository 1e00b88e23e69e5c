// Mainloops of the two consumers of the Hopper backward kernel for large heads. The first computes
// S^T = K Q^T, P and dV += P^T dO; the second dP^T = V dO^T, dS and dK += dS^T Q. P passes from the
// first to the second through shared memory, rounded: in accumulator order or, with kStagePInDs, in
// the buffer and layout of dS.
#pragma once

#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

// kDsRole: the second consumer.
template <class Config, bool kDsRole>
class BwdLargeHeadMainloop : BwdScoreMod<Config> {
  using Base = BwdScoreMod<Config>;
  using T = typename Config::T;
  using Base::storage_, Base::params_, Base::shared_;
  using Base::work_tile, Base::lane, Base::leader, Base::warp;
  using typename Base::TilePrefetch, typename Base::Operand, typename Base::Tile;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kDim = kDsRole ? Config::kDimQk : Config::kDimV;  // accumulator columns
  // With four warpgroups the compiler takes no WGMMA with N = 256.
  static constexpr int kAccParts = kDim > 192 ? 2 : 1, kAccPart = kDim / 2 / kAccParts;

 public:
  __device__ __forceinline__ BwdLargeHeadMainloop(const BackwardParams& params, uint32_t shared,
                                                  BwdSharedStorage<Config>& storage)
      : Base(params, shared, storage, kDsRole) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      this->take();
      if (work_tile().end) break;
      if (!kDsRole) this->find_visible_queries();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) acc_[i / kAccPart][i % kAccPart] = 0.0f;
      mainloop();
      this->release_kv();
      const auto acc = [&](int i) -> float& { return acc_[i / kAccPart][i % kAccPart]; };
      if (!this->template reduce_partials<kDim / 2>(acc)) {
        // Another CTA stores them.
      } else if (kDsRole) {
        store(params_.common.args.dk, params_.common.problem.dim_qk, params_.common.problem.scale);
      } else {
        store(params_.common.args.dv, params_.common.problem.dim_v, this->dropout_scale());
      }
      ptx::named_sync(kWarpgroupBarrier + kDsRole, 128);  // no warp reads the work tile any more
    }
  }

 private:
  __device__ __forceinline__ void mainloop() {
    int32_t q_coord;
    uint32_t kind;
    this->begin(q_coord, kind, iter_);
    if (kDsRole && params_.kv_has_tail && kind != Base::kNoTile) zero_k_tail();
    while (kind != Base::kNoTile) {
      if (!Config::kIsRuntime && (kind & Base::kFull)) {
        step<false>(q_coord, kind);
      } else {
        step<true>(q_coord, kind);
      }
    }
  }

  // Zeros rows of K past the last key, before dQ reads them: their dS is 0, but they may be NaN.
  __device__ __forceinline__ void zero_k_tail() const {
    // Also rows of the peer's K, whose keys are 64 further on or back.
    const int32_t other =
        Config::kTwoCta ? work_tile().len.kv - (work_tile().key ^ kTileKv) : kTileKv;
    if (work_tile().keys >= kTileKv && other >= kTileKv) return;
    ptx::mbarrier_wait(barrier_at(storage_.q_full[q_state().slot()]), q_state().phase());
    this->template clear_rows<Config::kPanelsQk>(shared_, kTileKv, work_tile().keys);
    if constexpr (Config::kTwoCta) {
      this->template clear_rows<Config::kPeerKPanels>(shared_ + Config::kPeerK, kTileKv, other);
    }
    this->fence_cleared_rows();
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t& q_coord, uint32_t& kind) {
    if constexpr (kDsRole) {
      step_ds<kMasked>(this->q_tile_of(q_coord));
    } else {
      step_p<kMasked>(q_coord, kind);
    }
    this->advance(q_coord, kind, iter_ + 1);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kAccParts; ++n) ptx::reg_fence(acc_[n]);
    if (leader()) {
      if (!kDsRole) arrive_cluster<Config>(storage_.do_empty[dout_state().slot()]);
      arrive_cluster<Config>(storage_.q_empty[q_state().slot()]);
    }
    ++iter_;
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_p(int32_t q_coord, uint32_t kind) {
    Tile s;
    Operand p, p_for_ds;
    TilePrefetch prefetched;
    ptx::mbarrier_wait(barrier_at(storage_.q_full[q_state().slot()]), q_state().phase());
    this->template gemm_ss<Config::kDimQk>(s, ptx::SmemDescriptor::at(shared_, 0), q());
    this->prefetch(prefetched, q_coord);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    typename Base::Lse lse;
    this->load_lse(lse, q_state().slot());  // not before: D = 256 would lose 5 %
    this->template compute_p<kMasked>(s, lse, p, p_for_ds, prefetched, q_coord, kind,
                                      q_state().slot(), iter_);
    send_p(Config::kSeparatePForDs ? p_for_ds : p);
    ptx::mbarrier_wait(barrier_at(storage_.do_full[dout_state().slot()]), dout_state().phase());
    if (kMasked) zero_q_tail<Config::kPanelsV>(dout_address(), this->q_tile_of(q_coord));
    gemm_acc(p, dout());
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_ds(int32_t tile) {
    Tile dp;
    Operand p, ds;
    ptx::mbarrier_wait(barrier_at(storage_.do_full[dout_state().slot()]), dout_state().phase());
    this->template gemm_ss<Config::kDimV>(dp, ptx::SmemDescriptor::at(shared_ + Config::kV, 0),
                                          dout());
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dp);
    receive_p(p);
    this->template compute_ds<kMasked>(p, dp, ds, dout_state().slot(), iter_);
    __syncwarp();
    if (lane() == 0) arrive_cluster<Config>(storage_.do_empty[dout_state().slot()]);
    if constexpr (!Config::kStagePInDs) this->wait_ds_empty({iter_});
    this->store_ds(ds, PipelineState<Config::kDsStages>{iter_}.slot());
    this->signal_ds_full({iter_});
    if constexpr (Config::kTwoCta) send_ds();
    ptx::mbarrier_wait(barrier_at(storage_.q_full[q_state().slot()]), q_state().phase());
    if (kMasked) zero_q_tail<Config::kPanelsQk>(q_address(), tile);
    gemm_acc(ds, q());
  }

  // Sends this CTA's dS to the peer at once, as its dQ waits for it. The buffer there is free, as
  // this CTA's own was: ds_empty completes when both CTAs have computed dQ.
  __device__ __forceinline__ void send_ds() const {
    ptx::named_sync(kWarpgroupBarrier + kDsRole, 128);  // all of it has been stored
    if (!leader()) return;
    const uint32_t slot = PipelineState<Config::kDsStages>{iter_}.slot();
    const uint32_t own = shared_ + Config::kDs + slot * Config::kDsBytes;
    const uint32_t full = barrier_at(storage_.two_cta.peer_ds_full[slot]);
    ptx::mbarrier_arrive_expect_tx(full, Config::kCtaDsBytes);
    ptx::bulk_copy_cluster(at_peer(own + Config::kCtaDsBytes), own, Config::kCtaDsBytes,
                           at_peer(full));
  }

  __device__ __forceinline__ void gemm_acc(const Operand& weights, ptx::SmemDescriptor rows) {
#pragma unroll
    for (int n = 0; n < kAccParts; ++n) {
      this->gemm_rs(acc_[n], weights, rows.advance(n * (kAccPart / 32) * (kTileQ * 128)));
    }
  }

  __device__ __forceinline__ PipelineState<Config::kQStages> q_state() const { return {iter_}; }
  __device__ __forceinline__ PipelineState<Config::kDoStages> dout_state() const { return {iter_}; }

  __device__ __forceinline__ uint32_t q_address() const {
    return shared_ + Config::kQ + q_state().slot() * Config::kQBytes;
  }
  __device__ __forceinline__ uint32_t dout_address() const {
    return shared_ + Config::kDo + dout_state().slot() * Config::kDoBytes;
  }
  __device__ __forceinline__ ptx::SmemDescriptor q() const {
    return ptx::SmemDescriptor::at(q_address(), 0);
  }
  __device__ __forceinline__ ptx::SmemDescriptor dout() const {
    return ptx::SmemDescriptor::at(dout_address(), 0);
  }

  // Address of this lane's P in a P stage.
  __device__ __forceinline__ uint32_t p_address(uint32_t slot) const {
    return shared_ + Config::kP + slot * Config::kCtaDsBytes + no_hoist(threadIdx.x) % 128 * 16;
  }

  __device__ __forceinline__ void send_p(const Operand& p) const {
    const PipelineState<2> at{iter_};
    if constexpr (!Config::kStagePInDs) {
      ptx::mbarrier_wait(barrier_at(storage_.p_empty[at.slot()]), at.phase() ^ 1);
#pragma unroll
      for (int n = 0; n < kTileQ / 16; ++n) {
        ptx::store_shared_16(p_address(at.slot()) + n * 2048, p[4 * n], p[4 * n + 1], p[4 * n + 2],
                             p[4 * n + 3]);
      }
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(storage_.p_full[at.slot()]));
  }

  __device__ __forceinline__ void receive_p(Operand& p) const {
    const PipelineState<2> at{iter_};
    ptx::mbarrier_wait(barrier_at(storage_.p_full[at.slot()]), at.phase());
    if constexpr (Config::kStagePInDs) return;
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      const int4 words = ptx::load_shared_16(p_address(at.slot()) + n * 2048);
      p[4 * n] = words.x;
      p[4 * n + 1] = words.y;
      p[4 * n + 2] = words.z;
      p[4 * n + 3] = words.w;
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(storage_.p_empty[at.slot()]));
  }

  // Zeros rows of Q or dO past the last query: their P is 0, but they may be NaN.
  template <int kPanels>
  __device__ __forceinline__ void zero_q_tail(uint32_t rows, int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= work_tile().len.q) return;
    this->template clear_rows<kPanels>(rows, kTileQ, work_tile().len.q - tile * kTileQ);
    this->fence_cleared_rows();
  }

  __device__ __forceinline__ void store(const flashattn_tensor& tensor, int32_t dim,
                                        float factor) const {
    this->template store_rows<kDim>(tensor, this->output_tile(), dim, warp() * 16 + lane() / 4,
                                    factor,
                                    [&](int i) { return acc_[i / kAccPart][i % kAccPart]; });
  }

  uint32_t iter_ = 0;  // Q tiles so far
  float acc_[kAccParts][kAccPart];
};

}  // namespace flashattn::cuda::sm90
