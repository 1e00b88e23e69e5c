// The consumers of the Hopper backward pass: a warpgroup for 64 keys.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/backward_output.cuh"
#include "cuda/tile/scores.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardConsumer : KeyOutput<Config> {
  using Base = KeyOutput<Config>;
  using T = typename Config::T;
  using Base::control_, Base::group_, Base::items_, Base::leader, Base::params_, Base::shared_;
  using Base::item, Base::lane, Base::row, Base::warp;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kSums = kTileQ * kDim / 256;  // of dQ, a thread
  using Scores = float[kTileQ / 2];
  using Operand = uint32_t[kTileQ / 4];  // pairs of queries
  using Share = float[kSums];

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, uint32_t shared,
                                              BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  __device__ __forceinline__ void run() {
    for (;; items_.advance()) {
      ptx::mbarrier_wait(barrier_at(control_.item_full[items_.slot()]), items_.phase());
      if (item().end) break;
      start();
      if (item().tiles.begin < item().tiles.end) work();
      this->store(dk_, dv_, place_.count);
      ptx::named_sync(kWarpgroupBarrier + group_, 128);
      if (leader()) ptx::mbarrier_arrive(barrier_at(control_.item_empty[items_.slot()]));
    }
    if (leader()) ptx::bulk_wait();
  }

 private:
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

  __device__ __forceinline__ void work() {
    ptx::mbarrier_wait(barrier_at(control_.k_full), kv_phase_);
    // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
    if (params_.kv_has_tail && item().keys < kTileKv) {
      clear_rows(shared_, kTileKv, item().keys);
      settle_cleared();
    }
    ptx::mbarrier_wait(barrier_at(control_.v_full), kv_phase_);
    kv_phase_ ^= 1;
    // What the last item left in the buffers of dS and dQ is on its way.
    if (leader()) ptx::bulk_wait_read();
    ptx::named_sync(kConsumerBarrier, 256);
    int32_t tile = item().tiles.begin;
#pragma unroll 1
    for (int32_t left = (item().tiles.end - tile) * params_.common.problem.group(); left > 0;
         --left) {
      if (tile >= item().full.begin && tile < item().full.end) {
        step<false>(tile);
      } else {
        if (params_.q_has_tail && (tile + 1) * kTileQ > item().len.q) clear_queries(tile);
        step<true>(tile);
      }
      if (++tile == item().tiles.end) tile = item().tiles.begin;  // of the next head
    }
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.kv_empty));
  }

  // A tile of queries: what it adds to dK and dV, and its dQ. Both warpgroups meet once, when dS is
  // complete; of its two buffers the one is read while the other is written.
  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t tile) {
    const uint32_t slot = place_.slot();
    Scores s, dp;
    Operand p, ds;
    Share dq;
    const ptx::Matrix keys = ptx::Matrix::at(shared_ + group_ * 64 * 128, 0);
    const ptx::Matrix q = ptx::Matrix::at(shared_ + Config::kQ + slot * Config::kQueryBytes, 0);
    const ptx::Matrix dout = q.further(Config::kDo - Config::kQ);
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    multiply_rows(s, keys, q);
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    multiply_rows(dp, keys.further(Config::kV), dout);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    weigh<kMasked>(s, p, tile, slot);
    add_product(dv_, p, dout);  // at once: it runs under what follows
    ptx::wgmma_wait<1>();
    ptx::pin(dp);
    differentiate<kMasked>(p, dp, ds, slot);
    store_ds(ds, slot);
    ptx::fence_async_proxy();
    ptx::named_sync(kConsumerBarrier, 256);
    multiply_dq(dq, slot);
    add_product(dk_, ds, q);
    ptx::mbarrier_wait(barrier_at(control_.dq_empty[group_]), (place_.count & 1) ^ 1);
    ptx::wgmma_wait<1>();
    ptx::pin(dq);
    ptx::pin(dv_);
    if (leader()) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
    stage_dq(dq);
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

  // dS K over all keys of the tile, this warpgroup's share: 64 columns, or 64 queries.
  __device__ __forceinline__ void multiply_dq(Share& dq, uint32_t slot) const {
    const uint32_t scores_at = shared_ + Config::kDs + slot * Config::kScoreBytes;
    const uint32_t k = shared_ + (kDim == 128 ? group_ * kTileKv * 128 : 0);
    const ptx::Matrix keys = ptx::Matrix::at(k, kTileKv * 128);
    ptx::wgmma_fence();
    const ptx::Matrix scores =
        ptx::Matrix::at(scores_at + (kDim == 128 ? 0 : group_ * kTileKv * 128), kTileKv * 128);
#pragma unroll
    for (int n = 0; n < kTileKv / 16; ++n) {
      ptx::wgmma_ss<T, 1, 1>(dq, scores.further(n * 2048).descriptor(),
                             keys.further(n * 2048).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // Scores to weights, and these to operands.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(Scores& s, Operand& p, int32_t tile, uint32_t slot) const {
    const float factor = params_.common.problem.scale * kLog2E;
    const uint32_t lse = shared_ + Config::kLse + slot * Config::kNumberBytes + lane() % 4 * 8;
#pragma unroll
    for (int n = 0; n < kTileQ / 8; ++n) {
      const float2 reference = ptx::load_shared_pair(lse + n * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * n + e];
        x = ptx::exp2(fmaf(x, factor, -(e % 2 == 0 ? reference.x : reference.y)));
      }
    }
    if constexpr (kMasked) mask(s, tile);
#pragma unroll
    for (int n = 0; n < kTileQ / 4; ++n) p[n] = ptx::pack<T>(s[2 * n], s[2 * n + 1]);
  }

  // 0 where a query does not see a key.
  __device__ __forceinline__ void mask(Scores& s, int32_t tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t first = tile * kTileQ + lane() % 4 * 2;
      const int32_t begin = visible.begin - first, count = visible.end - first - begin;
#pragma unroll
      for (int n = 0; n < kTileQ / 4; ++n) {
        const int32_t column = n / 2 * 8 + n % 2;
        float& x = s[n / 2 * 4 + half * 2 + n % 2];
        if (static_cast<uint32_t>(column - begin) >= static_cast<uint32_t>(count)) x = 0.0f;
      }
    }
  }

  // Weights and dP to dS, as operands. The weights as they were rounded for dV: registers do not
  // hold them as fp32 too.
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

  // dS for both warpgroups' dQ: a row a key, queries in panels of 64.
  __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t slot) const {
    const uint32_t to = shared_ + Config::kDs + slot * Config::kScoreBytes;
    const int32_t key = group_ * 64 + warp() * 16 + lane() % 16;
    const uint32_t at = to + key * 128 + ((lane() / 16 ^ (key & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kTileQ / 16; ++n) {
      ptx::stmatrix_x4((at ^ n % 4 * 32) + n / 4 * kTileKv * 128, ds[4 * n], ds[4 * n + 1],
                       ds[4 * n + 2], ds[4 * n + 3]);
    }
  }

  // To the warp that adds it, in the order of the accumulators: nobody else reads it.
  __device__ __forceinline__ void stage_dq(const Share& dq) const {
    const uint32_t to =
        shared_ + Config::kDq + group_ * Config::kShareBytes + opaque(threadIdx.x) % 128 * 16;
#pragma unroll
    for (int n = 0; n < kSums / 4; ++n) {
      ptx::store_shared(to + n * 2048, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.dq_full[group_]));
  }

  // Rows from `first` on of a tile: both warpgroups write the same zeros, and each waits for its
  // own.
  __device__ __forceinline__ void clear_rows(uint32_t tile, int32_t rows, int32_t first) const {
    const int32_t count = rows - max(first, 0);
    for (int32_t x = threadIdx.x % 128; x < count * 8 * Config::kPanels; x += 128) {
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

  Pair place_;  // tiles of queries so far
  uint32_t kv_phase_ = 0;
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
