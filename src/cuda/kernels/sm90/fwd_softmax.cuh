// The softmax of a consumer warpgroup of the Hopper forward pass: its rows' references and sums,
// and a tile's way from scores to weights.
#pragma once

#include <cfloat>

#include "cuda/kernels/sm90/fwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

enum class Part { kWhole, kLower, kUpper };  // of a tile's keys

template <class Config>
class Softmax : protected TileScores<Config> {
  using Base = TileScores<Config>;

 protected:
  using Base::control_, Base::params_;
  using Base::factor, Base::item, Base::kept, Base::lane, Base::row, Base::strip;
  using typename Base::Line, typename Base::Slope;
  using typename Base::T;
  static constexpr int kTileKv = Config::kTileKv;
  // By less than that, in log2, a maximum may exceed the reference, but not in a tile done over.
  static constexpr float kSlack = 8.0f;
  static constexpr float kUnit = Base::kUnit;

  __device__ __forceinline__ Softmax(const ForwardParams& params, uint32_t shared,
                                     Control<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  // The first key of a part.
  template <Part kPart>
  static constexpr int kFirst = kPart == Part::kUpper ? kTileKv / 2 : 0;

  __device__ __forceinline__ void hide(int32_t n) {
    if (n < strip().full_begin || n >= strip().full_end) this->mask(s_, n * kTileKv);
    this->hide_blocks(s_, n);
  }

  // Raises the rows' references to the tile's maxima, times c and raised, where these are higher by
  // enough to matter; tied ones together. shrink: what O must be multiplied with.
  template <int kCount>
  __device__ __forceinline__ void raise_reference(const float (&s)[kCount], float c,
                                                  const float (&raised)[2], bool over,
                                                  float (&shrink)[2]) {
    float highest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[4];  // four chains: latency
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float x = fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
        top[i % 4] = i < 4 ? x : fmaxf(top[i % 4], x);
      }
      float all = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      highest[half] = fmaf(all, c, raised[half]);
    }
    // No weight of a tile done over is above 1: O may have overflowed.
    const float slack = over ? 0.0f : kSlack / kUnit, unit = this->unit(over);
    bool keep[2] = {!(highest[0] > reference_[0] + slack), !(highest[1] > reference_[1] + slack)};
    if (this->tied()) {
      const float apart = this->apart();
      // A row past the last query has no say in what another one's bits are.
      if (item().query + row() + 8 >= item().query_end) highest[1] = -INFINITY;
      const float top = fmaxf(highest[0], highest[1] + apart);
      const bool apart_yet = reference_[1] == reference_[0] - apart;
      keep[0] = keep[1] = apart_yet && !(top > reference_[0] + slack);
      highest[0] = fmaxf(top, fmaxf(reference_[0], reference_[1] + apart));
      highest[1] = highest[0] - apart;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = reference_[half];
      reference_[half] = keep[half] ? before : highest[half];
      shrink[half] = keep[half] ? 1.0f : ptx::exp2((before - highest[half]) * unit);
      sum_[half] *= shrink[half];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void raise_reference(const float (&s)[kCount], float c,
                                                  const float (&raised)[2], bool over) {
    float shrink[2];
    raise_reference(s, c, raised, over, shrink);
  }

  // Scores to weights, and their sums: of a tile first, so that few roundings meet a large
  // sum, and in one chain a row: with more, ptxas waits for P V before most exponentials (D = 64:
  // -4 %). exponent(x, i): of score number i.
  template <int kCount, class Exponent>
  __device__ __forceinline__ void weigh(float (&s)[kCount], Exponent exponent) {
    float total[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = ptx::exp2(exponent(s[i], i));
      float& t = total[i / 2 % 2];
      t = i < 4 && i % 2 == 0 ? s[i] : t + s[i];
    }
    sum_[0] += total[0];
    sum_[1] += total[1];
  }

  template <int kCount>
  __device__ __forceinline__ void weigh_with(float (&s)[kCount], const float (&bases)[2]) {
    const float c = factor();
    weigh(s, [&](float x, int i) { return fmaf(x, c, -bases[i / 2 % 2]); });
  }

  // The same of a tile that may be done over: its scores are rounded, and exactly subtracted from.
  template <int kCount>
  __device__ __forceinline__ void weigh_safely(float (&s)[kCount], bool over) {
    const float c = over ? kWideUnit : factor();
    const float first[2] = {over ? 0.0f : base(0), over ? 0.0f : base(1)};
    if (over) {
      // Not by base(): near FLT_MAX that is beyond its units.
      float top[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[half] = reference_[half] == -INFINITY ? 0.0f : reference_[half];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = __fsub_rn(s[i], top[i / 2 % 2]);
    }
    weigh(s, [&](float x, int i) { return fmaf(x, c, -first[i / 2 % 2]); });
  }

  // With whatever keys, straight or not.
  template <int kCount>
  __device__ __forceinline__ void weigh_bent(float (&s)[kCount], const Line& line) {
    weigh(s, [&](float x, int i) {
      const float away = line.distance + static_cast<float>(i / 2 % 2 * 8) - this->column(i);
      return fmaf(x, line.scale, fmaf(-line.slope, fabsf(away), -base(i / 2 % 2)));
    });
  }

  template <int kCount>
  __device__ __forceinline__ void weigh_line(float (&s)[kCount], const Line& line) {
    if (!line.straight) return weigh_bent(s, line);
    const float first[2] = {line.first[0] - base(0), line.first[1] - base(1)};
    weigh(s, [&](float x, int i) {
      return fmaf(x, line.scale, fmaf(line.rise, this->column(i), first[i / 2 % 2]));
    });
  }

  // Of tied rows, all keys before them: the addend of one serves the other. From the first column
  // each: a sum of steps is faster, by 2 to 3 %, but rounds too often for an LSE. o: known once P V
  // is, for small heads to wait for: or ptxas packs the weights behind the last of them (- 3 %).
  __device__ __forceinline__ void weigh_tied(const Slope& of, int32_t n, float o) {
    const float c = this->scale();
    float first = fmaf(of.slope, static_cast<float>(n * kTileKv - of.own), -reference_[0]);
    // There is no softcap beside ALiBi, and without one all of this is +0.
    if (Config::kDimV < 128) first = ptx::order_after(first, o, __float_as_uint(params_.cap.inner));
    weigh(s_, [&](float x, int i) { return fmaf(x, c, fmaf(of.slope, this->column(i), first)); });
  }

  // A softcap: a polynomial of two terms in the place of the scale, where that is enough for all of
  // the warp.
  __device__ __forceinline__ void weigh_capped() {
    const Softcap& cap = params_.cap;
    if (__all_sync(~0u, !(max_abs(s_) >= cap.short_limit))) {
      weigh(s_, [&](float x, int i) {
        return fmaf(x, fmaf(cap.short_factor[1], x * x, cap.short_factor[0]),
                    -reference_[i / 2 % 2]);
      });
    } else {
      this->cap_scores(s_);
      weigh_with(s_, reference_);
    }
  }

  // The reference in units of log2(e), but of a tile done over in those of its scores. That of a
  // row that has seen nothing is 0: weights of 0, not NaN.
  __device__ __forceinline__ float base(int half) const {
    return reference_[half] == -INFINITY ? 0.0f : reference_[half] * kUnit;
  }

  // What differences of scores are multiplied with: to units of log2(e). over: in a tile done over.
  static __device__ __forceinline__ float unit(bool over) {
    return Config::kScoreMod == ScoreModKind::kRuntime || over ? kWideUnit : 1.0f;
  }

  // Takes the sink into references and sums, whatever its size: `shrink` is what the keys' share is
  // to be multiplied with. Whether it is above these units.
  __device__ __forceinline__ bool add_sink(bool over, float (&shrink)[2]) {
    const float natural = params_.args.inputs.sink[item().h], unit = this->unit(over);
    const float sink = natural * (kLog2E / unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keys = sum_[half] == 0.0f ? -INFINITY : reference_[half];
      const float top = fmaxf(keys, sink);
      shrink[half] = keys == top ? 1.0f : ptx::exp2((keys - top) * unit);
      sum_[half] *= shrink[half];
      if (top != -INFINITY) sum_[half] += ptx::exp2((sink - top) * unit);
      reference_[half] = top;
    }
    return sink == INFINITY && natural < INFINITY;
  }

  // The sums of a tile, of all lanes of a quad, and whether O is `finite`, by row: what O is to be
  // multiplied with, and whether the tile must be done over. Both rows at once, without branches:
  // nothing else covers the latencies.
  __device__ __forceinline__ void finish_sums(const float (&finite)[2][4], float (&factor)[2]) {
    const bool over = item().safe;
    const float l[2] = {sum_[0], sum_[1]}, base[2] = {reference_[0], reference_[1]};  // of keys
    float all[2];
    bool usual = Config::kScoreMod != ScoreModKind::kAlibi, beyond = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      all[half] = (finite[half][0] + finite[half][1]) + (finite[half][2] + finite[half][3]);
      usual &= l[half] >= kLeast && l[half] <= kMost && all[half] == 0.0f;
      usual &= fabsf(base[half]) <= kFarScore / kUnit;
      factor[half] = l[half] == 0.0f ? 0.0f : ptx::reciprocal(l[half]) * kept();
    }
    if (params_.problem.features & FLASHATTN_FEATURE_SINK) {
      float shrink[2];
      beyond = add_sink(over, shrink);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_[half];
        factor[half] = sum == 0.0f ? 0.0f : ptx::reciprocal(sum) * shrink[half] * kept();
      }
    }
    const bool fp32 = params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    if (!__all_sync(~0u, usual) || beyond || fp32) {
      bool outgrown = beyond;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t keys = this->keys_of(half);
        bool bad = !(l[half] <= kMost && all[half] == 0.0f);
        bad |= base[half] != -INFINITY && !(fabsf(base[half]) <= kFartherScore / kUnit);
        if (Config::kScoreMod != ScoreModKind::kRuntime) {
          // Too little for keys that there are; 0 where scores above -FLT_MAX are -inf in log2
          // units.
          bad |= !(l[half] >= kLeast) && keys > 0;
          // Done over, the weight of a single key is 1: to the last digit, O is that key's value.
          bad |= fp32 && keys == 1;
        }
        outgrown |= bad && item().query + row() + half * 8 < item().query_end;
        // Of a single key the product has the weight as it was rounded.
        if (keys == 1 && l[half] > 0.0f) factor[half] *= l[half] * ptx::reciprocal(round(l[half]));
      }
      if (__any_sync(~0u, outgrown) && !over && lane() == 0) {
        control_.again[item().index] = item().tile + 1;
        control_.outgrown = 1;
      }
    }
  }

  // Of a quad's two rows the first two lanes store one each.
  __device__ __forceinline__ void store_lse(bool over) const {
    const int32_t half = lane() % 4;
    const int32_t i = item().query + row() + half * 8;
    if (half > 1 || params_.args.lse == nullptr || i >= item().query_end) return;
    const RowLayout layout = row_layout(params_.problem, params_.args.shape);
    const int64_t place = item().b * layout.batch_stride + item().h * layout.head_stride;
    const float l = half == 0 ? sum_[0] : sum_[1];
    params_.args.lse[place + item().offset_q + i] =
        lse_of(half == 0 ? reference_[0] : reference_[1], unit(over), l);
  }

  // A number as weights are rounded.
  static __device__ __forceinline__ float round(float x) {
    return ptx::unpack<T>(ptx::pack<T>(x, 0.0f)).x;
  }

  // Of a row's sum. Less only where the reference was foreseen, not seen, or another row's: fp16
  // has few numbers there.
  static constexpr float kMost = 0x1p100f;
  static constexpr float kLeast = Config::kScoreMod != ScoreModKind::kAlibi ? FLT_MIN
                                  : std::is_same<T, __half>::value          ? 0x1p-2f
                                                                            : 0x1p-60f;

  float reference_[2];  // in the units of the scores: see unit()
  float sum_[2];        // of this lane's columns
  float s_[kTileKv / 2];
  float half_[kTileKv / 4];  // the scores of half a tile
};

}  // namespace flashattn::cuda::sm90
