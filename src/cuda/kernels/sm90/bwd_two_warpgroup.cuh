// The consumers of the Hopper backward kernel for many queries: a warpgroup for 64 keys, which
// computes its half of the columns of dQ, too, transposed: dQ^T = K^T dS^T, of all keys.
//
// Two warpgroups leave each registers for tiles of 80 queries, and a product of 80 reads less of
// shared memory a query than one of 64. The order of the products is the best of ten that were
// measured (H200): one consumer's exponentials run while the other has the tensor cores, and were
// slower by 2 to 10 % with its own products under them; dV before dP cost 8 %, S before dQ 5 %. dQ
// of a tile comes a tile later, when the other's dS is there for sure.
#pragma once

#include "cuda/kernels/sm90/dq_mma.cuh"
#include "cuda/kernels/sm90/bwd_dkdv.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class LongConsumer : BackwardSums<Config> {
  using Base = BackwardSums<Config>;
  using T = typename Config::T;
  using Base::control_, Base::dk_, Base::dout, Base::dv_, Base::group_, Base::item;
  using Base::kDim, Base::kTileKv, Base::kTileQ, Base::leader, Base::place_, Base::q;
  using Base::shared_, Base::values;
  using typename Base::Ahead, typename Base::Lse, typename Base::Operand, typename Base::Tile;
  using Stages = PipelineState<Config::kDsStages>;

 public:
  __device__ __forceinline__ LongConsumer(const BackwardParams& params, uint32_t shared,
                                          BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  __device__ __forceinline__ void run() {
    this->for_each_item([&] { work(); });
  }

 private:
  __device__ __forceinline__ void work() {
    int32_t place;
    uint32_t kind;
    this->begin(place, kind, place_.count);
    if (kind == Base::kNone) return;
    this->clear_keys(shared_);
    Tile x;
    score(x, true);
    this->look();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(x);
    this->clear_queries(place);
    step<true, false>(x, place, kind);
    while (kind != Base::kNone) {
      if (kind & Base::kFull) {
        step<false, true>(x, place, kind);
      } else {
        this->clear_queries(place);
        step<true, true>(x, place, kind);
      }
    }
    const Stages last{place_.count - 1};
    multiply_dq(x, last);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(x);
    leave(x, last);
  }

  // Starts S of the tile at place_; of none: of something.
  __device__ __forceinline__ void score(Tile& s, bool some) const {
    ptx::mbarrier_wait_if(some, barrier_at(control_.q_full[place_.slot()]), place_.phase());
    this->template multiply_rows<kDim>(s, keys(), some ? q() : keys());
  }

  // From S of a tile of queries to its dS, and what it adds to dK and dV; S of the next. kLater: dQ
  // of the tile before, too, which leaves under S.
  template <bool kMasked, bool kLater>
  __device__ __forceinline__ void step(Tile& x, int32_t& place, uint32_t& kind) {
    const uint32_t slot = place_.slot();
    const Stages at{place_.count}, last{place_.count - 1};
    Operand p, derived, ds;
    Ahead ahead;
    Lse lse;
    this->read_lse(lse, slot);
    this->template weigh<kMasked>(x, lse, p, derived, ahead, place, kind, slot, place_.count);
    ptx::reg_fence(p);
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    this->template multiply_rows<kDim>(x, values(), dout());
    this->add_product(dv_, p, dout());
    this->await_ds(at);
    ptx::wgmma_wait<1>();
    ptx::reg_fence(x);
    this->template differentiate<kMasked>(p, x, ds, slot, place_.count);
    this->store_ds(ds, at.slot());
    this->hand_over_ds(at);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dv_);
    this->free_dout(slot);
    this->add_product(dk_, ds, q());
    Tile dq;
    if constexpr (kLater) multiply_dq(dq, last);
    ptx::wgmma_wait<kLater>();
    ptx::reg_fence(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    place_.advance();
    score(x, place_.count != item().done);
    this->advance(place, kind, place_.count);
    if constexpr (kLater) {
      ptx::wgmma_wait<1>();
      ptx::reg_fence(dq);
      leave(dq, last);
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(x);
  }

  // dQ of a tile to the thread that adds it.
  __device__ __forceinline__ void leave(const Tile& dq, Stages at) const {
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.ds_empty[at.slot()]));
    ptx::mbarrier_wait(barrier_at(control_.dq_empty[group_]), (at.count & 1) ^ 1);
    hand_over_dq<Config>(dq, 0, control_, shared_, at.count & 1, group_);
  }

  // Starts dQ^T = K^T dS^T of a tile: this consumer's columns.
  __device__ __forceinline__ void multiply_dq(Tile& dq, Stages at) const {
    ptx::mbarrier_wait(barrier_at(control_.ds_full[at.slot()]), at.phase());
    const ptx::SmemDescriptor columns =
        ptx::SmemDescriptor::at(shared_ + group_ * kTileKv * 128, 0);
    const ptx::SmemDescriptor scores =
        ptx::SmemDescriptor::at(shared_ + Config::kDs + at.slot() * Config::kScoreBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<T, 1, 0>(dq, columns.advance(n * 2048).descriptor(),
                             scores.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // This warpgroup's of K.
  __device__ __forceinline__ ptx::SmemDescriptor keys() const {
    return ptx::SmemDescriptor::at(shared_ + group_ * 64 * 128, 0);
  }
};

}  // namespace flashattn::cuda::sm90
