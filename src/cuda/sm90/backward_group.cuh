// What the consumer warpgroups of the Hopper backward kernels have in common: their items, and what
// happens to 64 keys by a tile of queries between the products.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardGroup {
 protected:
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kPartQ = Config::kPartQ;  // queries a product
  using Scores = float[kPartQ / 2];
  using Operand = uint32_t[kPartQ / 4];  // pairs of queries

  __device__ __forceinline__ BackwardGroup(const BackwardParams& params, uint32_t shared,
                                           BackwardControl<Config>& control, int32_t group)
      : params_(params), control_(control), shared_(shared), group_(group) {}

  // Read anew each time: registers are better used in the main loop.
  __device__ __forceinline__ const volatile BackwardItem& item() const {
    return control_.own[group_];
  }
  __device__ __forceinline__ bool leader() const { return opaque(threadIdx.x) % 128 == 0; }
  __device__ __forceinline__ int32_t lane() const { return opaque(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return opaque(threadIdx.x) % 128 / 32; }
  // Of the tile: the upper of this lane's two keys; the other is 8 below.
  __device__ __forceinline__ int32_t row() const { return group_ * 64 + warp() * 16 + lane() / 4; }

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

  // Which queries see this lane's keys.
  __device__ __forceinline__ void look() const {
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
  }

  // kEmpty: `count` tiles, all of the item's and of those before, are done.
  __device__ __forceinline__ TileKind next_kind(int32_t tile, uint32_t count) const {
    if (count == item().done) return TileKind::kEmpty;
    const bool full = tile >= item().full.begin && tile < item().full.end;
    return full ? TileKind::kFull : TileKind::kPartial;
  }

  // x = keys rows^T of this warpgroup's 64 keys: S^T or dP^T.
  template <int kWidth>
  __device__ __forceinline__ void multiply_rows(Scores& x, ptx::Matrix keys,
                                                ptx::Matrix rows) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      ptx::wgmma_ss<T, 0, 0>(x, keys.further(n / 4 * kTileKv * 128 + n % 4 * 32).descriptor(),
                             rows.further(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // sum += weights rows: P^T dO or dS^T Q.
  template <int kSums>
  __device__ __forceinline__ void add_product(float (&sum)[kSums], const Operand& weights,
                                              ptx::Matrix rows) const {
    const ptx::Matrix across{rows.low | kTileQ * 128 >> 4 << 16};
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      ptx::wgmma_rs<T, 1>(sum, &weights[4 * n], across.further(n * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  // Where this lane's first two lse, or D, of a part of the tile lie.
  template <int kFirst>
  __device__ __forceinline__ uint32_t numbers(uint32_t slot, int part) const {
    return shared_ + kFirst + slot * Config::kNumberBytes + part * kPartQ * 4 + lane() % 4 * 8;
  }

  // Scores to weights p, as operands; and, where scores are modified, to these times the derivative
  // of a score by its product, for dS. query: the first; count: tiles done.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(const Scores& s, Operand& p, Operand& derived,
                                        int32_t query, uint32_t slot, uint32_t count,
                                        int part = 0) const {
    const uint32_t lse = numbers<Config::kLse>(slot, part);
    if constexpr (Config::kModified) {
      modify(s, p, derived, query, lse, count);
      if constexpr (kMasked) mask(derived, query);
    } else {
      const float factor = params_.common.problem.scale * kLog2E;
#pragma unroll
      for (int n = 0; n < kPartQ / 8; ++n) {
        const float2 reference = ptx::load_shared_pair(lse + n * 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = &s[4 * n + 2 * half];
          p[2 * n + half] = ptx::pack<T>(ptx::exp2(fmaf(x[0], factor, -reference.x)),
                                         ptx::exp2(fmaf(x[1], factor, -reference.y)));
        }
      }
    }
    if constexpr (kMasked) mask(p, query);
  }

  __device__ __forceinline__ void modify(const Scores& s, Operand& p, Operand& derived,
                                         int32_t query, uint32_t lse, uint32_t count) const {
    const Problem& problem = params_.common.problem;
    const bool capped = problem.softcap != 0;
    const float inner = capped ? problem.scale / problem.softcap : 0.0f;
    const float outer = (capped ? problem.softcap : problem.scale) * kLog2E;
    const float slope = slope_of(count) * kLog2E;
    const int32_t off = diagonal_offset(problem.mask_rule(), {item().len.q, item().len.kv});
    // Of this lane's first query and upper key; numbers below 2^24 are exact.
    const float distance = static_cast<float>(query + lane() % 4 * 2 + off - item().key - row());
#pragma unroll
    for (int n = 0; n < kPartQ / 8; ++n) {
      const float2 reference = ptx::load_shared_pair(lse + n * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float weight[2], change[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float x = s[4 * n + 2 * half + e];
          change[e] = 1.0f;
          if (capped) {
            x = soft_tanh(x * inner);
            change[e] = 1.0f - x * x;
          }
          const float away = distance + static_cast<float>(8 * n + e - 8 * half);
          x = fmaf(x, outer, -slope * fabsf(away));
          weight[e] = ptx::exp2(x - (e == 0 ? reference.x : reference.y));
        }
        p[2 * n + half] = ptx::pack<T>(weight[0], weight[1]);
        derived[2 * n + half] = ptx::pack<T>(weight[0] * change[0], weight[1] * change[1]);
      }
    }
  }

  // Of the head whose tile comes after `count` tiles.
  __device__ __forceinline__ float slope_of(uint32_t count) const {
    const Problem& problem = params_.common.problem;
    if (!(problem.bias & FLASHATTN_BIAS_ALIBI)) return 0.0f;
    const flashattn_inputs& in = params_.common.args.inputs;
    const int32_t tiles = item().tiles.end - item().tiles.begin;
    const int32_t heads_left = static_cast<int32_t>(item().done - count - 1) / tiles + 1;
    const int32_t head = (item().kv_head + 1) * problem.group() - heads_left;
    return in.alibi_slopes[item().b * in.alibi_stride_batch + head];
  }

  // 0 where a query does not see a key.
  __device__ __forceinline__ void mask(Operand& p, int32_t query) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t begin = visible.begin - query - lane() % 4 * 2;
      const uint32_t count = visible.end - visible.begin;
#pragma unroll
      for (int n = 0; n < kPartQ / 8; ++n) {
        const uint32_t place = static_cast<uint32_t>(n * 8 - begin);
        if (place >= count) p[2 * n + half] &= 0xffff0000u;
        if (place + 1 >= count) p[2 * n + half] &= 0x0000ffffu;
      }
    }
  }

  // Weights, as they were rounded for dV, or what was derived from them, and dP to dS, as operands.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate(const Operand& p, const Scores& dp, Operand& ds,
                                                uint32_t slot, int part = 0) const {
    const uint32_t delta = numbers<Config::kDelta>(slot, part);
#pragma unroll
    for (int n = 0; n < kPartQ / 8; ++n) {
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

  // Until dQ has been computed from what lay in the buffer of dS.
  __device__ __forceinline__ void await_ds(Ring<Config::kDsStages> at) const {
    ptx::mbarrier_wait(barrier_at(control_.ds_empty[at.slot()]), at.phase() ^ 1);
  }

  // dS has been stored for the warpgroup that computes dQ.
  __device__ __forceinline__ void hand_over_ds(Ring<Config::kDsStages> at) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.ds_full[at.slot()]));
  }

  // dS for the dQ of all keys: a row a query, keys in panels of 64, one a warpgroup.
  __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t slot, int part = 0) const {
    const int32_t panel = Config::kTileKv == 64 ? 0 : group_;
    const int32_t query = lane() % 8 + lane() / 16 * 8, chunk = warp() * 2 + lane() / 8 % 2;
    const uint32_t to = shared_ + Config::kDs + slot * Config::kScoreBytes + panel * kTileQ * 128 +
                        (part * kPartQ + query) * 128 + ((chunk ^ (query & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      ptx::stmatrix_x4_trans(to + n * 2048, ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    }
  }

  // Rows from `first` on of a tile: both warpgroups write the same zeros, and each waits for its
  // own.
  template <int kPanels>
  __device__ __forceinline__ void clear_rows(uint32_t tile, int32_t rows, int32_t first) const {
    const int32_t count = rows - max(first, 0);
    for (int32_t x = opaque(threadIdx.x) % 128; x < count * 8 * kPanels; x += 128) {
      const int32_t r = rows - count + x / 8 % count, panel = x / 8 / count;
      ptx::store_shared(tile + (panel * rows + r) * 128 + x % 8 * 16, 0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ __forceinline__ void settle_cleared() const {
    ptx::fence_async_proxy();
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  const int32_t group_;  // uniform
};

}  // namespace flashattn::cuda::sm90
