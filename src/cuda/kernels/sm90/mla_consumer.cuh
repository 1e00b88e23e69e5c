// A consumer warpgroup of latent attention on Hopper: base and sum of each row, scores to P. Both
// warpgroups have all rows; thread n of each has the same rows.
#pragma once

#include <cfloat>

#include "cuda/device/tree_mask.cuh"
#include "cuda/kernels/sm90/mla_config.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {

// IDs of named barriers; 0 is __syncthreads().
constexpr int kMlaPBarrier = 1;          // + warpgroup: its P is in shared memory
constexpr int kMlaExchangeBarrier = 3;   // both warpgroups have stored row maxima, or row sums
constexpr int kMlaWarpgroupBarrier = 4;  // + warpgroup: its four warps

template <class Config>
class MlaConsumer {
 public:
  using T = typename Config::T;
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileKv = Config::kTileKv, kColumns = Config::kDimV / 2;
  // A maximum may exceed the base by this much, in log2, before the base rises; 0 in a redone tile.
  static constexpr float kBaseSlack = 8.0f;
  static constexpr float kMaxRowSum = 0x1p100f;

  __device__ __forceinline__ MlaConsumer(const MlaParams& params, uint32_t shared,
                                         SharedStorage& storage, int32_t warpgroup)
      : params_(params), storage_(storage), shared_(shared), warpgroup_(warpgroup) {}

  // Volatile: fields are read from shared memory at each use, which saves registers.
  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  // This lane has two rows of the tile, row() and row() + 8; `mi` is 0 or 1 for them.
  __device__ __forceinline__ int32_t row() const {
    return no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }
  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kMlaWarpgroupBarrier + warpgroup_, 128);
  }
  __device__ __forceinline__ void exchange_sync() const {
    ptx::named_sync(kMlaExchangeBarrier, 256);
  }

  // Copies Q to shared memory, with both warpgroups, and finds the keys that each row sees.
  __device__ __forceinline__ void load_q() const {
    const cuda::ForwardParams& common = params_.common;
    const int32_t thread = threadIdx.x % 256, rows = tile().rows, first_row = tile().first_row;
    constexpr int32_t kChunks = Config::kPanels * 8;
#pragma unroll 1
    for (int32_t x = thread; x < Config::kTileQ * kChunks; x += 256) {
      const int32_t r = x / kChunks, chunk = x % kChunks;
      const MlaRow at = mla_row(params_, first_row, tile().kv_head, min(r, rows - 1));
      const char* const from =
          tensor_row(common.args.inputs.q, 2, tile().b, at.head, tile().offset_q + at.query);
      ptx::cp_async_16(
          shared_ + chunk / 8 * Config::kTileQ * 128 + r * 128 + ((chunk % 8 ^ (r & 7)) << 4),
          from + chunk * 16, r < rows && chunk * 8 < common.problem.dim_qk);
    }
    ptx::cp_async_commit();
    if (thread < Config::kTileQ) {
      const Lengths len{tile().len.q, tile().len.kv};
      Interval keys{0, len.kv};
      if (common.max_splits > 1) keys = split_range(common.split, len, tile().split_idx);
      const int32_t query = mla_row(params_, first_row, 0, min(thread, rows - 1)).query;
      storage_.visible_kv[thread] =
          intersect(visible_keys(common.problem.mask_rule(), query, len), keys);
    }
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    exchange_sync();
  }

  // PAGES: sets scores of the tile in this warpgroup's stage to -inf that the producer's bits hide.
  __device__ __forceinline__ void mask_by_pages() {
    if (!(params_.common.problem.mask & FLASHATTN_MASK_PAGES)) return;
    const volatile uint64_t* const words = storage_.shown_kv[warpgroup_];
    const uint64_t shown = words[0] | words[1];
    if (shown == ~uint64_t{0}) return;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
      bits |= static_cast<uint32_t>(shown >> (8 * n + lane() % 4 * 2) & 3) << 2 * n;
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) BitMask{bits}.forward(SRowLayout{mi}, s_);
  }

  // Sets scores of tile n that are hidden from their rows to -inf.
  __device__ __forceinline__ void mask(int32_t n) {
    mask_by_pages();
    if (n >= tile().full_tiles.begin && n < tile().full_tiles.end) return;
    if (params_.common.problem.mask & FLASHATTN_MASK_TREE) return mask_by_tree(n);
    const int32_t first = n * kTileKv + lane() % 4 * 2;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& visible = storage_.visible_kv[row() + mi * 8];
      const int32_t begin = visible.begin - first;
      IntervalMask{begin, visible.end - first - begin}.forward(SRowLayout{mi}, s_);
    }
  }

  // Raises each row's base to its maximum over the tiles of both warpgroups, if that exceeds the
  // base by more than the slack. Both warpgroups call it; own: this one has a tile. o_scale: factor
  // for O. Scores and bases are in units of kWideUnit log2(e), in which all are finite.
  __device__ __forceinline__ void update_base(bool own, float slack, float (&o_scale)[2]) {
    float row_max[2] = {-INFINITY, -INFINITY};
    if (own) {
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], s_[i]);
      }
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      row_max[mi] = fmaxf(row_max[mi], __shfl_xor_sync(~0u, row_max[mi], 1));
      row_max[mi] = fmaxf(row_max[mi], __shfl_xor_sync(~0u, row_max[mi], 2));
      if (lane() % 4 == 0) storage_.row_max[warpgroup_][row() + mi * 8] = row_max[mi];
    }
    exchange_sync();
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float other =
          *const_cast<const volatile float*>(&storage_.row_max[1 - warpgroup_][row() + mi * 8]);
      const float top = fmaxf(row_max[mi], other), before = base_[mi];
      const bool keep = !(top > before + slack);
      base_[mi] = keep ? before : top;
      o_scale[mi] = keep ? 1.0f : ptx::exp2((before - top) * kWideUnit);
      row_sum_[mi] *= o_scale[mi];
    }
  }

  // Turns products of q and k into rounded scores, in units of kWideUnit log2(e).
  __device__ __forceinline__ void scale_scores() {
    const float wide = params_.common.problem.scale * (kLog2E / kWideUnit);
#pragma unroll
    for (float& x : s_) x = __fmul_rn(x, wide);
  }

  // The base of a row, for subtraction. It is 0 for a row that has seen no key, so that P is 0 and
  // not NaN.
  __device__ __forceinline__ float base(int mi) const {
    return base_[mi] == -INFINITY ? 0.0f : base_[mi];
  }

  // P of scores that scale_scores() has rounded: the base is subtracted exactly.
  __device__ __forceinline__ void exp2_exact() {
    const float top[2] = {base(0), base(1)};
    exp2_and_sum([&](float x, int i) { return __fsub_rn(x, top[i / 2 % 2]) * kWideUnit; });
  }

  // P of products of q and k.
  __device__ __forceinline__ void exp2_scaled() {
    const float c = params_.common.problem.scale * kLog2E;
    const float top[2] = {base(0) * kWideUnit, base(1) * kWideUnit};
    exp2_and_sum([&](float x, int i) { return fmaf(x, c, -top[i / 2 % 2]); });
  }

  // Begins a pass over the keys.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      base_[mi] = -INFINITY;
      row_sum_[mi] = 0.0f;
    }
