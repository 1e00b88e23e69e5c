// The consumers of the Hopper backward kernel for small heads: a warpgroup for 64 keys.
#pragma once

#include "cuda/kernels/sm90/dq_mma.cuh"
#include "cuda/kernels/sm90/bwd_dkdv.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardConsumer : BackwardSums<Config> {
  using Base = BackwardSums<Config>;
  using T = typename Config::T;
  using Base::control_, Base::dk_, Base::dout, Base::dv_, Base::group_, Base::item;
  using Base::kDim, Base::kFull, Base::kHidden, Base::kLast, Base::kNone, Base::kTileQ,
      Base::leader, Base::place_, Base::q, Base::shared_, Base::values;
  using typename Base::Ahead, typename Base::Lse, typename Base::Operand, typename Base::Tile;
  static constexpr int kPartQ = Config::kPartQ, kParts = kTileQ / kPartQ;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, uint32_t shared,
                                              BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group), keys_(shared) {}

  __device__ __forceinline__ void run() {
    int32_t place;
    uint32_t kind;
    ScoreModKind s;
    Ahead ahead;
    const auto start = [&](bool some) {
      kind = kNone;
      if (some) {
        keys_ = keys_at<Config>(shared_, item()) + group_ * 64 * 128;
        this->begin(place, kind, place_.count);
        if (kind != kNone) this->clear_keys(keys_ - group_ * 64 * 128);
      }
      if (Config::kAhead) score(s, kind != kNone);
      if (Config::kDropped) this->look_ahead(ahead, place);
    };
    const auto work = [&] {
      this->look();
      while (kind != kNone) {
        if (Config::kSkips && (kind & kHidden)) {
          pass(place, kind, ahead);
        } else if (!Config::kAny && (kind & kFull)) {
          step<false>(s, place, kind, ahead);
        } else {
          this->clear_queries(this->tile_of(place));
          step<true>(s, place, kind, ahead);
        }
      }
    };
    if constexpr (Config::kAhead) {
      this->for_each_item(start, [&] { settle(s); }, work);
    } else {
      this->for_each_item([&] {
        start(true);
        work();
      });
    }
  }

 private:
  using ScoreModKind = Tile[kParts];  // S of a tile of queries, then its dP

  // Starts the products; without a branch, as others may be under way. Of no tile: something.
  __device__ __forceinline__ void score(ScoreModKind& s, bool some) const {
    ptx::mbarrier_wait_if(some, barrier_at(control_.q_full[place_.slot()]), place_.phase());
    for_parts([&](auto part) {
      this->template multiply_rows<kDim>(s[part], keys(), some ? q(part) : keys());
    });
  }

  static __device__ __forceinline__ void settle(ScoreModKind& s) {
    ptx::wgmma_wait<0>();
    for_parts([&](auto part) { ptx::reg_fence(s[part]); });
  }

  // A tile of queries: what it adds to dK and dV, and dS for its dQ; then the next place and its
  // kind. S comes from the step before, where registers allow, which started it behind its dK. The
  // consumers never meet. Part by part, so that registers hold what is under way: exponentials of
  // one run under products of the other.
  template <bool kMasked>
  __device__ __forceinline__ void step(ScoreModKind& s, int32_t& place, uint32_t& kind,
                                       Ahead& ahead) {
    const uint32_t slot = place_.slot();
    ScoreModKind& dp = s;
    Operand p[kParts], derived[kParts], ds[kParts];
    Lse lse;
    if (!Config::kAhead) score(s, true);
    if (!Config::kDropped) this->look_ahead(ahead, place);
    for_parts([&](auto part) {
      // Before S is there, where registers allow: 1 %.
      this->read_lse(lse, slot, part);
      if (!Config::kAhead && part == 0) settle(s);
      this->template weigh<kMasked>(s[part], lse, p[part], derived[part], ahead, place, kind, slot,
                                    place_.count, part);
      ptx::reg_fence(p[part]);
      if (part == 0) ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      this->template multiply_rows<kDim>(dp[part], values(), dout(part));
      this->add_product(dv_, p[part], dout(part));  // at once: it runs under what follows
    });
    if (!this->parks()) this->await_ds({place_.count});
    for_parts([&](auto part) {
      ptx::wgmma_wait<2 * kParts - 1 - part>();
      ptx::reg_fence(dp[part]);
      if (part == kParts - 1 && (kind & kLast) && leader()) this->free_v();
      constexpr bool kDerived = Config::kDerived && !Config::kParked;
      this->template differentiate<kMasked>(kDerived ? derived[part] : p[part], dp[part], ds[part],
                                            slot, place_.count, part);
      this->store_ds(ds[part], PipelineState<Config::kDsStages>{place_.count}.slot(), part);
      if (part == kParts - 1) {
        this->hand_over_ds({place_.count});
        ptx::wgmma_wait<kParts - 1>();
        ptx::reg_fence(dv_);
        // Or else what was parked may be loaded over operands that are still being read.
        if constexpr (Config::kParked) ptx::reg_fence(p[part]);
        this->free_dout(slot);
      }
      this->add_product(dk_, ds[part], q(part));
    });
    place_.advance();
    if (Config::kAhead) score(s, place_.count != item().done);
    advance(place, kind, ahead);
    ptx::wgmma_wait<Config::kAhead ? kParts : 0>();
    ptx::reg_fence(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    if (Config::kAhead) settle(s);
  }

  // The same of a tile that sees none of this warpgroup's keys: zeros, for its dQ of all keys.
  __device__ __forceinline__ void pass(int32_t& place, uint32_t& kind, Ahead& ahead) {
    static_assert(!Config::kSkips || (!Config::kAhead && kParts == 1), "S is of this tile");
    const uint32_t slot = place_.slot();
    // Every warp waits for each phase, before one says that all have: who misses a phase takes the
    // next but one for it.
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    this->await_ds({place_.count});
    const Operand zeros = {};
    this->store_ds(zeros, PipelineState<Config::kDsStages>{place_.count}.slot());
    this->hand_over_ds({place_.count});
    this->free_dout(slot);
    this->sync();
    if (leader()) {
      if (kind & kLast) this->free_v();
      ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    }
    place_.advance();
    advance(place, kind, ahead);
  }

  // The next place and its kind; of a dropout what is known of it: in the next step D = 128 lacks
  // registers. ptxas draws behind the products; made to do so under them it is no faster.
  __device__ __forceinline__ void advance(int32_t& place, uint32_t& kind, Ahead& ahead) const {
    Base::advance(place, kind, place_.count);
    if (Config::kDropped) this->look_ahead(ahead, place);
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

  __device__ __forceinline__ ptx::SmemDescriptor keys() const {
    return ptx::SmemDescriptor::at(keys_, 0);
  }

  uint32_t keys_;  // where this warpgroup's of K lie
};

}  // namespace flashattn::cuda::sm90
