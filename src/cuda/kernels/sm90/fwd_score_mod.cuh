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
class TileScores : protected TileOutput<Config> {
  using Base = TileOutput<Config>;

 protected:
  using T = typename Config::T;
  using Base::control_, Base::params_;
  using Base::item, Base::lane, Base::row, Base::strip;
  static constexpr int kTileKv = Config::kTileKv;
  // This lane's of a tile: number 4 g + 2 h + e is of row row() + 8 h, column 8 g + 2 (lane % 4) +
  // e.
  using Tile = float[kTileKv / 2];
  // Column of number i, as seen from the lane's first.
  static __device__ __forceinline__ constexpr float column(int i) {
    return static_cast<float>(i / 4 * 8 + i % 2);
  }

  __device__ __forceinline__ TileScores(const ForwardParams& params, uint32_t shared,
                                        Control<Config>& control, int32_t group)
      : Base(params, shared, control, group), tiles_(params) {}

  // What scores are multiplied with when they meet their reference: to units of log2(e).
  __device__ __forceinline__ float factor() const {
    constexpr bool kLeft = Config::kScoreMod == ScoreModKind::kPlain || Config::kDropped;
    return kLeft ? scale() : kUnit;
  }

  // Scores of modify() are in kUnit units of log2(e).
  static constexpr float kUnit = Config::kScoreMod == ScoreModKind::kRuntime ? kWideUnit : 1.0f;
  __device__ __forceinline__ float scale() const {
    return params_.problem.scale * (kLog2E / kUnit);
  }

