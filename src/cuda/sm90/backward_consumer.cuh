// The consumers of the Hopper backward pass: a warpgroup for 64 keys.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/backward_dq.cuh"
#include "cuda/sm90/backward_output.cuh"
#include "cuda/tile/scores.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config, int group_>
class BackwardConsumer : KeyOutput<Config, group_> {
  using Base = KeyOutput<Config, group_>;
  using T = typename Config::T;
  using Base::control_, Base::leader, Base::params_, Base::shared_;
  using Base::item, Base::lane, Base::row, Base::warp;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  using Scores = float[kTileQ / 2];
  using Operand = uint32_t[kTileQ / 4];  // pairs of queries

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, uint32_t shared,
                                              BackwardControl<Config>& control)
      : Base(params, shared, control) {}

  __device__ __forceinline__ void run() {
    if (Config::kTurns && group_ == 0) ptx::named_arrive(kTurnBarrier, 256);
    for (;;) {
      const uint32_t number = take();
      if (item().end) break;
      start();
      work(number % 2);
      this->store(dk_, dv_, {place_.count});
      ptx::named_sync(kWarpgroupBarrier + group_, 128);  // nobody reads the item any more
    }
    if (leader()) ptx::bulk_wait();
  }

 private:
  // Copies the next item from its slot, and gives its number. That lies in shared memory: registers
  // are better used in the main loop.
  __device__ __forceinline__ uint32_t take() const {
    volatile uint32_t& taken = control_.taken[group_];
    const Items at{taken};
    ptx::mbarrier_wait(barrier_at(control_.item_full[at.slot()]), at.phase());
    constexpr int kWords = sizeof(BackwardItem) / 4;
    const int32_t n = opaque(threadIdx.x) % 128;
    if (n < kWords) {
      reinterpret_cast<uint32_t*>(&control_.own[group_])[n] =
          reinterpret_cast<const uint32_t*>(&control_.items[at.slot()])[n];
    }
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
    if (leader()) {
      taken = at.count + 1;
      ptx::mbarrier_arrive(barrier_at(control_.item_empty[at.slot()]));
    }
    return at.count;
  }

  // Which queries see this lane's keys; sums of 0.
  __device__ __forceinline__ void start() {
    const Lengths len{item().len.q, item().len.kv};
    const int32_t key = item().key, keys = item().keys;
    if (lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t r = row() + half * 8;
        Interval seen{0, 0};
        if (r < keys) seen = visible_queries(params_.common.problem.mask_rule(), key + r, len);
        control_.visible[r] = {seen.begin, max(seen.end, seen.begin)};
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
  }

  // parity: of the barriers' phases that end once an item.
  __device__ __forceinline__ void work(uint32_t parity) {
    ptx::mbarrier_wait(barrier_at(control_.k_full), parity);
    // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
    if (params_.kv_has_tail && item().keys < kTileKv) {
      clear_rows(shared_, kTileKv, item().keys);
      settle_cleared();
    }
    ptx::mbarrier_wait(barrier_at(control_.v_full), parity);
    // What the last item left in the buffers of dS and dQ is on its way.
    if (leader()) ptx::bulk_wait_read();
    if constexpr (Config::kDqGroup) {
      ptx::named_sync(kWarpgroupBarrier + group_, 128);
    } else {
      ptx::named_sync(kConsumerBarrier, 256);
    }
    int32_t tile = item().start;
    for (TileKind kind = next_kind(tile, place_.count); kind != TileKind::kEmpty;) {
      if (kind == TileKind::kFull) {
        step<false>(tile, kind);
      } else {
        if (params_.q_has_tail && (tile + 1) * kTileQ > item().len.q) clear_queries(tile);
        step<true>(tile, kind);
      }
    }
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.kv_empty));
  }

  // kEmpty: `count` tiles, all of the item's and of those before, are done.
  __device__ __forceinline__ TileKind next_kind(int32_t tile, uint32_t count) const {
    if (count == item().done) return TileKind::kEmpty;
    const bool full = tile >= item().full.begin && tile < item().full.end;
    return full ? TileKind::kFull : TileKind::kPartial;
  }

  // A tile of queries: what it adds to dK and dV, and its dQ. With a warpgroup for that the
  // consumers never meet; else once, when dS is complete: of its two buffers the one is read while
  // the other is written. Then the next tile
  // and its kind.
  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t& tile, TileKind& kind) {
    const uint32_t slot = place_.slot();
    Scores s, dp;
    Operand p, ds;
    const ptx::Matrix keys = ptx::Matrix::at(shared_ + group_ * 64 * 128, 0);
    const ptx::Matrix q = ptx::Matrix::at(shared_ + Config::kQ + slot * Config::kQueryBytes, 0);
    const ptx::Matrix dout = q.further(Config::kDo - Config::kQ);
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    if (Config::kTurns) ptx::named_sync(kTurnBarrier + group_, 256);
    multiply_rows(s, keys, q);
    if constexpr (Config::kLateGradients) {
      if (Config::kTurns) ptx::named_arrive(kTurnBarrier + (group_ ^ 1), 256);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      weigh<kMasked>(s, p, tile, slot);
      ptx::pin(p);
      ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      multiply_rows(dp, keys.further(Config::kV), dout);
    } else {
      ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
      multiply_rows(dp, keys.further(Config::kV), dout);
      if (Config::kTurns) ptx::named_arrive(kTurnBarrier + (group_ ^ 1), 256);
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      weigh<kMasked>(s, p, tile, slot);
    }
    add_product(dv_, p, dout);  // at once: it runs under what follows
    ptx::wgmma_wait<1>();
    ptx::pin(dp);
    differentiate<kMasked>(p, dp, ds, slot);
    if constexpr (Config::kDqGroup) {
      hand_over_ds(ds);
      add_product(dk_, ds, q);
      tile = tile_after(item(), params_, tile);
      kind = next_kind(tile, place_.count + 1);
      ptx::wgmma_wait<1>();
      ptx::pin(dv_);
      if (leader()) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
    } else {
      float dq[32];
      store_ds(ds, slot);
      ptx::fence_async_proxy();
      ptx::named_sync(kConsumerBarrier, 256);
      multiply_dq<Config>(dq, shared_, slot, group_);
      add_product(dk_, ds, q);
      ptx::mbarrier_wait(barrier_at(control_.dq_empty[group_]), (place_.count & 1) ^ 1);
      ptx::wgmma_wait<1>();
      ptx::pin(dq);
      ptx::pin(dv_);
      if (leader()) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
      hand_over_dq<Config>(dq, control_, shared_, group_);
      tile = tile_after(item(), params_, tile);
      kind = next_kind(tile, place_.count + 1);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.q_empty[slot]));
    place_.advance();
  }

  // x = keys rows^T of this warpgroup's 64 keys: S^T or dP^T.
  __device__ __forceinline__ void multiply_rows(Scores& x, ptx::Matrix keys,
                                                ptx::Matrix rows) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      ptx::wgmma_ss<T, 0, 0>(x, keys.further(n / 4 * kTileKv * 128 + n % 4 * 32).descriptor(),
                             rows.further(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // sum += weights rows: P^T dO or dS^T Q.
  __device__ __forceinline__ void add_product(float (&sum)[kDim / 2], const Operand& weights,
                                              ptx::Matrix rows) const {
    const ptx::Matrix across{rows.low | kTileQ * 128 >> 4 << 16};
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      ptx::wgmma_rs<T, 1>(sum, &weights[4 * n], across.further(n * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  // Scores to weights, as operands.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(const Scores& s, Operand& p, int32_t tile,
                                        uint32_t slot) const {
    const float factor = params_.common.problem.scale * kLog2E;
    const uint32_t lse = shared_ + Config::kLse + slot * Config::kNumberBytes + lane() % 4 * 8;
#pragma unroll
    for (int n = 0; n < kTileQ / 8; ++n) {
      const float2 reference = ptx::load_shared_pair(lse + n * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = &s[4 * n + 2 * half];
        p[2 * n + half] = ptx::pack<T>(ptx::exp2(fmaf(x[0], factor, -reference.x)),
                                       ptx::exp2(fmaf(x[1], factor, -reference.y)));
      }
    }
    if constexpr (kMasked) mask(p, tile);
  }

  // 0 where a query does not see a key.
  __device__ __forceinline__ void mask(Operand& p, int32_t tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t begin = visible.begin - tile * kTileQ - lane() % 4 * 2;
      const uint32_t count = visible.end - visible.begin;
#pragma unroll
      for (int n = 0; n < kTileQ / 8; ++n) {
        const uint32_t place = static_cast<uint32_t>(n * 8 - begin);
        if (place >= count) p[2 * n + half] &= 0xffff0000u;
        if (place + 1 >= count) p[2 * n + half] &= 0x0000ffffu;
      }
    }
  }

  // Weights, as they were rounded for dV, and dP to dS, as operands.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate(const Operand& p, const Scores& dp, Operand& ds,
                                                uint32_t slot) const {
    const uint32_t delta = shared_ + Config::kDelta + slot * Config::kNumberBytes + lane() % 4 * 8;
#pragma unroll
    for (int n = 0; n < kTileQ / 8; ++n) {
      const float2 d = ptx::load_shared_pair(delta + n * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * n + 2 * half;
        const float2 weight = ptx::unpack<T>(p[i / 2]);
        float x = weight.x * (dp[i] - d.x), y = weight.y * (dp[i + 1] - d.y);
        if constexpr (kMasked) {
          // What is hidden may be NaN.
          if (weight.x == 0.0f) x = 0.0f;
          if (weight.y == 0.0f) y = 0.0f;
        }
        ds[i / 2] = ptx::pack<T>(x, y);
      }
    }
  }

  // dS to the warpgroup that computes dQ.
  __device__ __forceinline__ void hand_over_ds(const Operand& ds) const {
    const Ring<Config::kDsStages> at{place_.count};
    ptx::mbarrier_wait(barrier_at(control_.ds_empty[at.slot()]), at.phase() ^ 1);
    store_ds(ds, at.slot());
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.ds_full[at.slot()]));
  }

  // dS for the dQ of all keys: a row a query, keys in panels of 64, one a warpgroup.
  __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t slot) const {
    const int32_t query = lane() % 8 + lane() / 16 * 8, chunk = warp() * 2 + lane() / 8 % 2;
    const uint32_t to = shared_ + Config::kDs + slot * Config::kScoreBytes +
                        group_ * kTileQ * 128 + query * 128 + ((chunk ^ (query & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      ptx::stmatrix_x4_trans(to + n * 2048, ds[4 * n], ds[4 * n + 1], ds[4 * n + 2],
                             ds[4 * n + 3]);
    }
  }

  // Rows from `first` on of a tile: both warpgroups write the same zeros, and each waits for its
  // own.
  __device__ __forceinline__ void clear_rows(uint32_t tile, int32_t rows, int32_t first) const {
    const int32_t count = rows - max(first, 0);
    for (int32_t x = opaque(threadIdx.x) % 128; x < count * 8 * Config::kPanels; x += 128) {
      const int32_t r = rows - count + x / 8 % count, panel = x / 8 / count;
      ptx::store_shared(tile + (panel * rows + r) * 128 + x % 8 * 16, 0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ __forceinline__ void settle_cleared() const {
    ptx::fence_async_proxy();
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
  }

  // Rows of Q and dO past the last query: their weights are 0, but they may be NaN.
  __device__ __forceinline__ void clear_queries(int32_t tile) const {
    const uint32_t slot = place_.slot();
    const int32_t first = item().len.q - tile * kTileQ;
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    clear_rows(shared_ + Config::kQ + slot * Config::kQueryBytes, kTileQ, first);
    clear_rows(shared_ + Config::kDo + slot * Config::kQueryBytes, kTileQ, first);
    settle_cleared();
  }

  Ring<Config::kStages> place_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
