// Mainloop of the two consumer warpgroups of the Hopper backward kernels without a dQ warpgroup: 64
// keys each. Each also computes half of the columns of dQ over all keys: for long Q transposed,
// dQ^T = K^T dS^T; for heads of 192 and 128, where half of the columns are 96, dQ = dS K.
//
// Without a dQ warpgroup each has registers for dK of 192 columns, or for Q tiles of 80: a WGMMA
// with N = 80 reads less shared memory per query than one with N = 64. The order of the WGMMAs is
// the best of ten that were measured for long Q (H200): one consumer's exponentials overlap the
// other's WGMMAs; overlapping its own, too, was slower by 2 to 10 %; dV before dP cost 8 %, S
// before dQ 5 %. dQ of a Q tile is computed one tile later, when the other consumer's dS has
// arrived for sure.
#pragma once

#include "cuda/kernels/sm90/dq_mma.cuh"
#include "cuda/kernels/sm90/bwd_dkdv.cuh"
#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdTwoWarpgroupMainloop : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using T = typename Config::T;
  using Base::kTileKv, Base::kTileQ;
  using Base::storage_, Base::shared_, Base::consumer_, Base::work_tile, Base::leader;
  using typename Base::QState, typename Base::DsState;
  using typename Base::SAccum, typename Base::PFragment;
  static constexpr int kDimQk = Config::kDimQk;
  // A consumer computes its columns as dQ^T if they are a multiple of 64, M of a WGMMA, else as dQ.
  static constexpr bool kTransposed = !Config::kSplitsKPanel;
  using DqAccum = float[kTileQ * kDimQk / 256];

 public:
  __device__ __forceinline__ BwdTwoWarpgroupMainloop(const BackwardParams& params, uint32_t shared,
                                                     BwdSharedStorage<Config>& storage,
                                                     int32_t consumer)
      : Base(params, shared, storage, consumer),
        score_mod_(params, shared, storage, consumer),
        dkdv_(params, shared, storage, consumer) {}

  __device__ __forceinline__ void run() {
    dkdv_.for_each_work_tile(q_state_.count, [&] { mainloop(); });
  }

 private:
  __device__ __forceinline__ void mainloop() {
    int32_t q_coord;
    uint32_t kind;
    this->begin(q_coord, kind, q_state_.count);
    if (kind == Base::kNoTile) return;
    this->zero_k_tail(q_state_, shared_);
    const bool skips = Config::kSkipMaskedTiles && (kind & Base::kFullyMasked);
    if (skips) skip_tile(q_coord, kind);
    SAccum x;
    start_s_gemm(x, kind != Base::kNoTile);
    this->find_visible_queries();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(x);
    if (!skips) {
      this->zero_q_tail(q_state_, q_coord);
      step<true, false>(x, q_coord, kind);
    }
    while (kind != Base::kNoTile) {
      if (kind & Base::kFull) {
        step<false, true>(x, q_coord, kind);
      } else {
        this->zero_q_tail(q_state_, q_coord);
        step<true, true>(x, q_coord, kind);
      }
    }
    const DsState last{q_state_.count - 1};
    const auto finish_dq = [&](DqAccum& dq) {
      start_dq_gemm(dq, last);
      ptx::wgmma_wait<0>();
      ptx::reg_fence(dq);
      if (Config::kEarlyReleaseK && leader()) release_k(storage_, work_tile());
      store_dq(dq, last, [] {});
    };
    if constexpr (kTransposed) {
      finish_dq(x);
    } else {
      DqAccum dq;
      finish_dq(dq);
    }
  }

  // Issues S of the Q tile at q_state_. If `valid` is false, nothing uses the result.
  __device__ __forceinline__ void start_s_gemm(SAccum& s, bool valid) const {
    storage_.q.consumer_wait_if(valid, q_state_);
    this->template gemm_ss<kDimQk, true>(s, k(), valid ? this->q(q_state_) : k());
  }

  // One Q tile: from S to dS, dV and dK; then issues S of the next. kWithDq: also computes dQ of
  // the tile before, and stores it while S is computed.
  template <bool kMasked, bool kWithDq>
  __device__ __forceinline__ void step(SAccum& x, int32_t& q_coord, uint32_t& kind) {
    const QState at = q_state_;
    const DsState ds_at{at.count}, last{at.count - 1};
    PFragment p, p_for_ds, ds;
    typename BwdScoreMod<Config>::TilePrefetch prefetched;
    typename BwdScoreMod<Config>::Lse lse;
    SoftcapRange range;
    score_mod_.load_lse(lse, at.stage());
    score_mod_.template compute_p<kMasked>(x, lse, p, p_for_ds, prefetched, q_coord, kind,
                                           at.stage(), q_state_.count, range);
    ptx::reg_fence(p);
    storage_.dout.consumer_wait(q_state_);
    this->template gemm_ss<Config::kDimV>(x, v(), this->dout(at));
    this->gemm_rs(dkdv_.dv, p, this->dout(at));
    storage_.ds.producer_acquire(ds_at);
    ptx::wgmma_wait<1>();
    ptx::reg_fence(x);
    if (Config::kEarlyReleaseV && (kind & Base::kLast) && leader()) this->release_v();
    score_mod_.template compute_ds<kMasked>(p, x, ds, at.stage(), q_state_.count, q_coord);
    this->store_ds(ds, ds_at.stage());
    this->commit_ds(ds_at);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dkdv_.dv);
    this->release_dout(at);
    this->gemm_rs(dkdv_.dk, ds, this->q(at));
    DqAccum dq;
    if constexpr (!kTransposed) {  // registers do not hold dQ beside dS
      ptx::wgmma_wait<0>();
      ptx::reg_fence(dkdv_.dk);
    }
    if constexpr (kWithDq) start_dq_gemm(dq, last);
    ptx::wgmma_wait<kWithDq>();
    ptx::reg_fence(dkdv_.dk);
    if (leader()) storage_.q.consumer_release(at);
    q_state_.advance();
    const auto start_next = [&] {
      start_s_gemm(x, q_state_.count != work_tile().iter_end);
      this->advance(q_coord, kind, q_state_.count);
    };
    // Registers hold S beside dQ^T, but beside dQ only once all but its last stage is stored.
    if constexpr (kTransposed || !kWithDq) start_next();
    if constexpr (kWithDq) {
      ptx::wgmma_wait<kTransposed>();
      ptx::reg_fence(dq);
      store_dq(dq, last, start_next);
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(x);
  }

  // The first Q tile of a work tile, if it sees none of this consumer's keys, as next to the
  // diagonal of a causal mask: stores dS = 0, for dQ over all keys. The other consumer has the
  // tensor cores for itself. Q tiles of later heads of a GQA group are masked instead.
  __device__ __forceinline__ void skip_tile(int32_t& q_coord, uint32_t& kind) {
    const QState at = q_state_;
    const DsState ds_at{at.count};
    // Every warp waits for each phase, see BwdMainloop::skip_tile().
    storage_.q.consumer_wait(at);
    storage_.dout.consumer_wait(at);
    storage_.ds.producer_acquire(ds_at);
    const PFragment zeros = {};
    this->store_ds(zeros, ds_at.stage());
    this->commit_ds(ds_at);
    this->release_dout(at);
    this->warpgroup_sync();
    if (leader()) {
      if (kind & Base::kLast) this->release_v();
      storage_.q.consumer_release(at);
    }
    q_state_.advance();
    this->advance(q_coord, kind, q_state_.count);
  }

  // Passes dQ of a Q tile to its reducer. start_next() issues the next S before the last stage is
  // stored, unless dQ is transposed.
  template <class StartNext>
  __device__ __forceinline__ void store_dq(const DqAccum& dq, DsState at,
                                           StartNext start_next) const {
    if (leader()) storage_.ds.consumer_release(at);
    if constexpr (kTransposed) {
      storage_.dq.producer_acquire(consumer_, at.count);
      store_dq_to_smem<Config>(dq, 0, storage_, shared_, at.count & 1, consumer_);
    } else {
#pragma unroll
      for (int stage = 0; stage < Config::kDqStages; ++stage) {
        if (stage == Config::kDqStages - 1) start_next();
        // Waits until the other consumer's fill before this one has been read: consumer 0 comes
        // first.
        storage_.dq.producer_acquire(stage, at.count + consumer_, consumer_ ^ 1);
        store_dq_to_smem<Config>(dq, stage * (Config::kDqStageBytes / 512), storage_, shared_,
                                 at.count & 1, stage);
      }
    }
  }

  // Issues dQ^T = K^T dS^T of a Q tile, or dQ = dS K, for this consumer's columns.
  __device__ __forceinline__ void start_dq_gemm(DqAccum& dq, DsState at) const {
    storage_.ds.consumer_wait(at);
    if constexpr (!kTransposed) return start_dq_rows_gemm(dq, at);
    const ptx::SmemDescriptor columns =
        ptx::SmemDescriptor::at(shared_ + consumer_ * kTileKv * 128, 0);
    const ptx::SmemDescriptor scores =
        ptx::SmemDescriptor::at(shared_ + Config::kDs + at.stage() * Config::kDsBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<T, 1, 0>(dq, columns.advance(n * 2048).descriptor(),
                             scores.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // Issues dQ = dS K for 96 columns: those of panel 0 or 2 of K and of half of panel 1.
  __device__ __forceinline__ void start_dq_rows_gemm(DqAccum& dq, DsState at) const {
    constexpr uint32_t kPanel = kTileKv * 128;
    const uint32_t first = consumer_ * (k_slot<Config>(2) * kPanel);
    const ptx::SmemDescriptor columns = ptx::SmemDescriptor::at(
        shared() + first, k_slot<Config>(1) * kPanel + consumer_ * 64 - first);
    const ptx::SmemDescriptor scores =
        ptx::SmemDescriptor::at(shared() + Config::kDs + at.stage() * Config::kDsBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<T, 0, 1>(dq, scores.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(),
                             columns.advance(n * 2048).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // This warpgroup's rows of K and V.
  __device__ __forceinline__ ptx::SmemDescriptor k() const {
    return ptx::SmemDescriptor::at(shared() + consumer_ * 64 * 128, 0);
  }
  __device__ __forceinline__ ptx::SmemDescriptor v() const {
    return ptx::SmemDescriptor::at(shared() + Config::kV + consumer_ * 64 * 128, 0);
  }
  // no_hoist: registers do not hold the descriptors of all K steps of a GEMM.
  __device__ __forceinline__ uint32_t shared() const {
    return kTransposed ? shared_ : no_hoist(shared_);
  }

  BwdScoreMod<Config> score_mod_;
  BwdDkDv<Config> dkdv_;
  QState q_state_;  // Q tiles so far
};

}  // namespace flashattn::cuda::sm90