#pragma unroll
    for (float& x : o_) x = 0.0f;
  }

  // Ends a pass: reduces the row sums over all keys. Returns whether a row of this lane needs a
  // redo: a sum or a base is out of range, or O is not finite.
  __device__ __forceinline__ bool reduce_row_sums() {
    float nonfinite[2] = {0.0f, 0.0f};  // stays 0 while O is finite
#pragma unroll
    for (int x = 0; x < kColumns / 2; ++x) {
      nonfinite[x / 2 % 2] = fmaf(o_[x], 0.0f, nonfinite[x / 2 % 2]);
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      row_sum_[mi] += __shfl_xor_sync(~0u, row_sum_[mi], 1);
      row_sum_[mi] += __shfl_xor_sync(~0u, row_sum_[mi], 2);
      if (lane() % 4 == 0) storage_.row_sum[warpgroup_][row() + mi * 8] = row_sum_[mi];
    }
    exchange_sync();
    bool bad = false;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t r = row() + mi * 8;
      const volatile Interval& visible = storage_.visible_kv[r];
      const int32_t keys = visible.end - visible.begin;
      const volatile float* const sums = &storage_.row_sum[0][r];
      const float sum = sums[0] + sums[Config::kTileQ];
      bool outside = !(sum <= kMaxRowSum && nonfinite[mi] == 0.0f);
      outside |= base_[mi] != -INFINITY &&
                 !(fabsf(base_[mi]) <= (keys == 1 ? kLargeScore : kRedoScore) / kWideUnit);
      outside |= keys > 0 && !(sum >= FLT_MIN);
      outside |= base_[mi] == -INFINITY && sum > 0.0f;  // no key before the base was fixed
      bad |= outside && r < tile().rows;
      // P of a single key rounds to 1, and O is V of that key to the last digit.
      row_sum_[mi] = keys == 1 && sum > 0.0f ? 1.0f : sum;
    }
    return bad;
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  const uint32_t shared_;
  const int32_t warpgroup_;
  float base_[2];     // in units of kWideUnit log2(e)
  float row_sum_[2];  // over this lane's columns of the tiles of this warpgroup
  float s_[kTileKv / 2];
  float o_[kColumns / 2];  // this warpgroup's half of the columns

 private:
  // No KV tile has keys of two splits: splits begin at multiples of a tile.
  __device__ __forceinline__ void mask_by_tree(int32_t n) {
    const TreeMask tree{params_.common.tree, tile().b, {tile().len.q, tile().len.kv}};
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t r = min(row() + mi * 8, tile().rows - 1);
      const int32_t query = mla_row(params_, tile().first_row, 0, r).query;
      tree.shown_keys<kTileKv / 8>(query, n * kTileKv, lane()).forward(SRowLayout{mi}, s_);
    }
  }

  // The sum of a tile comes first, so that a large row sum is rounded once per tile.
  template <class Exponent>
  __device__ __forceinline__ void exp2_and_sum(Exponent exponent) {
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      s_[i] = ptx::exp2(exponent(s_[i], i));
      total[i / 2 % 2] += s_[i];
    }
    row_sum_[0] += total[0];
    row_sum_[1] += total[1];
  }
};

}  // namespace flashattn::cuda::sm90
