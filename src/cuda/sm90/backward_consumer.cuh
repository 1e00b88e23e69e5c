// The consumers of the Hopper backward kernel for small heads: a warpgroup for 64 keys.
#pragma once

#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_output.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardConsumer : KeyOutput<Config> {
  using Base = KeyOutput<Config>;
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
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
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

  // A tile of queries: what it adds to dK and dV, and dS for its dQ; then the next place and its
  // kind. The consumers never meet. Part by part, so that registers hold what is under way:
  // exponentials of one run under products of the other.
  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t& place, TileKind& kind) {
    const uint32_t slot = place_.slot();
    Tile s[kParts], dp[kParts];
    Operand p[kParts], derived[kParts], ds[kParts];
    Ahead ahead;
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    for_parts([&](auto part) { this->template multiply_rows<kDim>(s[part], keys(), q(part)); });
    this->look_ahead(ahead, place);
    for_parts([&](auto part) {
      ptx::wgmma_wait<kParts - 1 + part>();
      ptx::pin(s[part]);
      this->template weigh<kMasked>(s[part], p[part], derived[part], ahead, place, kind, slot,
                                    place_.count, part);
      ptx::pin(p[part]);
      if (part == 0) ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      this->template multiply_rows<kDim>(dp[part], keys().further(Config::kV), dout(part));
      this->add_product(dv_, p[part], dout(part));  // at once: it runs under what follows
    });
    if (!Config::kParked) this->await_ds({place_.count});
    for_parts([&](auto part) {
      ptx::wgmma_wait<2 * kParts - 1 - part>();
      ptx::pin(dp[part]);
      this->template differentiate<kMasked>(Config::kModified ? derived[part] : p[part], dp[part],
                                            ds[part], slot, place_.count, part);
      this->store_ds(ds[part], Ring<Config::kDsStages>{place_.count}.slot(), part);
      if (part == kParts - 1) this->hand_over_ds({place_.count});
      this->add_product(dk_, ds[part], q(part));
    });
    this->advance(place, kind, place_.count + 1);
    ptx::wgmma_wait<kParts>();
    ptx::pin(dv_);
    // Each warp for itself: another may not have read its D yet.
    __syncwarp();
    if (this->lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
    ptx::wgmma_wait<0>();
    ptx::pin(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    place_.advance();
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

  // This warpgroup's of K.
  __device__ __forceinline__ ptx::Matrix keys() const {
    return ptx::Matrix::at(shared_ + group_ * 64 * 128, 0);
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

  Ring<Config::kStages> place_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
