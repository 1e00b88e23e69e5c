// Mainloops of the two consumers of the Hopper backward kernel for large heads. The first computes
// S^T = K Q^T, P and dV += P^T dO; the second dP^T = V dO^T, dS and dK += dS^T Q. P passes from the
// first to the second through shared memory, rounded: in accumulator order or, with kStagePInDs, in
// the buffer and layout of dS.
#pragma once

#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

// kDsRole: the second consumer.
template <class Config, bool kDsRole>
class BwdLargeHeadMainloop : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using Base::storage_, Base::params_, Base::shared_;
  using Base::work_tile, Base::lane, Base::leader, Base::warp;
  using typename Base::QState, typename Base::DoutState, typename Base::DsState;
  using typename Base::SAccum, typename Base::PFragment;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kDim = kDsRole ? Config::kDimQk : Config::kDimV;  // accumulator columns
  // With four warpgroups the compiler takes no WGMMA with N = 256.
  static constexpr int kAccs = kDim > 192 ? 2 : 1, kRegsPerAcc = kDim / 2 / kAccs;

 public:
  __device__ __forceinline__ BwdLargeHeadMainloop(const BackwardParams& params, uint32_t shared,
                                                  BwdSharedStorage<Config>& storage)
      : Base(params, shared, storage, kDsRole), score_mod_(params, shared, storage, kDsRole) {}

  __device__ __forceinline__ void run() {
    this->for_each_work_tile([&] {
      if (!kDsRole) this->find_visible_queries();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) acc_[i / kRegsPerAcc][i % kRegsPerAcc] = 0.0f;
      mainloop();
      this->release_kv();
      const auto acc = [&](int i) -> float& { return acc_[i / kRegsPerAcc][i % kRegsPerAcc]; };
      if (!this->template reduce_partials<kDim / 2>(acc)) return;  // another CTA stores them
      if (kDsRole) {
        store(params_.common.args.dk, params_.common.problem.dim_qk, params_.common.problem.scale);
      } else {
        store(params_.common.args.dv, params_.common.problem.dim_v, this->p_scale());
      }
    });
  }

 private:
  __device__ __forceinline__ void mainloop() {
    int32_t q_coord;
    uint32_t kind;
    this->begin(q_coord, kind, iter_);
    range_ = {true, true};
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
    storage_.q.consumer_wait(q_state());
    clear_rows<Config::kPanelsQk>(shared_, kTileKv, work_tile().keys);
    if constexpr (Config::kTwoCta) {
      clear_rows<Config::kPeerKPanels>(shared_ + Config::kPeerK, kTileKv, other);
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
    for (int n = 0; n < kAccs; ++n) ptx::reg_fence(acc_[n]);
    if (leader()) {
      if (!kDsRole) storage_.dout.consumer_release(dout_state());
      storage_.q.consumer_release(q_state());
    }
    ++iter_;
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_p(int32_t q_coord, uint32_t kind) {
    SAccum s;
    PFragment p, p_for_ds;
    typename BwdScoreMod<Config>::TilePrefetch prefetched;
    storage_.q.consumer_wait(q_state());
    this->template gemm_ss<Config::kDimQk>(s, ptx::SmemDescriptor::at(shared_, 0), q());
    if (!Config::kSplitsBlockMask || (kMasked && (kind & Base::kPartlyMasked)))
      score_mod_.prefetch(prefetched, q_coord);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    typename BwdScoreMod<Config>::Lse lse;
    score_mod_.load_lse(lse, q_state().stage());  // not before: D = 256 would lose 5 %
    score_mod_.template compute_p<kMasked>(s, lse, p, p_for_ds, prefetched, q_coord, kind,
                                           q_state().stage(), iter_, range_);
    send_p(Config::kSeparatePForDs ? p_for_ds : p);
    storage_.dout.consumer_wait(dout_state());
    if (kMasked) {
      zero_q_tail<Config::kPanelsV>(this->dout_address(dout_state()), this->q_tile_of(q_coord));
    }
    gemm_acc(p, dout());
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_ds(int32_t tile) {
    SAccum dp;
    PFragment p, ds;
    storage_.dout.consumer_wait(dout_state());
    this->template gemm_ss<Config::kDimV>(dp, ptx::SmemDescriptor::at(shared_ + Config::kV, 0),
                                          dout());
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dp);
    receive_p(p);
    score_mod_.template compute_ds<kMasked>(p, dp, ds, dout_state().stage(), iter_, tile);
    __syncwarp();
    if (lane() == 0) storage_.dout.consumer_release(dout_state());
    if constexpr (!Config::kStagePInDs) storage_.ds.producer_acquire({iter_});
    this->store_ds(ds, DsState{iter_}.stage());
    this->commit_ds({iter_});
    if constexpr (Config::kTwoCta) send_ds();
    storage_.q.consumer_wait(q_state());
    if (kMasked) zero_q_tail<Config::kPanelsQk>(this->q_address(q_state()), tile);
    gemm_acc(ds, q());
  }

  // Sends this CTA's dS to the peer at once, as the peer's dQ waits for it. The buffer there is
  // free, as this CTA's own was: the empty barriers of `ds` complete when both CTAs have computed
  // dQ.
  __device__ __forceinline__ void send_ds() const {
    this->warpgroup_sync();  // all of it has been stored
    if (!leader()) return;
    const DsState at{iter_};
    const uint32_t own = shared_ + Config::kDs + at.stage() * Config::kDsBytes;
    if constexpr (Config::kBiasInDs) {
      if (score_mod_.bias_shares_peer_ds()) {
        storage_.peer_ds_free.at(at).wait_cluster(at.phase());  // the peer has read its bias there
      }
    }
    Barrier& full = storage_.two_cta.peer_ds_full.at(at);
    full.expect(Config::kCtaDsBytes);
    ptx::bulk_copy_cluster(peer_address(own + Config::kCtaDsBytes), own, Config::kCtaDsBytes,
                           peer_address(full.address()));
  }

  __device__ __forceinline__ void gemm_acc(const PFragment& a, ptx::SmemDescriptor rows) {
#pragma unroll
    for (int n = 0; n < kAccs; ++n) {
      this->gemm_rs(acc_[n], a, rows.advance(n * (kRegsPerAcc / 32) * (kTileQ * 128)));
    }
  }

  __device__ __forceinline__ QState q_state() const { return {iter_}; }
  __device__ __forceinline__ DoutState dout_state() const { return {iter_}; }
  __device__ __forceinline__ ptx::SmemDescriptor q() const { return Base::q(q_state()); }
  __device__ __forceinline__ ptx::SmemDescriptor dout() const { return Base::dout(dout_state()); }

  // Address of this lane's P in a P stage.
  __device__ __forceinline__ uint32_t p_address(uint32_t stage) const {
    return shared_ + Config::kP + stage * Config::kCtaDsBytes + no_hoist(threadIdx.x) % 128 * 16;
  }

  __device__ __forceinline__ void send_p(const PFragment& p) const {
    const PipelineState<2> at{iter_};
    if constexpr (!Config::kStagePInDs) {
      storage_.p.producer_acquire(at);
#pragma unroll
      for (int n = 0; n < kTileQ / 16; ++n) {
        ptx::store_shared_16(p_address(at.stage()) + n * 2048, p[4 * n], p[4 * n + 1], p[4 * n + 2],
                             p[4 * n + 3]);
      }
    }
    __syncwarp();
    if (lane() == 0) storage_.p.producer_commit(at);
  }

  __device__ __forceinline__ void receive_p(PFragment& p) const {
    const PipelineState<2> at{iter_};
    storage_.p.consumer_wait(at);
    if constexpr (Config::kStagePInDs) return;
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      const int4 words = ptx::load_shared_16(p_address(at.stage()) + n * 2048);
      p[4 * n] = words.x;
      p[4 * n + 1] = words.y;
      p[4 * n + 2] = words.z;
      p[4 * n + 3] = words.w;
    }
    __syncwarp();
    if (lane() == 0) storage_.p.consumer_release(at);
  }

  // Zeros rows of Q or dO past the last query: their P is 0, but they may be NaN.
  template <int kPanels>
  __device__ __forceinline__ void zero_q_tail(uint32_t rows, int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= work_tile().len.q) return;
    clear_rows<kPanels>(rows, kTileQ, work_tile().len.q - tile * kTileQ);
    this->fence_cleared_rows();
  }

  __device__ __forceinline__ void store(const flashattn_tensor& tensor, int32_t dim,
                                        float factor) const {
    this->template store_rows<kDim>(tensor, this->output_tile(), dim, warp() * 16 + lane() / 4,
                                    factor,
                                    [&](int i) { return acc_[i / kRegsPerAcc][i % kRegsPerAcc]; });
  }

  BwdScoreMod<Config> score_mod_;
  SoftcapRange range_;
  uint32_t iter_ = 0;  // Q tiles so far
  float acc_[kAccs][kRegsPerAcc];
};

}  // namespace flashattn::cuda::sm90
