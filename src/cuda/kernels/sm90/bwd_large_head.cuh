// The consumers of the Hopper backward kernel for large heads. The first computes S^T = K Q^T, the
// weights and dV += P^T dO; the second dP^T = V dO^T, dS and dK += dS^T Q. The weights go from the
// one to the other by shared memory, rounded: in the order of accumulators, or as dS will lie, in
// its place.
#pragma once

#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

// kGradients: the second.
template <class Config, bool kGradients>
class WideConsumer : BackwardScores<Config> {
  using Base = BackwardScores<Config>;
  using T = typename Config::T;
  using Base::control_, Base::params_, Base::shared_;
  using Base::item, Base::lane, Base::leader, Base::warp;
  using typename Base::Ahead, typename Base::Operand, typename Base::Tile;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kDim = kGradients ? Config::kDimQk : Config::kDimV;  // of the sums
  // With four warpgroups the compiler takes no product 256 wide.
  static constexpr int kParts = kDim > 192 ? 2 : 1, kPart = kDim / 2 / kParts;

 public:
  __device__ __forceinline__ WideConsumer(const BackwardParams& params, uint32_t shared,
                                          BackwardControl<Config>& control)
      : Base(params, shared, control, kGradients) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      this->take();
      if (item().end) break;
      if (!kGradients) this->look();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sum_[i / kPart][i % kPart] = 0.0f;
      work();
      this->free_keys();
      const auto sums = [&](int i) -> float& { return sum_[i / kPart][i % kPart]; };
      if (!this->template unite<kDim / 2>(sums)) {
        // Another block does.
      } else if (kGradients) {
        store(params_.common.args.dk, params_.common.problem.dim_qk, params_.common.problem.scale);
      } else {
        store(params_.common.args.dv, params_.common.problem.dim_v, this->kept_factor());
      }
      ptx::named_sync(kWarpgroupBarrier + kGradients, 128);  // nobody reads the item any more
    }
  }

 private:
  __device__ __forceinline__ void work() {
    int32_t place;
    uint32_t kind;
    this->begin(place, kind, count_);
    if (kGradients && params_.kv_has_tail && kind != Base::kNone) clear_keys();
    while (kind != Base::kNone) {
      if (!Config::kAny && (kind & Base::kFull)) {
        step<false>(place, kind);
      } else {
        step<true>(place, kind);
      }
    }
  }

  // Zeros in place of keys past the last: their dS is 0, but they may be NaN. Before dQ sees dS.
  __device__ __forceinline__ void clear_keys() const {
    // Also of the partner's, which are 64 advance on or back.
    const int32_t other = Config::kPair ? item().len.kv - (item().key ^ kTileKv) : kTileKv;
    if (item().keys >= kTileKv && other >= kTileKv) return;
    ptx::mbarrier_wait(barrier_at(control_.q_full[q_place().slot()]), q_place().phase());
    this->template clear_rows<Config::kPanelsQk>(shared_, kTileKv, item().keys);
    if constexpr (Config::kPair) {
      this->template clear_rows<Config::kOtherPanels>(shared_ + Config::kOther, kTileKv, other);
    }
    this->settle_cleared();
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t& place, uint32_t& kind) {
    if constexpr (kGradients) {
      step_of_gradients<kMasked>(this->tile_of(place));
    } else {
      step_of_weights<kMasked>(place, kind);
    }
    this->advance(place, kind, count_ + 1);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kParts; ++n) ptx::reg_fence(sum_[n]);
    if (leader()) {
      if (!kGradients) arrive_at_all<Config>(control_.do_empty[dout_place().slot()]);
      arrive_at_all<Config>(control_.q_empty[q_place().slot()]);
    }
    ++count_;
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_of_weights(int32_t place, uint32_t kind) {
    Tile s;
    Operand p, derived;
    Ahead ahead;
    ptx::mbarrier_wait(barrier_at(control_.q_full[q_place().slot()]), q_place().phase());
    this->template multiply_rows<Config::kDimQk>(s, ptx::SmemDescriptor::at(shared_, 0), q());
    this->look_ahead(ahead, place);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    typename Base::Lse lse;
    this->read_lse(lse, q_place().slot());  // not before: D = 256 would lose 5 %
    this->template weigh<kMasked>(s, lse, p, derived, ahead, place, kind, q_place().slot(), count_);
    hand_over(Config::kDerived ? derived : p);
    ptx::mbarrier_wait(barrier_at(control_.do_full[dout_place().slot()]), dout_place().phase());
    if (kMasked) clear_tail<Config::kPanelsV>(dout_address(), this->tile_of(place));
    add(p, dout());
  }

  template <bool kMasked>
  __device__ __forceinline__ void step_of_gradients(int32_t tile) {
    Tile dp;
    Operand p, ds;
    ptx::mbarrier_wait(barrier_at(control_.do_full[dout_place().slot()]), dout_place().phase());
    this->template multiply_rows<Config::kDimV>(
        dp, ptx::SmemDescriptor::at(shared_ + Config::kV, 0), dout());
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dp);
    receive(p);
    this->template differentiate<kMasked>(p, dp, ds, dout_place().slot(), count_);
    __syncwarp();
    if (lane() == 0) arrive_at_all<Config>(control_.do_empty[dout_place().slot()]);
    if constexpr (!Config::kParked) this->await_ds({count_});
    this->store_ds(ds, PipelineState<Config::kDsStages>{count_}.slot());
    this->hand_over_ds({count_});
    if constexpr (Config::kPair) send_ds();
    ptx::mbarrier_wait(barrier_at(control_.q_full[q_place().slot()]), q_place().phase());
    if (kMasked) clear_tail<Config::kPanelsQk>(q_address(), tile);
    add(ds, q());
  }

  // The block's dS to the partner, at once: dQ waits for it. Its place there is free, as this
  // block's own was: that is when both have computed dQ.
  __device__ __forceinline__ void send_ds() const {
    ptx::named_sync(kWarpgroupBarrier + kGradients, 128);  // all of it has been stored
    if (!leader()) return;
    const uint32_t slot = PipelineState<Config::kDsStages>{count_}.slot();
    const uint32_t own = shared_ + Config::kDs + slot * Config::kScoreBytes;
    const uint32_t full = barrier_at(control_.pair.received[slot]);
    ptx::mbarrier_expect(full, Config::kOwnBytes);
    ptx::bulk_send(at_partner(own + Config::kOwnBytes), own, Config::kOwnBytes, at_partner(full));
  }

  __device__ __forceinline__ void add(const Operand& weights, ptx::SmemDescriptor rows) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      this->add_product(sum_[n], weights, rows.advance(n * (kPart / 32) * (kTileQ * 128)));
    }
  }

  __device__ __forceinline__ PipelineState<Config::kQStages> q_place() const { return {count_}; }
  __device__ __forceinline__ PipelineState<Config::kDoStages> dout_place() const {
    return {count_};
  }

  __device__ __forceinline__ uint32_t q_address() const {
    return shared_ + Config::kQ + q_place().slot() * Config::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t dout_address() const {
    return shared_ + Config::kDo + dout_place().slot() * Config::kDoBytes;
  }
  __device__ __forceinline__ ptx::SmemDescriptor q() const {
    return ptx::SmemDescriptor::at(q_address(), 0);
  }
  __device__ __forceinline__ ptx::SmemDescriptor dout() const {
    return ptx::SmemDescriptor::at(dout_address(), 0);
  }

  // This lane's weights, on their way.
  __device__ __forceinline__ uint32_t weights_at(uint32_t slot) const {
    return shared_ + Config::kP + slot * Config::kOwnBytes + no_hoist(threadIdx.x) % 128 * 16;
  }

  __device__ __forceinline__ void hand_over(const Operand& p) const {
    const PipelineState<2> at{count_};
    if constexpr (!Config::kParked) {
      ptx::mbarrier_wait(barrier_at(control_.p_empty[at.slot()]), at.phase() ^ 1);
#pragma unroll
      for (int n = 0; n < kTileQ / 16; ++n) {
        ptx::store_shared_16(weights_at(at.slot()) + n * 2048, p[4 * n], p[4 * n + 1], p[4 * n + 2],
                             p[4 * n + 3]);
      }
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.p_full[at.slot()]));
  }

  __device__ __forceinline__ void receive(Operand& p) const {
    const PipelineState<2> at{count_};
    ptx::mbarrier_wait(barrier_at(control_.p_full[at.slot()]), at.phase());
    if constexpr (Config::kParked) return;
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      const int4 words = ptx::load_shared_16(weights_at(at.slot()) + n * 2048);
      p[4 * n] = words.x;
      p[4 * n + 1] = words.y;
      p[4 * n + 2] = words.z;
      p[4 * n + 3] = words.w;
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.p_empty[at.slot()]));
  }

  // Zeros in place of queries past the last: their weights are 0, but they may be NaN.
  template <int kPanels>
  __device__ __forceinline__ void clear_tail(uint32_t rows, int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= item().len.q) return;
    this->template clear_rows<kPanels>(rows, kTileQ, item().len.q - tile * kTileQ);
    this->settle_cleared();
  }

  __device__ __forceinline__ void store(const flashattn_tensor& tensor, int32_t dim,
                                        float factor) const {
    this->template store_rows<kDim>(tensor, this->target(), dim, warp() * 16 + lane() / 4, factor,
                                    [&](int i) { return sum_[i / kPart][i % kPart]; });
  }

  uint32_t count_ = 0;  // tiles of queries so far
  float sum_[kParts][kPart];
};

}  // namespace flashattn::cuda::sm90
