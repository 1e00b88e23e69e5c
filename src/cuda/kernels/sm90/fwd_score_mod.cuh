// What a consumer warpgroup of the Hopper forward pass does to its products: scale, softcap, ALiBi,
// dense bias, masks, dropout. Scores are in units of log2(e); where they may be of any size,
// a quarter of that, in which every finite score is finite: in kernels for any scores, and in tiles
// done over.
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
  // This lane's of a tile: number 4 g + 2 h + e is of row row() + 8 h, column 8 g + 2 (lane % 4) +
  // e.
  using ScoreAccum = float[kTileKv / 2];
  // Column of number i, as seen from the lane's first.
  static __device__ __forceinline__ constexpr float column(int i) {
    return static_cast<float>(i / 4 * 8 + i % 2);
  }

  __device__ __forceinline__ FwdScoreMod(const ForwardParams& params, uint32_t shared,
                                         SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup), kv_tiles_(params) {}

  // What scores are multiplied with when they meet their reference: to units of log2(e).
  __device__ __forceinline__ float exponent_scale() const {
    constexpr bool kLeft = Config::kScoreMod == ScoreModKind::kPlain || Config::kHasDropout;
    return kLeft ? scale() : kScoreUnit;
  }

  // ScoreModKind of modify() are in kUnit units of log2(e).
  static constexpr float kScoreUnit =
      Config::kScoreMod == ScoreModKind::kRuntime ? kWideUnit : 1.0f;
  __device__ __forceinline__ float scale() const {
    return params_.problem.scale * (kLog2E / kScoreUnit);
  }

  // Products with the keys from `key` on to scores, where a factor is not all. over: to scores of a
  // tile done over, in units of kWideUnit log2(e), rounded.
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

  // ALiBi of an item.
  struct AlibiParams {
    float slope;
    int32_t diagonal;                  // the key of this lane's upper query, less its first column
    int32_t linear_begin, linear_end;  // see Strip
    bool paired_rows;                  // see tied()
  };

  // Tied: the references of a lane's two rows lie as far apart as the rows' biases of a key before
  // both, so that one addend serves both. One is too high then, by as much where the keys that
  // count lie before the rows or next to them, by twice that where they lie behind, and by what the
  // rows' scores differ: too much for fp16, and seldom too much for bf16 (see finish()). A tile
  // done over takes no part.
  __device__ __forceinline__ bool paired_rows() const {
    if (std::is_same<T, __half>::value || Config::kScoreMod != ScoreModKind::kAlibi) return false;
    return paired_base_gap() >= 0.0f && paired_base_gap() <= 32.0f && !work_tile().redo_online;
  }

  // How far: the upper row's reference less the lower's.
  __device__ __forceinline__ float paired_base_gap() const {
    return 8.0f * work_tile().alibi_slope;
  }

  __device__ __forceinline__ AlibiParams alibi_params() const {
    return {work_tile().alibi_slope, warpgroup_tile().diagonal + row() % 64 - lane() % 4 * 2,
            warpgroup_tile().linear_begin, warpgroup_tile().linear_end, paired_rows()};
  }

  // Scores x * scale - slope * |distance - column|, 8 more below: ALiBi. Where all keys of a
  // tile lie on one side of all queries, straight: x * scale + rise * column + first, by row.
  struct AlibiLinear {
    float scale, slope, distance, rise, first[2];
    bool linear;
  };

  // In place of modify().
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

  // The softcap: a polynomial, where that is enough for all of the warp.
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

  // The largest bias of all keys that a row sees. Scores grow by so much from a tile far away
  // to the row's own, which must not come as a surprise.
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

  // -inf where a key, of those from `key` on, is not visible.
  template <int kCount>
  __device__ __forceinline__ void apply_mask(float (&s)[kCount], int32_t key) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& visible = storage_.visible_kv[row() + mi * 8];
      // As seen from this lane's first column.
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

  // -inf where the block mask hides a key.
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

  // Clears the weights that the dropout drops.
  __device__ __forceinline__ void apply_dropout(ScoreAccum& p, int32_t n) const {
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      if (params_.dropout_threshold == 0) return;
      visit_dropped<1, kTileKv / 8, false>(philox_stream(), params_.dropout_threshold,
                                           warp_first_query(), n * kTileKv, lane(),
                                           [&](int, int g, int x) { p[4 * g + x] = 0.0f; });
    }
  }

  // In place of it, of pairs of weights: their signs say which are dropped. ptxas draws behind the
  // exponentials; made to do so before them, under the products, it is 6 % slower.
  using TileDropoutSigns = DropoutSigns<kTileKv / 4, false>;
  __device__ __forceinline__ void draw_dropout(TileDropoutSigns& signs, int32_t n) const {
    if constexpr (Config::kHasDropout) {
      draw_signs<kTileKv / 8, false>(signs, philox_stream(), params_.dropout_threshold,
                                     warp_first_query(), n * kTileKv, lane());
    }
  }

  // What the weights that are left are multiplied with.
  __device__ __forceinline__ float dropout_scale() const {
    if constexpr (Config::kScoreMod != ScoreModKind::kRuntime && !Config::kHasDropout) return 1.0f;
    return 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
  }

 private:
  __device__ __forceinline__ DropoutStream philox_stream() const {
    return dropout_stream(params_.problem, params_.args.inputs, work_tile().b, work_tile().h);
  }

  // Of the warp.
  __device__ __forceinline__ int32_t warp_first_query() const {
    return work_tile().query + row() - lane() / 4;
  }

  // ALiBi of the keys from `key` on. scale: what the scores still lack.
  template <int kCount>
  __device__ __forceinline__ void add_alibi(float (&s)[kCount], int32_t key, float scale) const {
    // From this lane's first column to its upper row; numbers below 2^24 are exact.
    const float distance =
        static_cast<float>(warpgroup_tile().diagonal + row() % 64 - key - lane() % 4 * 2);
    const float slope = work_tile().alibi_slope;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float away = distance + static_cast<float>(i / 2 % 2 * 8) - column(i);
      s[i] = fmaf(s[i], scale, -slope * fabsf(away));
    }
  }

  // scale: what the scores still lack.
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

  // visit(score, bias) where there is a bias; elsewhere masks hide the score.
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