  // Products with the keys from `key` on to scores, where a factor is not all. over: to scores of a
  // tile done over, in units of kWideUnit log2(e), rounded.
  template <int kCount>
  __device__ __forceinline__ void modify(float (&s)[kCount], int32_t key, bool over) const {
    const bool wide = over && Config::kScoreMod != ScoreModKind::kRuntime;
    const float unit = wide ? 1.0f / kWideUnit : 1.0f;
    if constexpr (Config::kScoreMod == ScoreModKind::kSoftcap) cap_scores(s);
    if constexpr (Config::kScoreMod == ScoreModKind::kAlibi) add_slope(s, key, scale() * unit);
    if (wide && Config::kScoreMod != ScoreModKind::kAlibi) {
      const float left = (Config::kScoreMod == ScoreModKind::kSoftcap ? 1.0f : scale()) * unit;
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = __fmul_rn(s[i], left);
    }
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      const Problem& problem = params_.problem;
      const bool capped = problem.softcap != 0, sloped = problem.bias & FLASHATTN_BIAS_ALIBI;
      if (capped) cap_scores(s);
      const float left = capped ? 1.0f : scale();
      if (sloped) add_slope(s, key, left);
      add_bias(s, key, sloped ? 1.0f : left);
    }
  }

  // ALiBi of an item.
  struct Slope {
    float slope;
    int32_t own;                   // the key of this lane's upper query, less its first column
    int32_t line_begin, line_end;  // see Strip
    bool tied;                     // see tied()
  };

  // Tied: the references of a lane's two rows lie as far apart as the rows' biases of a key before
  // both, so that one addend serves both. One is too high then, by as much where the keys that
  // count lie before the rows or next to them, by twice that where they lie behind, and by what the
  // rows' scores differ: too much for fp16, and seldom too much for bf16 (see finish()). A tile
  // done over takes no part.
  __device__ __forceinline__ bool tied() const {
    if (std::is_same<T, __half>::value || Config::kScoreMod != ScoreModKind::kAlibi) return false;
    return apart() >= 0.0f && apart() <= 32.0f && !item().safe;
  }

  // How far: the upper row's reference less the lower's.
  __device__ __forceinline__ float apart() const { return 8.0f * item().slope; }

  __device__ __forceinline__ Slope slope() const {
    return {item().slope, strip().own + row() % 64 - lane() % 4 * 2, strip().line_begin,
            strip().line_end, tied()};
  }

  // Scores x * scale - slope * |distance - column|, 8 more below: ALiBi. Where all keys of a
  // tile lie on one side of all queries, straight: x * scale + rise * column + first, by row.
  struct Line {
    float scale, slope, distance, rise, first[2];
    bool straight;
  };

  // In place of modify().
  __device__ __forceinline__ Line line_of(const Slope& of, int32_t n) const {
    const float distance = static_cast<float>(of.own - n * kTileKv);
    const float rise = n < of.line_begin ? of.slope : -of.slope;
    return {scale(),
            of.slope,
            distance,
            rise,
            {-rise * distance, -rise * (distance + 8.0f)},
            n < of.line_end || n >= of.line_begin};
  }

  // The softcap: a polynomial, where that is enough for all of the warp.
  template <int kCount>
  __device__ __forceinline__ void cap_scores(float (&s)[kCount]) const {
    const Softcap& cap = params_.cap;
    if (__all_sync(~0u, !(max_abs(s) >= cap.limit))) {
      const float factor[3] = {cap.factor[0] / kUnit, cap.factor[1] / kUnit, cap.factor[2] / kUnit};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float square = s[i] * s[i];
        s[i] *= fmaf(fmaf(factor[2], square, factor[1]), square, factor[0]);
      }
    } else {
      const float outer = params_.problem.softcap * (kLog2E / kUnit);
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = scaled_tanh(s[i], cap.inner, outer);
    }
  }

  // The largest bias of all keys that a row sees. Scores grow by so much from a tile far away
  // to the row's own, which must not come as a surprise.
  __device__ __forceinline__ void find_peaks(float (&peak)[2]) const {
    const float slope = item().slope;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& seen = control_.visible[row() + half * 8];
      const int32_t own = strip().own + row() % 64 + half * 8;
      const int32_t away = max(max(seen.begin - own, own - (seen.end - 1)), 0);
      peak[half] = -slope * static_cast<float>(away);
    }
  }

  // -inf where a key, of those from `key` on, is not visible.
  template <int kCount>
  __device__ __forceinline__ void mask(float (&s)[kCount], int32_t key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t first = key + lane() % 4 * 2;
      const int32_t begin = visible.begin - first, count = visible.end - first - begin;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int32_t column = i / 2 * 8 + i % 2;
        float& x = s[i / 2 * 4 + half * 2 + i % 2];
        if (static_cast<uint32_t>(column - begin) >= static_cast<uint32_t>(max(count, 0))) {
          x = -INFINITY;
        }
      }
    }
  }

  // -inf where the block mask hides a key.
  __device__ __forceinline__ void hide_blocks(Tile& s, int32_t n) const {
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      if (tiles_.full(n)) return;
      const Inputs& in = params_.args.inputs;
      const int32_t width = params_.problem.block_kv;  // a multiple of 8
      const int32_t keys = item().len.kv - n * kTileKv;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = min(item().query + row() + half * 8, item().query_end - 1);
        int32_t left = width - n * kTileKv % width;
        const uint8_t* on = in.block_mask + item().b * in.block_mask_stride_batch +
                            item().h * in.block_mask_stride_head +
                            i / params_.problem.block_q * in.block_mask_stride_row +
                            n * kTileKv / width;
#pragma unroll
        for (int g = 0; g < kTileKv / 8; ++g) {
          if (g * 8 >= keys || !*on) s[4 * g + 2 * half] = s[4 * g + 2 * half + 1] = -INFINITY;
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
  __device__ __forceinline__ void drop(Tile& p, int32_t n) const {
    if constexpr (Config::kScoreMod == ScoreModKind::kRuntime) {
      if (params_.dropout_threshold == 0) return;
      visit_dropped<1, kTileKv / 8, false>(stream(), params_.dropout_threshold, first_query(),
                                           n * kTileKv, lane(),
                                           [&](int, int g, int x) { p[4 * g + x] = 0.0f; });
    }
  }

  // In place of it, of pairs of weights: their signs say which are dropped. ptxas draws behind the
  // exponentials; made to do so before them, under the products, it is 6 % slower.
  using Drops = DropoutSigns<kTileKv / 4, false>;
  __device__ __forceinline__ void draw(Drops& drops, int32_t n) const {
    if constexpr (Config::kDropped) {
      draw_signs<kTileKv / 8, false>(drops, stream(), params_.dropout_threshold, first_query(),
                                     n * kTileKv, lane());
    }
  }

  // What the weights that are left are multiplied with.
  __device__ __forceinline__ float kept() const {
    if constexpr (Config::kScoreMod != ScoreModKind::kRuntime && !Config::kDropped) return 1.0f;
    return 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
  }

 private:
  __device__ __forceinline__ DropoutStream stream() const {
    return dropout_stream(params_.problem, params_.args.inputs, item().b, item().h);
  }

  // Of the warp.
  __device__ __forceinline__ int32_t first_query() const {
    return item().query + row() - lane() / 4;
  }

  // ALiBi of the keys from `key` on. scale: what the scores still lack.
  template <int kCount>
  __device__ __forceinline__ void add_slope(float (&s)[kCount], int32_t key, float scale) const {
    // From this lane's first column to its upper row; numbers below 2^24 are exact.
    const float distance = static_cast<float>(strip().own + row() % 64 - key - lane() % 4 * 2);
    const float slope = item().slope;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float away = distance + static_cast<float>(i / 2 % 2 * 8) - column(i);
      s[i] = fmaf(s[i], scale, -slope * fabsf(away));
    }
  }

  // scale: what the scores still lack.
  template <int kCount>
  __device__ __forceinline__ void add_bias(float (&s)[kCount], int32_t key, float scale) const {
    const Problem& problem = params_.problem;
    const Inputs& in = params_.args.inputs;
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= scale;
      return;
    }
    const auto add = [&](const auto* bias) {
      visit_bias(bias, s, key,
                 [&](float& x, auto y) { x = fmaf(x, scale, to_float(y) * (kLog2E / kUnit)); });
    };
    switch (problem.dtype_bias) {
      case FLASHATTN_DTYPE_F32: return add(static_cast<const float*>(in.bias));
      case FLASHATTN_DTYPE_F16: return add(static_cast<const __half*>(in.bias));
      case FLASHATTN_DTYPE_BF16: return add(static_cast<const __nv_bfloat16*>(in.bias));
      default:
        visit_bias(static_cast<const uint8_t*>(in.bias), s, key,
                   [&](float& x, uint8_t y) { x = y ? x * scale : -INFINITY; });
    }
  }

  // visit(score, bias) where there is a bias; elsewhere masks hide the score.
  template <class B, int kCount, class Visit>
  __device__ __forceinline__ void visit_bias(const B* bias, float (&s)[kCount], int32_t key,
                                             Visit visit) const {
    const Inputs& in = params_.args.inputs;
    const int32_t first = key + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t i = item().query + row() + half * 8;
      const int32_t columns = i < item().query_end ? item().len.kv - first : 0;
      const B* at = bias + item().b * in.bias_stride_batch + item().h * in.bias_stride_head +
                    i * in.bias_stride_row + first;
#pragma unroll
      for (int x = 0; x < kCount / 2; ++x) {
        const int32_t column = x / 2 * 8 + x % 2;
        if (column < columns) visit(s[x / 2 * 4 + half * 2 + x % 2], at[column]);
      }
    }
  }

 protected:
  Tiles<Config> tiles_;
};

}  // namespace flashattn::cuda::sm90
