// Score modifications of the Hopper forward pass: scale, softcap, ALiBi, dense bias, masks,
// dropout. Scores are in units of log2(e). Kernels of ScoreModKind::kRuntime and redone tiles,
// whose scores have no bound, keep a quarter of that, which is finite for every finite score.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/kernels/sm90/fwd_epilogue.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdScoreMod : protected FwdEpilogue<Config> {
  using Base = FwdEpilogue<Config>;

 protected:
  using T = typename Config::T;
  using Base::storage_, Base::params_;
  using Base::work_tile, Base::lane, Base::row, Base::warpgroup_tile;
  static constexpr int kTileKv = Config::kTileKv;
  // This lane's scores of a tile: element 4 g + 2 mi + e is row row() + 8 mi, column
  // 8 g + 2 (lane % 4) + e.
  using ScoreAccum = float[kTileKv / 2];
  // Column of element i relative to the lane's first column.
  static __device__ __forceinline__ constexpr float column(int i) {
    return static_cast<float>(i / 4 * 8 + i % 2);
  }

  __device__ __forceinline__ FwdScoreMod(const ForwardParams& params, uint32_t shared,
                                         SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup), kv_tiles_(params) {}

  // Scale that the exponent of P applies to scores as modify() leaves them.
  __device__ __forceinline__ float exponent_scale() const {
    constexpr bool kLeft = Config::kScoreMod == ScoreModKind::kPlain || Config::kHasDropout;
    return kLeft ? scale() : kScoreUnit;
  }

  // modify() leaves scores in units of kScoreUnit log2(e).
  static constexpr float kScoreUnit =
      Config::kScoreMod == ScoreModKind::kRuntime ? kWideUnit : 1.0f;
  __device__ __forceinline__ float scale() const {
    return params_.problem.scale * (kLog2E / kScoreUnit);
  }

  // Turns Q K^T of the keys from `key` on into scores. If the scale is the only modification,
  // exponent_scale() applies it instead. redo: scores of a redone tile, rounded, in units of
  // kWideUnit log2(e).
  template <int kCount>
  __device__ __forceinline__ void modify(float (&s)[kCount], int32_t key, bool redo) const {
    const bool wide = redo && Config::kScoreMod != ScoreModKind::kRuntime;
    const float unit = wide ? 1.0f / kWideUnit : 1.0f;
    if constexpr (Config::kScoreMod == ScoreModKind::kSoftcap) apply_softcap(s);
    if constexpr (Config::kScoreMod == ScoreModKind::kAlibi) add_alibi(s, key, scale() * unit);
    if (wide && Config::kScoreMod != ScoreModKind::kAlibi) {
      const float left = (Config::kScoreMod == ScoreModKind::kSoftcap ? 1.0f : scale()) * unit;
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = __fmul_rn(s[i], left);
    }
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      const Problem& problem = params_.problem;
      const bool has_softcap = problem.softcap != 0,
                 has_alibi = problem.bias & FLASHATTN_BIAS_ALIBI;
      if (has_softcap) apply_softcap(s);
      const float left = has_softcap ? 1.0f : scale();
      if (has_alibi) add_alibi(s, key, left);
      add_dense_bias(s, key, has_alibi ? 1.0f : left);
    }
  }

  // ALiBi of a work tile, for this lane.
  struct AlibiParams {
    float slope;
    int32_t diagonal;                  // key position of row(), minus the lane's first column
    int32_t linear_begin, linear_end;  // see WarpgroupTile
    bool paired_rows;                  // see paired_rows()
  };

  // Whether rows r and r + 8 of a lane are paired: base[r] - base[r + 8] = 8 * slope, the
  // difference of their biases for a key before both, so that one ALiBi addend serves both. One
  // base is then too high: by 8 * slope where the keys that matter lie before the rows or next to
  // them, by twice that where they lie behind, and by the difference of the rows' scores. fp16 has
  // too little range for that, bf16 seldom (see finalize()). Redone tiles do not pair rows.
  __device__ __forceinline__ bool paired_rows() const {
    if (std::is_same<T, __half>::value || Config::kScoreMod != ScoreModKind::kAlibi) return false;
    return paired_base_gap() >= 0.0f && paired_base_gap() <= 32.0f && !work_tile().redo_online;
  }

  // base[r] - base[r + 8] of paired rows.
  __device__ __forceinline__ float paired_base_gap() const {
    return 8.0f * work_tile().alibi_slope;
  }

  __device__ __forceinline__ AlibiParams alibi_params() const {
    return {work_tile().alibi_slope, warpgroup_tile().diagonal + row() % 64 - lane() % 4 * 2,
            warpgroup_tile().linear_begin, warpgroup_tile().linear_end, paired_rows()};
  }

  // ALiBi of a tile: x * scale - slope * |distance - column|, with distance + 8 in the second row.
  // Where all keys of the tile lie on one side of all rows it is linear: x * scale + rise * column
  // + first.
  struct AlibiLinear {
    float scale, slope, distance, rise, first[2];
    bool linear;
  };

  // The ALiBi of KV tile n. Replaces modify() where the base is fixed.
  __device__ __forceinline__ AlibiLinear alibi_linear(const AlibiParams& alibi, int32_t n) const {
    const float distance = static_cast<float>(alibi.diagonal - n * kTileKv);
    const float rise = n < alibi.linear_begin ? alibi.slope : -alibi.slope;
    return {scale(),
            alibi.slope,
            distance,
            rise,
            {-rise * distance, -rise * (distance + 8.0f)},
            n < alibi.linear_end || n >= alibi.linear_begin};
  }

  // Softcap: by the polynomial of degree 5 if its range suffices for the whole warp.
  template <int kCount>
  __device__ __forceinline__ void apply_softcap(float (&s)[kCount]) const {
    const Softcap& cap = params_.softcap;
    if (__all_sync(~0u, !(max_abs(s) >= cap.poly5_limit))) {
      const float factor[3] = {cap.poly5[0] / kScoreUnit, cap.poly5[1] / kScoreUnit,
                               cap.poly5[2] / kScoreUnit};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float square = s[i] * s[i];
        s[i] *= fmaf(fmaf(factor[2], square, factor[1]), square, factor[0]);
      }
    } else {
      const float outer = params_.problem.softcap * (kLog2E / kScoreUnit);
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = scaled_tanh(s[i], cap.input_scale, outer);
    }
  }

  // The largest ALiBi bias among the keys that a row sees. Scores grow by that much from a distant
  // tile to the row's own position, so the base is predicted from it.
  __device__ __forceinline__ void max_alibi_bias(float (&peak)[2]) const {
    const float slope = work_tile().alibi_slope;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& seen = storage_.visible_kv[row() + mi * 8];
      const int32_t own = warpgroup_tile().diagonal + row() % 64 + mi * 8;
      const int32_t away = max(max(seen.begin - own, own - (seen.end - 1)), 0);
      peak[mi] = -slope * static_cast<float>(away);
    }
  }

  // Sets scores of invisible keys to -inf; s holds the keys from `key` on.
  template <int kCount>
  __device__ __forceinline__ void apply_mask(float (&s)[kCount], int32_t key) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& visible = storage_.visible_kv[row() + mi * 8];
      // Relative to this lane's first column.
      const int32_t first = key + lane() % 4 * 2;
      const int32_t begin = visible.begin - first, count = visible.end - first - begin;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int32_t column = i / 2 * 8 + i % 2;
        float& x = s[i / 2 * 4 + mi * 2 + i % 2];
        if (static_cast<uint32_t>(column - begin) >= static_cast<uint32_t>(max(count, 0))) {
          x = -INFINITY;
        }
      }
    }
  }

  // Sets scores that the block mask hides to -inf.
  __device__ __forceinline__ void apply_block_mask(ScoreAccum& s, int32_t n) const {
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      if (kv_tiles_.full(n)) return;
      const Inputs& in = params_.args.inputs;
      const int32_t width = params_.problem.block_kv;  // a multiple of 8
      const int32_t keys = work_tile().len.kv - n * kTileKv;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        const int32_t i = min(work_tile().query + row() + mi * 8, work_tile().query_end - 1);
        int32_t left = width - n * kTileKv % width;
        const uint8_t* on = in.block_mask + work_tile().b * in.block_mask_stride_batch +
                            work_tile().h * in.block_mask_stride_head +
                            i / params_.problem.block_q * in.block_mask_stride_row +
                            n * kTileKv / width;
#pragma unroll
        for (int g = 0; g < kTileKv / 8; ++g) {
          if (g * 8 >= keys || !*on) s[4 * g + 2 * mi] = s[4 * g + 2 * mi + 1] = -INFINITY;
          left -= 8;
          if (left == 0) {
            left = width;
            ++on;
          }
        }
      }
    }
  }

  // Clears dropped elements of P, in kernels of ScoreModKind::kRuntime.
  __device__ __forceinline__ void apply_dropout(ScoreAccum& p, int32_t n) const {
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      if (params_.dropout_threshold == 0) return;
      visit_dropped<1, kTileKv / 8, false>(philox_stream(), params_.dropout_threshold,
                                           warp_first_query(), n * kTileKv, lane(),
                                           [&](int, int g, int x) { p[4 * g + x] = 0.0f; });
    }
  }

  // Kernels of ScoreModKind::kDropout draw sign bits for pairs of P instead; pack_p() applies them.
  // ptxas draws after the exponentials; forced to draw before them, under the WGMMAs, it is 6 %
  // slower.
  using TileDropoutSigns = DropoutSigns<kTileKv / 4, false>;
  __device__ __forceinline__ void draw_dropout(TileDropoutSigns& signs, int32_t n) const {
    if constexpr (Config::kHasDropout) {
      draw_signs<kTileKv / 8, false>(signs, philox_stream(), params_.dropout_threshold,
                                     warp_first_query(), n * kTileKv, lane());
    }
  }

  // Scale of the elements of P that dropout keeps.
  __device__ __forceinline__ float dropout_scale() const {
    if constexpr (Config::kScoreMod != ScoreModKind::kRuntime && !Config::kHasDropout) return 1.0f;
    return 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
  }

 private:
  __device__ __forceinline__ DropoutStream philox_stream() const {
    return dropout_stream(params_.problem, params_.args.inputs, work_tile().b, work_tile().h);
  }

  // The first query of this warp.
  __device__ __forceinline__ int32_t warp_first_query() const {
    return work_tile().query + row() - lane() / 4;
  }

  // Adds ALiBi for the keys from `key` on. scale: not yet applied to the scores.
  template <int kCount>
  __device__ __forceinline__ void add_alibi(float (&s)[kCount], int32_t key, float scale) const {
    // Distance from this lane's first column to row(); exact below 2^24.
    const float distance =
        static_cast<float>(warpgroup_tile().diagonal + row() % 64 - key - lane() % 4 * 2);
    const float slope = work_tile().alibi_slope;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float away = distance + static_cast<float>(i / 2 % 2 * 8) - column(i);
      s[i] = fmaf(s[i], scale, -slope * fabsf(away));
    }
  }

  // Adds the dense bias. scale: not yet applied to the scores.
  template <int kCount>
  __device__ __forceinline__ void add_dense_bias(float (&s)[kCount], int32_t key,
                                                 float scale) const {
    const Problem& problem = params_.problem;
    const Inputs& in = params_.args.inputs;
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= scale;
      return;
    }
    const auto add = [&](const auto* bias) {
      visit_dense_bias(bias, s, key, [&](float& x, auto y) {
        x = fmaf(x, scale, to_float(y) * (kLog2E / kScoreUnit));
      });
    };
    switch (problem.dtype_bias) {
      case FLASHATTN_DTYPE_F32: return add(static_cast<const float*>(in.bias));
      case FLASHATTN_DTYPE_F16: return add(static_cast<const __half*>(in.bias));
      case FLASHATTN_DTYPE_BF16: return add(static_cast<const __nv_bfloat16*>(in.bias));
      default:
        visit_dense_bias(static_cast<const uint8_t*>(in.bias), s, key,
                         [&](float& x, uint8_t y) { x = y ? x * scale : -INFINITY; });
    }
  }

  // Calls visit(score, bias) for rows and keys in range; masks hide the other scores.
  template <class B, int kCount, class Visit>
  __device__ __forceinline__ void visit_dense_bias(const B* bias, float (&s)[kCount], int32_t key,
                                                   Visit visit) const {
    const Inputs& in = params_.args.inputs;
    const int32_t first = key + lane() % 4 * 2;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t i = work_tile().query + row() + mi * 8;
      const int32_t columns = i < work_tile().query_end ? work_tile().len.kv - first : 0;
      const B* at = bias + work_tile().b * in.bias_stride_batch +
                    work_tile().h * in.bias_stride_head + i * in.bias_stride_row + first;
#pragma unroll
      for (int x = 0; x < kCount / 2; ++x) {
        const int32_t column = x / 2 * 8 + x % 2;
        if (column < columns) visit(s[x / 2 * 4 + mi * 2 + x % 2], at[column]);
      }
    }
  }

 protected:
  KvTiles<Config> kv_tiles_;
};

}  // namespace flashattn::cuda::sm90
