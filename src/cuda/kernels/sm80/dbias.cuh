// The gradient of the dense bias: dS, summed over the dimensions along which the bias is broadcast.
// A kernel of its own, which recomputes the scores: one CTA writes each value, in a fixed order of
// summation, so nothing need be cleared and the bits repeat whatever is summed.
//
// A CTA of 4 warps, with 16 queries each, computes one tile of the gradient. It visits every
// (sequence, head, Q tile) that is summed into it.
//
// Shared memory: Q | dO | K | V.
#pragma once

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class T_, int kDim_, int kTileKv_>
struct DbiasConfig {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 128;
  static constexpr int kTileQ = 64, kTileKv = kTileKv_;
  using QTile = SmemTile<kTileQ, kDim, sizeof(T)>;
  using KvTile = SmemTile<kTileKv, kDim, sizeof(T)>;
  static constexpr int kSharedBytes = 2 * QTile::kBytes + 2 * KvTile::kBytes;
  static_assert(kTileQ == kThreads / 32 * 16, "16 rows a warp");
};

template <class Config>
class DbiasKernel {
  using T = typename Config::T;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kThreads = Config::kThreads;
  using ScoreFragment = float[1][kTileKv / 8][4];

 public:
  __device__ __forceinline__ DbiasKernel(const BackwardParams& params, uint32_t shared)
      : params_(params),
        q_tile_{shared},
        dout_tile_{shared + Config::QTile::kBytes},
        k_tile_{shared + 2 * Config::QTile::kBytes},
        v_tile_{shared + 2 * Config::QTile::kBytes + Config::KvTile::kBytes},
        lane_(threadIdx.x % 32),
        warp_row_(threadIdx.x / 32 * 16) {
    const BackwardArgs& args = params.args;
    const int32_t row_tiles = ceil_div(args.shape.seqlen_q, kTileQ);
    const int32_t key_tiles = ceil_div(args.shape.seqlen_kv, kTileKv);
    int32_t rest = blockIdx.x;
    const auto take = [&](int64_t stride, int32_t count) {
      if (stride == 0) return Interval{0, count};
      const int32_t own = rest % count;
      rest /= count;
      return Interval{own, own + 1};
    };
    keys_.begin = rest % key_tiles * kTileKv;
    keys_.end = min(keys_.begin + kTileKv, args.shape.seqlen_kv);
    rest /= key_tiles;
    tiles_ = take(args.dbias_stride_row, row_tiles);
    heads_ = take(args.dbias_stride_head, params.problem.heads_q);
    batches_ = take(args.dbias_stride_batch, args.shape.batch);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_[n][e] = 0.0f;
    }
#pragma unroll 1
    for (int32_t b = batches_.begin; b < batches_.end; ++b) {
      const SeqlenInfo sequence =
          seqlen_info(params_.problem, params_.args.shape, params_.args.inputs, b);
#pragma unroll 1
      for (int32_t h = heads_.begin; h < heads_.end; ++h) {
#pragma unroll 1
        for (int32_t tile = tiles_.begin; tile < tiles_.end; ++tile)
          accumulate(sequence, b, h, tile);
      }
    }
    store();
  }

 private:
  __device__ __forceinline__ void accumulate(const SeqlenInfo& sequence, int32_t b, int32_t h,
                                             int32_t tile) {
    const Lengths len = sequence.len;
    const Inputs& in = params_.args.inputs;
    const MaskRule mask = params_.problem.mask_rule();
    const Interval queries{min(tile * kTileQ, len.q), min((tile + 1) * kTileQ, len.q)};
    if (queries.begin >= queries.end) return;
    const Interval keys = intersect(keys_, key_span(mask, queries, len).any);
    if (keys.begin >= keys.end) return;
    const TileKind kind = BlockMask::of(params_.problem, in, b, h).kind(queries, keys);
    if (kind == TileKind::kEmpty) return;

    const int32_t kv_head = h / params_.problem.q_heads_per_kv_head();
    const int32_t dim_qk = params_.problem.dim_qk, dim_v = params_.problem.dim_v;
    __syncthreads();  // all warps have read the last tiles
    constexpr int kSize = sizeof(T);
    load_tokens<kThreads>(q_tile_, dim_qk, head_rows<kSize>(in.q, b, h, sequence.offset_q),
                          queries.begin, len.q);
    load_tokens<kThreads>(dout_tile_, dim_v,
                          head_rows<kSize>(params_.dout, b, h, sequence.offset_q), queries.begin,
                          len.q);
    load_tokens<kThreads>(k_tile_, dim_qk, head_rows<kSize>(in.k, b, kv_head, sequence.offset_kv),
                          keys_.begin, len.kv);
    load_tokens<kThreads>(v_tile_, dim_v, head_rows<kSize>(in.v, b, kv_head, sequence.offset_kv),
                          keys_.begin, len.kv);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();

    ScoreFragment s = {}, dp = {};
    gemm_nt<T, kDim>(s, a_k_major(q_tile_, warp_row_, lane_), b_k_major(k_tile_, 0, lane_));
    gemm_nt<T, kDim>(dp, a_k_major(dout_tile_, warp_row_, lane_), b_k_major(v_tile_, 0, lane_));
    apply_dropout(dp, b, h, queries.begin);
    modify(s[0], len, b, h, queries);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t i = queries.begin + warp_row_ + half * 8 + lane_ / 4;
      const Interval seen = intersect(visible_keys(mask, i, len), keys_);
      const int32_t first = keys_.begin + lane_ % 4 * 2;
      IntervalMask{seen.begin - first, seen.end - seen.begin}.forward(SRowLayout{half}, flat(s[0]));
      if (kind != TileKind::kFull) {
        BlockMask::of(params_.problem, in, b, h)
            .template shown_keys<kTileKv / 8>(min(i, queries.end - 1), keys_.begin, len.kv, lane_)
            .forward(SRowLayout{half}, flat(s[0]));
      }
      if (i >= queries.end) continue;
      const int64_t row = params_.lse_delta_offset(sequence, b, h) + i;
      const float lse2 = params_.lse2[row] + kPExponent<T>, delta = params_.delta[row] / kPUnit<T>;
      const RowBase base(params_.softmax_base[row]);
#pragma unroll
      for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
        for (int x = half * 2; x < half * 2 + 2; ++x) {
          const float p = ptx::exp2(fmaf(base.subtract_from(s[0][n][x]), kWideUnit, -lse2));
          if (p != 0.0f) acc_[n][x] += p * (dp[0][n][x] - delta);
        }
      }
    }
  }

  // Turns Q K^T into scores in units of kWideUnit log2(e).
  __device__ __forceinline__ void modify(float (&s)[kTileKv / 8][4], Lengths len, int32_t b,
                                         int32_t h, Interval queries) const {
    const Problem& problem = params_.problem;
    using Members = WideMembers<sizeof(T) == 4>;
    const float factor = Members::product_factor(problem);
    const auto members = [&](int half) {
      return Members{problem,
                     params_.args.inputs,
                     b,
                     h,
                     len,
                     queries.begin + warp_row_ + half * 8 + lane_ / 4,
                     keys_.begin + lane_ % 4 * 2,
                     queries.end};
    };
    RuntimeScoreMod::forward_stage<ScoreStage::kProduct>(SLayout(), flat(s), factor, problem,
                                                         members(0));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RuntimeScoreMod::forward_stage<ScoreStage::kBias>(SRowLayout{half}, flat(s), factor, problem,
                                                        members(half));
    }
  }

  __device__ __forceinline__ void apply_dropout(ScoreFragment& dp, int32_t b, int32_t h,
                                                int32_t first) const {
    if (params_.dropout_threshold == 0) return;
    const float keep_scale = Dropout::keep_scale(params_.dropout_threshold);
    const Dropout dropout = Dropout::of(params_.problem, params_.args.inputs, b, h);
#pragma unroll
    for (int x = 0; x < kTileKv / 2; ++x) dp[0][x / 4][x % 4] *= keep_scale;
    dropout.visit_dropped<1, kTileKv / 8, false>(params_.dropout_threshold, first + warp_row_,
                                                 keys_.begin, lane_,
                                                 [&](int, int n, int x) { dp[0][n][x] = 0.0f; });
  }

  __device__ __forceinline__ void store() const {
    const BackwardArgs& args = params_.args;
    // A gradient per sequence ends where the sequence does.
    Lengths end{args.shape.seqlen_q, args.shape.seqlen_kv};
    if (args.dbias_stride_batch != 0) {
      end = seqlen_info(params_.problem, args.shape, args.inputs, batches_.begin).len;
    }
    float* const to = args.dbias + batches_.begin * args.dbias_stride_batch +
                      heads_.begin * args.dbias_stride_head;
    if (args.dbias_stride_row == 0) return store_column_sums(to, end);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t i = tiles_.begin * kTileQ + warp_row_ + half * 8 + lane_ / 4;
      if (i >= end.q) continue;
#pragma unroll
      for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t j = keys_.begin + n * 8 + lane_ % 4 * 2 + e;
          if (j < end.kv) to[i * args.dbias_stride_row + j] = acc_[n][half * 2 + e];
        }
      }
    }
  }

  // Stores the sums over all rows of the tile, if the bias is broadcast along queries.
  __device__ __forceinline__ void store_column_sums(float* to, Lengths end) const {
    const uint32_t sums = q_tile_.base;  // (warp, column)
    __syncthreads();                     // all warps have read Q
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = acc_[n][e] + acc_[n][2 + e];
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (lane_ >= 4) continue;
        ptx::store_shared(sums + (threadIdx.x / 32 * kTileKv + n * 8 + lane_ * 2 + e) * 4,
                          __float_as_uint(x));
      }
    }
    __syncthreads();
    const int32_t column = threadIdx.x, j = keys_.begin + column;
    if (column >= kTileKv || j >= end.kv) return;
    float x = 0.0f;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      x += __uint_as_float(ptx::load_shared(sums + (warp * kTileKv + column) * 4));
    }
    to[j] = x;
  }

  const BackwardParams& params_;
  const typename Config::QTile q_tile_, dout_tile_;
  const typename Config::KvTile k_tile_, v_tile_;
  const int lane_, warp_row_;
  Interval keys_;                     // keys of the tile
  Interval batches_, heads_, tiles_;  // sequences, query heads and Q tiles that are summed
  float acc_[kTileKv / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dbias_kernel(const __grid_constant__ BackwardParams params) {
  char* const shared = ptx::dynamic_shared();
  DbiasKernel<Config>(params, ptx::shared_address(shared)).run();
}

}  // namespace flashattn::cuda::sm80
