// The consumers of the Hopper backward kernel for small heads: a warpgroup for 64 keys.
#pragma once

#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_output.cuh"

namespace flashattn::cuda::sm90 {

template <class Config, int group_>
class BackwardConsumer : KeyOutput<Config, group_> {
  using Base = KeyOutput<Config, group_>;
  using T = typename Config::T;
  using Base::control_, Base::item, Base::leader, Base::params_, Base::shared_;
  using typename Base::Ahead, typename Base::Operand, typename Base::Tile;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, uint32_t shared,
                                              BackwardControl<Config>& control)
      : Base(params, shared, control) {}

  __device__ __forceinline__ void run() {
    if (Config::kTurns && group_ == 0) ptx::named_arrive(kTurnBarrier, 256);
    for (;;) {
      const uint32_t number = this->take();
      if (item().end) break;
      start();
      work(number % 2);
      this->store(dk_, dv_, {place_.count});
      ptx::named_sync(kWarpgroupBarrier + group_, 128);  // nobody reads the item any more
    }
    if (leader()) ptx::bulk_wait();
  }

 private:
  // Sums of 0.
  __device__ __forceinline__ void start() {
    this->look();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
  }

  // parity: of the barriers' phases that end once an item.
  __device__ __forceinline__ void work(uint32_t parity) {
    ptx::mbarrier_wait(barrier_at(control_.k_full), parity);
    // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
    if (params_.kv_has_tail && item().keys < kTileKv) {
      this->template clear_rows<Config::kPanels>(shared_, kTileKv, item().keys);
      this->settle_cleared();
    }
    ptx::mbarrier_wait(barrier_at(control_.v_full), parity);
    // What the last item left in the buffers of dS and dQ is on its way.
    if (leader()) ptx::bulk_wait_read();
    if constexpr (Config::kDqGroup) {
      ptx::named_sync(kWarpgroupBarrier + group_, 128);
    } else {
      ptx::named_sync(kConsumerBarrier, 256);
    }
    int32_t place;
    TileKind kind;
    for (this->begin(place, kind, place_.count); kind != TileKind::kEmpty;) {
      if (!Config::kAny && kind == TileKind::kFull) {
        step<false>(place, kind);
      } else {
        const int32_t tile = this->tile_of(place);
        if (params_.q_has_tail && (tile + 1) * kTileQ > item().len.q) clear_queries(tile);
        step<true>(place, kind);
      }
    }
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.kv_empty));
  }

  // A tile of queries: what it adds to dK and dV, and its dQ. With a warpgroup for that the
  // consumers never meet; else once, when dS is complete: of its two buffers the one is read while
  // the other is written. Then the next place and its kind.
  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t& place, TileKind& kind) {
    const uint32_t slot = place_.slot();
    Tile s, dp;
    Operand p, derived, ds;
    Ahead ahead;
    const ptx::Matrix keys = ptx::Matrix::at(shared_ + group_ * 64 * 128, 0);
    const ptx::Matrix q = ptx::Matrix::at(shared_ + Config::kQ + slot * Config::kQueryBytes, 0);
    const ptx::Matrix dout = q.further(Config::kDo - Config::kQ);
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    if (Config::kTurns) ptx::named_sync(kTurnBarrier + group_, 256);
    this->template multiply_rows<kDim>(s, keys, q);
    if constexpr (Config::kLateGradients) {
      if (Config::kTurns) ptx::named_arrive(kTurnBarrier + (group_ ^ 1), 256);
      this->look_ahead(ahead, place);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      this->template weigh<kMasked>(s, p, derived, ahead, place, kind, slot, place_.count);
      ptx::pin(p);
      ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      this->template multiply_rows<kDim>(dp, keys.further(Config::kV), dout);
    } else {
      ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      this->template multiply_rows<kDim>(dp, keys.further(Config::kV), dout);
      if (Config::kTurns) ptx::named_arrive(kTurnBarrier + (group_ ^ 1), 256);
      this->look_ahead(ahead, place);
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      this->template weigh<kMasked>(s, p, derived, ahead, place, kind, slot, place_.count);
      if (Config::kModified) ptx::pin(p);
    }
    this->add_product(dv_, p, dout);  // at once: it runs under what follows
    ptx::wgmma_wait<1>();
    ptx::pin(dp);
    this->template differentiate<kMasked>(Config::kModified ? derived : p, dp, ds, slot,
                                          place_.count);
    if constexpr (Config::kDqGroup) {
      this->hand_over_ds(ds, {place_.count});
      this->add_product(dk_, ds, q);
      this->advance(place, kind, place_.count + 1);
      ptx::wgmma_wait<1>();
      ptx::pin(dv_);
      // Each warp for itself: another may not have read its D yet.
      __syncwarp();
      if (this->lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
    } else {
      float dq[32];
      this->store_ds(ds, slot);
      ptx::fence_async_proxy();
      ptx::named_sync(kConsumerBarrier, 256);
      multiply_dq<Config>(dq, shared_, slot, group_);
      this->add_product(dk_, ds, q);
      ptx::mbarrier_wait(barrier_at(control_.dq_empty[group_]), (place_.count & 1) ^ 1);
      ptx::wgmma_wait<1>();
      ptx::pin(dq);
      ptx::pin(dv_);
      if (leader()) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
      hand_over_dq<Config>(dq, control_, shared_, group_);
      this->advance(place, kind, place_.count + 1);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    place_.advance();
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

  Ring<Config::kStages> place_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
