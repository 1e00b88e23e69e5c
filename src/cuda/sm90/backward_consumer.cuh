// The consumers of the Hopper backward kernel for small heads: a warpgroup for 64 keys.
#pragma once

#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_scores.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardConsumer : BackwardScores<Config> {
  using Base = BackwardScores<Config>;
  using T = typename Config::T;
  using Base::control_, Base::group_, Base::item, Base::leader, Base::params_, Base::shared_;
  using typename Base::Ahead, typename Base::Operand, typename Base::Tile;
  static constexpr int kPartQ = Config::kPartQ, kParts = Config::kTileQ / kPartQ;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, uint32_t shared,
                                              BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      this->take();
      if (item().end) break;
      keys_ = keys_at<Config>(shared_, item()) + group_ * 64 * 128;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
      work();
      this->free_keys();
      const Problem& problem = params_.common.problem;
      this->template store_rows<kDim>(params_.common.args.dv, problem.dim_v, this->row(),
                                      this->kept_factor(), [&](int i) { return dv_[i]; });
      this->template store_rows<kDim>(params_.common.args.dk, problem.dim_qk, this->row(),
                                      problem.scale, [&](int i) { return dk_[i]; });
      ptx::named_sync(kWarpgroupBarrier + group_, 128);  // nobody reads the item any more
    }
  }

 private:
  __device__ __forceinline__ void work() {
    int32_t place;
    TileKind kind;
    this->begin(place, kind, place_.count);
    // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
    if (params_.kv_has_tail && item().keys < kTileKv && kind != TileKind::kEmpty) {
      ptx::mbarrier_wait(barrier_at(control_.q_full[place_.slot()]), place_.phase());
      this->template clear_rows<Config::kPanels>(keys_ - group_ * 64 * 128, kTileKv, item().keys);
      this->settle_cleared();
    }
    Scores s;
    if (Config::kAhead) score(s, kind != TileKind::kEmpty);
    this->look();
    if (Config::kAhead) settle(s);
    while (kind != TileKind::kEmpty) {
      if (!Config::kAny && kind == TileKind::kFull) {
        step<false>(s, place, kind);
      } else {
        const int32_t tile = this->tile_of(place);
        if (params_.q_has_tail && (tile + 1) * kTileQ > item().len.q) clear_queries(tile);
        step<true>(s, place, kind);
      }
    }
  }

  using Scores = Tile[kParts];  // S of a tile of queries, then its dP

  // Starts the products; without a branch, as others may be under way. Of no tile: something.
  __device__ __forceinline__ void score(Scores& s, bool some) const {
    ptx::mbarrier_wait_if(some, barrier_at(control_.q_full[place_.slot()]), place_.phase());
    for_parts([&](auto part) {
      this->template multiply_rows<kDim>(s[part], keys(), some ? q(part) : keys());
    });
  }

  static __device__ __forceinline__ void settle(Scores& s) {
    ptx::wgmma_wait<0>();
    for_parts([&](auto part) { ptx::pin(s[part]); });
  }

  // A tile of queries: what it adds to dK and dV, and dS for its dQ; then the next place and its
  // kind. S comes from the step before, where registers allow, which started it behind its dK. The
  // consumers never meet. Part by part, so that registers hold what is under way: exponentials of
  // one run under products of the other.
  template <bool kMasked>
  __device__ __forceinline__ void step(Scores& s, int32_t& place, TileKind& kind) {
    const uint32_t slot = place_.slot();
    Scores& dp = s;
    Operand p[kParts], derived[kParts], ds[kParts];
    Ahead ahead;
    if (!Config::kAhead) score(s, true);
    this->look_ahead(ahead, place);
    for_parts([&](auto part) {
      if (!Config::kAhead && part == 0) settle(s);
      this->template weigh<kMasked>(s[part], p[part], derived[part], ahead, place, kind, slot,
                                    place_.count, part);
      ptx::pin(p[part]);
      if (part == 0) ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      this->template multiply_rows<kDim>(dp[part], values(), dout(part));
      this->add_product(dv_, p[part], dout(part));  // at once: it runs under what follows
    });
    if (!Config::kParked) this->await_ds({place_.count});
    for_parts([&](auto part) {
      ptx::wgmma_wait<2 * kParts - 1 - part>();
      ptx::pin(dp[part]);
      this->template differentiate<kMasked>(Config::kModified ? derived[part] : p[part], dp[part],
                                            ds[part], slot, place_.count, part);
      this->store_ds(ds[part], Ring<Config::kDsStages>{place_.count}.slot(), part);
      if (part == kParts - 1) {
        this->hand_over_ds({place_.count});
        ptx::wgmma_wait<kParts - 1>();
        ptx::pin(dv_);
        // Each warp for itself: another may not have read its D yet.
        __syncwarp();
        if (this->lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
      }
      this->add_product(dk_, ds[part], q(part));
    });
    place_.advance();
    if (Config::kAhead) score(s, place_.count != item().done);
    this->advance(place, kind, place_.count);
    ptx::wgmma_wait<Config::kAhead ? kParts : 0>();
    ptx::pin(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    if (Config::kAhead) settle(s);
  }

  template <int kPart>
  struct Part {
    __device__ constexpr operator int() const { return kPart; }
  };

  template <class Function, int kPart = 0>
  static __device__ __forceinline__ void for_parts(Function function) {
    function(Part<kPart>());
    if constexpr (kPart + 1 < kParts) for_parts<Function, kPart + 1>(function);
  }

  // This warpgroup's of K and V.
  __device__ __forceinline__ ptx::Matrix keys() const { return ptx::Matrix::at(keys_, 0); }
  __device__ __forceinline__ ptx::Matrix values() const {
    return ptx::Matrix::at(shared_ + Config::kV + group_ * 64 * 128, 0);
  }

  // Of the tile at work: Q and dO from the first query of a part on.
  __device__ __forceinline__ ptx::Matrix q(int part = 0) const {
    return ptx::Matrix::at(shared_ + Config::kQ + place_.slot() * Config::kQueryBytes, 0)
        .further(part * kPartQ * 128);
  }
  __device__ __forceinline__ ptx::Matrix dout(int part = 0) const {
    return q(part).further(Config::kDo - Config::kQ);
  }

  // Rows of Q and dO past the last query: their weights are 0, but they may be NaN.
  __device__ __forceinline__ void clear_queries(int32_t tile) const {
    const uint32_t slot = place_.slot();
    const int32_t first = item().len.q - tile * kTileQ;
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    this->template clear_rows<Config::kPanels>(shared_ + Config::kQ + slot * Config::kQueryBytes,
                                               kTileQ, first);
    this->template clear_rows<Config::kPanels>(shared_ + Config::kDo + slot * Config::kQueryBytes,
                                               kTileQ, first);
    this->settle_cleared();
  }

  uint32_t keys_;                // where this warpgroup's of K lie
  Ring<Config::kStages> place_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
