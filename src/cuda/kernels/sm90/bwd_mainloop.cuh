// Mainloop of a consumer warpgroup of the Hopper backward kernel for small heads: 64 keys.
#pragma once

#include "cuda/kernels/sm90/dq_mma.cuh"
#include "cuda/kernels/sm90/bwd_dkdv.cuh"
#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdMainloop : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using Base::kFull, Base::kFullyMasked, Base::kLast, Base::kNoTile, Base::kTileQ;
  using Base::storage_, Base::shared_, Base::consumer_, Base::work_tile, Base::leader;
  using typename Base::QState, typename Base::DsState;
  using typename Base::SAccum, typename Base::PFragment;
  using TilePrefetch = typename BwdScoreMod<Config>::TilePrefetch;
  static constexpr int kDim = Config::kDimQk;
  static constexpr int kSliceQ = Config::kSliceQ, kSlices = kTileQ / kSliceQ;

 public:
  __device__ __forceinline__ BwdMainloop(const BackwardParams& params, uint32_t shared,
                                         BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer),
        score_mod_(params, shared, storage, consumer),
        dkdv_(params, shared, storage, consumer),
        k_address_(shared) {}

  __device__ __forceinline__ void run() {
    int32_t q_coord;
    uint32_t kind;
    STiles s;
    TilePrefetch prefetched;
    const auto start = [&](bool valid) {
      kind = kNoTile;
      if (valid) {
        k_address_ = k_address<Config>(shared_, work_tile()) + consumer_ * 64 * 128;
        if (Config::kHasBlockMask) this->find_visible_queries();  // begin() waits for Q
        this->begin(q_coord, kind, q_state_.count);
        if (!Config::kHasBlockMask) this->find_visible_queries();
        if (kind != kNoTile) this->zero_k_tail(q_state_, k_address_ - consumer_ * 64 * 128);
      }
      if (Config::kPrefetchS) start_s_gemm(s, needs_s(kind), [] {});
      if (Config::kIsDropout) score_mod_.prefetch(prefetched, q_coord);
    };
    const auto mainloop = [&] {
      SoftcapRange range{true, true};
      while (kind != kNoTile && !(Config::kLargeLseApart && (kind & Base::kLargeLse))) {
        if (Config::kSkipMaskedTiles && (kind & kFullyMasked)) {
          skip_and_start_s(s, q_coord, kind, prefetched);
          continue;
        }
        SoftcapRange of_tile = range;
        if constexpr (BwdScoreMod<Config>::kHasPolynomials && kSlices == 2) {
          // Rows past the last query may be cleared while S is computed, so their S must not choose
          // the path: results are reproducible.
          if (this->has_q_tail(this->q_tile_of(q_coord))) {
            of_tile = {};
          } else {
            score_mod_.update(range, s[0], s[1]);
            of_tile = range;
          }
        }
        SoftcapRange& step_range = kSlices == 2 ? of_tile : range;
        if (!Config::kIsRuntime && (kind & kFull)) {
          step<false>(s, q_coord, kind, prefetched, step_range);
        } else {
          this->zero_q_tail(q_state_, this->q_tile_of(q_coord));
          step<true, !Config::kLargeLseApart>(s, q_coord, kind, prefetched, step_range);
        }
      }
      // If one Q tile has kLargeLse, all of the work tile have. They have a loop of their own so
      // that the usual steps are contiguous: each work tile fetches their instructions anew.
      while (Config::kLargeLseApart && kind != kNoTile) {
        this->zero_q_tail(q_state_, this->q_tile_of(q_coord));
        step<true, true>(s, q_coord, kind, prefetched, range);
      }
    };
    if constexpr (Config::kPrefetchS) {
      dkdv_.for_each_work_tile(ds_count(), start, [&] { wait_and_fence(s); }, mainloop);
    } else {
      dkdv_.for_each_work_tile(ds_count(), [&] {
        start(true);
        mainloop();
      });
    }
  }

 private:
  using STiles = SAccum[kSlices];  // S of a Q tile, then its dP
  // Uses of this warpgroup's stages of dS so far.
  __device__ __forceinline__ const uint32_t& ds_count() const {
    return Config::kSplitsDs ? ds_count_ : q_state_.count;
  }
  __device__ __forceinline__ void acquire_ds() const {
    storage_.ds.producer_acquire({ds_count()}, this->ds_substage());
  }

  // Registers hold P for dS, which differs from P for dV.
  static constexpr bool kHoldsPForDs = Config::kSeparatePForDs && !Config::kStagePInDs;

  // Issues S of the Q tile at q_state_, without a branch, as other WGMMAs may be in flight. If
  // `valid` is false, nothing uses the result. load() issues loads before the WGMMAs, which hide
  // their latency.
  template <class Load>
  __device__ __forceinline__ void start_s_gemm(STiles& s, bool valid, Load load) const {
    storage_.q.consumer_wait_if(valid, q_state_);
    load();
    for_each_slice([&](auto slice) {
      this->template gemm_ss<kDim>(s[slice], k(), valid ? this->q(q_state_, slice) : k());
    });
  }

  // Whether a step follows that uses S of the Q tile.
  static __device__ __forceinline__ bool needs_s(uint32_t kind) {
    return kind != kNoTile && !(Config::kSkipMaskedTiles && (kind & kFullyMasked));
  }

  static __device__ __forceinline__ void wait_and_fence(STiles& s) {
    ptx::wgmma_wait<0>();
    for_each_slice([&](auto slice) { ptx::reg_fence(s[slice]); });
  }

  // One Q tile: adds to dK and dV, stores dS for dQ, advances q_coord and kind. With kPrefetchS the
  // step before has issued S, after its dK. The two consumers never synchronise with each other.
  // The tile is computed in slices of kSliceQ queries, so that registers hold what is in flight:
  // exponentials of one slice overlap WGMMAs of the other.
  template <bool kMasked, bool kMayBeLargeLse = false>
  __device__ __forceinline__ void step(STiles& s, int32_t& q_coord, uint32_t& kind,
                                       TilePrefetch& prefetched, SoftcapRange& range) {
    const QState at = q_state_;
    STiles& dp = s;
    PFragment p[kSlices], p_for_ds[kSlices], ds[kSlices];
    typename BwdScoreMod<Config>::Lse lse;
    // lse is loaded before S is complete, where registers allow: 1 % faster.
    const auto load_first_lse = [&] { score_mod_.load_lse(lse, at.stage()); };
    if (!Config::kPrefetchS) start_s_gemm(s, true, load_first_lse);
    if (Config::kSplitsBlockMask ? kMasked && (kind & Base::kPartlyMasked) : !Config::kIsDropout)
      score_mod_.prefetch(prefetched, q_coord);
    for_each_slice([&](auto slice) {
      if (Config::kPrefetchS || slice > 0) score_mod_.load_lse(lse, at.stage(), slice);
      if (!Config::kPrefetchS && slice == 0) wait_and_fence(s);
      // Frees P of the slice before: registers hold P for dS beside P of one slice only. Masks need
      // the registers before compute_p().
      const auto free_last_p = [&] {
        if constexpr (kHoldsPForDs && slice > 0) {
          ptx::wgmma_wait<0>();
          ptx::reg_fence(p[slice - 1]);
        }
      };
      if (kMasked) free_last_p();
      score_mod_.template compute_p<kMasked, kMayBeLargeLse>(
          s[slice], lse, p[slice], p_for_ds[slice], prefetched, q_coord, kind, at.stage(),
          q_state_.count, range, slice);
      ptx::reg_fence(p[slice]);
      if (!kMasked) free_last_p();
      if (slice == 0) storage_.dout.consumer_wait(q_state_);
      this->template gemm_ss<kDim>(dp[slice], this->v(), this->dout(at, slice));
      // Issued now, it overlaps what follows.
      this->gemm_rs(dkdv_.dv, p[slice], this->dout(at, slice));
    });
    if (!score_mod_.stages_p()) acquire_ds();
    for_each_slice([&](auto slice) {
      constexpr bool kWaitsForDv = kMasked && kHoldsPForDs && kSlices > 1;  // masks need registers
      ptx::wgmma_wait<kWaitsForDv ? 0 : 2 * kSlices - 1 - slice>();
      ptx::reg_fence(dp[slice]);
      if constexpr (kWaitsForDv && slice == 0) ptx::reg_fence(p[kSlices - 1]);
      if (slice == kSlices - 1 && (kind & kLast) && leader()) this->release_v();
      score_mod_.template compute_ds<kMasked>(kHoldsPForDs ? p_for_ds[slice] : p[slice], dp[slice],
                                              ds[slice], at.stage(), q_state_.count, q_coord,
                                              slice);
      this->store_ds(ds[slice], DsState{ds_count()}.stage(), slice);
      if (slice == kSlices - 1) {
        this->commit_ds({ds_count()});
        ptx::wgmma_wait<kSlices - 1>();
        ptx::reg_fence(dkdv_.dv);
        // Otherwise P for dS may take registers that a WGMMA still reads.
        if constexpr (Config::kStagePInDs || (kHoldsPForDs && kSlices > 1 && !kMasked))
          ptx::reg_fence(p[slice]);
        this->release_dout(at);
      }
      this->gemm_rs(dkdv_.dk, ds[slice], this->q(at, slice));
    });
    q_state_.advance();
    if (Config::kSplitsDs) ++ds_count_;
    if (Config::kPrefetchS && !Config::kSkipMaskedTiles)
      start_s_gemm(s, q_state_.count != work_tile().iter_end, [] {});
    advance(q_coord, kind, prefetched);
    // Q of this step is still held: a wait for the tile in its stage would not end.
    while (Config::kPrefetchS && Config::kSplitsDs && (kind & kFullyMasked) &&
           q_state_.count + 1 != at.count + Config::kQStages) {
      skip_tile(q_coord, kind, prefetched);
    }
    if (Config::kPrefetchS && Config::kSkipMaskedTiles) start_s_gemm(s, needs_s(kind), [] {});
    ptx::wgmma_wait<Config::kPrefetchS ? kSlices : 0>();
    ptx::reg_fence(dkdv_.dk);
    this->release_q(at);
    if (Config::kPrefetchS) wait_and_fence(s);
  }

  // Skips a Q tile that sees none of this warpgroup's keys, whose S has not been issued, and issues
  // the next S.
  __device__ __forceinline__ void skip_and_start_s(STiles& s, int32_t& q_coord, uint32_t& kind,
                                                   TilePrefetch& prefetched) {
    skip_tile(q_coord, kind, prefetched);
    if (Config::kPrefetchS) {
      start_s_gemm(s, needs_s(kind), [] {});
      wait_and_fence(s);
    }
  }

  // Skips such a Q tile. Unless kSplitsDs, stores dS = 0, for dQ over all keys.
  __device__ __forceinline__ void skip_tile(int32_t& q_coord, uint32_t& kind,
                                            TilePrefetch& prefetched) {
    static_assert(!Config::kSkipMaskedTiles || kSlices == 1, "dS of one slice is stored");
    const QState at = q_state_;
    // Every warp waits for each phase before the stage is released: a warp that missed a phase
    // would take the next but one for it.
    storage_.q.consumer_wait(q_state_);
    storage_.dout.consumer_wait(q_state_);
    score_mod_.skip_bias(q_state_.count);
    if constexpr (!Config::kSplitsDs) {
      acquire_ds();
      const PFragment zeros = {};
      this->store_ds(zeros, DsState{ds_count()}.stage());
      this->commit_ds({ds_count()});
    }
    this->release_dout(at);
    if (!Config::kSplitsDs) this->warpgroup_sync();
    if ((kind & kLast) && leader()) this->release_v();
    this->release_q(at);
    q_state_.advance();
    advance(q_coord, kind, prefetched);
  }

  // Advances q_coord and kind, and draws the dropout signs of the next Q tile: the next step lacks
  // registers for it at D = 128. ptxas places the drawing after the WGMMAs; forced to overlap them,
  // it is no faster. Drawn slice by slice, D = 64 is 8 % slower.
  __device__ __forceinline__ void advance(int32_t& q_coord, uint32_t& kind,
                                          TilePrefetch& prefetched) const {
    Base::advance(q_coord, kind, q_state_.count);
    if (Config::kIsDropout) score_mod_.prefetch(prefetched, q_coord);
  }

  template <int kSlice>
  struct Slice {
    __device__ constexpr operator int() const { return kSlice; }
  };

  template <class Function, int kSlice = 0>
  static __device__ __forceinline__ void for_each_slice(Function function) {
    function(Slice<kSlice>());
    if constexpr (kSlice + 1 < kSlices) for_each_slice<Function, kSlice + 1>(function);
  }

  __device__ __forceinline__ ptx::SmemDescriptor k() const {
    return ptx::SmemDescriptor::at(k_address_, 0);
  }

  BwdScoreMod<Config> score_mod_;
  BwdDkDv<Config> dkdv_;
  QState q_state_;         // Q tiles so far
  uint32_t k_address_;     // address of this warpgroup's rows of K
  uint32_t ds_count_ = 0;  // kSplitsDs: Q tiles so far that were not skipped
};

}  // namespace flashattn::cuda::sm90
