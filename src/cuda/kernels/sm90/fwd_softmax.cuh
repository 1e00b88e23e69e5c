// The softmax of a consumer warpgroup of the Hopper forward pass: its rows' references and sums,
// and a tile's way from scores to weights.
#pragma once

#include <cfloat>

#include "cuda/kernels/sm90/fwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

enum class KvHalf { kBoth, kLower, kUpper };  // of a tile's keys

template <class Config>
class FwdSoftmax : protected FwdScoreMod<Config> {
  using Base = FwdScoreMod<Config>;

 protected:
  using Base::exponent_scale, Base::work_tile, Base::dropout_scale, Base::lane, Base::row,
      Base::warpgroup_tile;
  using Base::storage_, Base::params_;
  using typename Base::AlibiLinear, typename Base::AlibiParams;
  using typename Base::T;
  static constexpr int kTileKv = Config::kTileKv;
  // By less than that, in log2, a maximum may exceed the reference, but not in a tile done over.
  static constexpr float kBaseSlack = 8.0f;
  static constexpr float kScoreUnit = Base::kScoreUnit;

  __device__ __forceinline__ FwdSoftmax(const ForwardParams& params, uint32_t shared,
                                        SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup) {}

  // The first key of a part.
  template <KvHalf kHalf>
  static constexpr int kFirstKey = kHalf == KvHalf::kUpper ? kTileKv / 2 : 0;

  __device__ __forceinline__ void apply_masks(int32_t n) {
    if (n < warpgroup_tile().full_begin || n >= warpgroup_tile().full_end)
      this->apply_mask(s_, n * kTileKv);
    this->apply_block_mask(s_, n);
  }

  // Raises the rows' references to the tile's maxima, times c and raised, where these are higher by
  // enough to matter; tied ones together. shrink: what O must be multiplied with.
  template <int kCount>
  __device__ __forceinline__ void update_base(const float (&s)[kCount], float c,
                                              const float (&raised)[2], bool redo,
                                              float (&o_scale)[2]) {
    float highest[2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      float top[4];  // four chains: latency
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float x = fmaxf(s[4 * i + 2 * mi], s[4 * i + 2 * mi + 1]);
        top[i % 4] = i < 4 ? x : fmaxf(top[i % 4], x);
      }
      float all = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      highest[mi] = fmaf(all, c, raised[mi]);
    }
    // No weight of a tile done over is above 1: O may have overflowed.
    const float slack = redo ? 0.0f : kBaseSlack / kScoreUnit, unit = this->log2_unit(redo);
    bool keep[2] = {!(highest[0] > softmax_base_[0] + slack),
                    !(highest[1] > softmax_base_[1] + slack)};
    if (this->paired_rows()) {
      const float apart = this->paired_base_gap();
      // A row past the last query has no say in what another one's bits are.
      if (work_tile().query + row() + 8 >= work_tile().query_end) highest[1] = -INFINITY;
      const float top = fmaxf(highest[0], highest[1] + apart);
      const bool apart_yet = softmax_base_[1] == softmax_base_[0] - apart;
      keep[0] = keep[1] = apart_yet && !(top > softmax_base_[0] + slack);
      highest[0] = fmaxf(top, fmaxf(softmax_base_[0], softmax_base_[1] + apart));
      highest[1] = highest[0] - apart;
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float before = softmax_base_[mi];
      softmax_base_[mi] = keep[mi] ? before : highest[mi];
      o_scale[mi] = keep[mi] ? 1.0f : ptx::exp2((before - highest[mi]) * unit);
      row_sum_[mi] *= o_scale[mi];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void update_base(const float (&s)[kCount], float c,
                                              const float (&raised)[2], bool redo) {
    float o_scale[2];
    update_base(s, c, raised, redo, o_scale);
  }

  // Scores to weights, and their sums: of a tile first, so that few roundings meet a large
  // sum, and in one chain a row: with more, ptxas waits for P V before most exponentials (D = 64:
  // -4 %). exponent(x, i): of score number i.
  template <int kCount, class Exponent>
  __device__ __forceinline__ void exp2_and_sum(float (&s)[kCount], Exponent exponent) {
    float total[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = ptx::exp2(exponent(s[i], i));
      float& t = total[i / 2 % 2];
      t = i < 4 && i % 2 == 0 ? s[i] : t + s[i];
    }
    row_sum_[0] += total[0];
    row_sum_[1] += total[1];
  }

  template <int kCount>
  __device__ __forceinline__ void exp2_scaled(float (&s)[kCount], const float (&bases)[2]) {
    const float c = exponent_scale();
    exp2_and_sum(s, [&](float x, int i) { return fmaf(x, c, -bases[i / 2 % 2]); });
  }

  // The same of a tile that may be done over: its scores are rounded, and exactly subtracted from.
  template <int kCount>
  __device__ __forceinline__ void exp2_exact(float (&s)[kCount], bool redo) {
    const float c = redo ? kWideUnit : exponent_scale();
    const float first[2] = {redo ? 0.0f : base(0), redo ? 0.0f : base(1)};
    if (redo) {
      // Not by base(): near FLT_MAX that is beyond its units.
      float top[2];
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        top[mi] = softmax_base_[mi] == -INFINITY ? 0.0f : softmax_base_[mi];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = __fsub_rn(s[i], top[i / 2 % 2]);
    }
    exp2_and_sum(s, [&](float x, int i) { return fmaf(x, c, -first[i / 2 % 2]); });
  }

  // With whatever keys, straight or not.
  template <int kCount>
  __device__ __forceinline__ void exp2_alibi_abs(float (&s)[kCount], const AlibiLinear& line) {
    exp2_and_sum(s, [&](float x, int i) {
      const float away = line.distance + static_cast<float>(i / 2 % 2 * 8) - this->column(i);
      return fmaf(x, line.scale, fmaf(-line.slope, fabsf(away), -base(i / 2 % 2)));
    });
  }

  template <int kCount>
  __device__ __forceinline__ void exp2_alibi(float (&s)[kCount], const AlibiLinear& line) {
    if (!line.linear) return exp2_alibi_abs(s, line);
    const float first[2] = {line.first[0] - base(0), line.first[1] - base(1)};
    exp2_and_sum(s, [&](float x, int i) {
      return fmaf(x, line.scale, fmaf(line.rise, this->column(i), first[i / 2 % 2]));
    });
  }

  // Of tied rows, all keys before them: the addend of one serves the other. From the first column
  // each: a sum of steps is faster, by 2 to 3 %, but rounds too often for an LSE. o: known once P V
  // is, for small heads to wait for: or ptxas packs the weights behind the last of them (- 3 %).
  __device__ __forceinline__ void exp2_alibi_paired(const AlibiParams& alibi, int32_t n, float o) {
    const float c = this->scale();
    float first =
        fmaf(alibi.slope, static_cast<float>(n * kTileKv - alibi.diagonal), -softmax_base_[0]);
    // There is no softcap beside ALiBi, and without one all of this is +0.
    if (Config::kDimV < 128)
      first = ptx::order_after(first, o, __float_as_uint(params_.softcap.input_scale));
    exp2_and_sum(
        s_, [&](float x, int i) { return fmaf(x, c, fmaf(alibi.slope, this->column(i), first)); });
  }

  // A softcap: a polynomial of two terms in the place of the scale, where that is enough for all of
  // the warp.
  __device__ __forceinline__ void exp2_softcap() {
    const Softcap& cap = params_.softcap;
    if (__all_sync(~0u, !(max_abs(s_) >= cap.poly3_limit))) {
      exp2_and_sum(s_, [&](float x, int i) {
        return fmaf(x, fmaf(cap.poly3[1], x * x, cap.poly3[0]), -softmax_base_[i / 2 % 2]);
      });
    } else {
      this->apply_softcap(s_);
      exp2_scaled(s_, softmax_base_);
    }
  }

  // The reference in units of log2(e), but of a tile done over in those of its scores. That of a
  // row that has seen nothing is 0: weights of 0, not NaN.
  __device__ __forceinline__ float base(int mi) const {
    return softmax_base_[mi] == -INFINITY ? 0.0f : softmax_base_[mi] * kScoreUnit;
  }

  // What differences of scores are multiplied with: to units of log2(e). over: in a tile done over.
  static __device__ __forceinline__ float log2_unit(bool redo) {
    return Config::kScoreMod == ScoreModKind::kRuntime || redo ? kWideUnit : 1.0f;
  }

  // Takes the sink into references and sums, whatever its size: `shrink` is what the keys' share is
  // to be multiplied with. Whether it is above these units.
  __device__ __forceinline__ bool add_sink(bool redo, float (&o_scale)[2]) {
    const float natural = params_.args.inputs.sink[work_tile().h], unit = this->log2_unit(redo);
    const float sink = natural * (kLog2E / unit);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float keys = row_sum_[mi] == 0.0f ? -INFINITY : softmax_base_[mi];
      const float top = fmaxf(keys, sink);
      o_scale[mi] = keys == top ? 1.0f : ptx::exp2((keys - top) * unit);
      row_sum_[mi] *= o_scale[mi];
      if (top != -INFINITY) row_sum_[mi] += ptx::exp2((sink - top) * unit);
      softmax_base_[mi] = top;
    }
    return sink == INFINITY && natural < INFINITY;
  }

  // The sums of a tile, of all lanes of a quad, and whether O is `finite`, by row: what O is to be
  // multiplied with, and whether the tile must be done over. Both rows at once, without branches:
  // nothing else covers the latencies.
  __device__ __forceinline__ void finalize(const float (&nonfinite)[2][4], float (&factor)[2]) {
    const bool redo = work_tile().redo_online;
    const float l[2] = {row_sum_[0], row_sum_[1]},
                base[2] = {softmax_base_[0], softmax_base_[1]};  // of keys
    float all[2];
    bool usual = Config::kScoreMod != ScoreModKind::kAlibi, beyond = false;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      all[mi] = (nonfinite[mi][0] + nonfinite[mi][1]) + (nonfinite[mi][2] + nonfinite[mi][3]);
      usual &= l[mi] >= kMinRowSum && l[mi] <= kMaxRowSum && all[mi] == 0.0f;
      usual &= fabsf(base[mi]) <= kFarScore / kScoreUnit;
      factor[mi] = l[mi] == 0.0f ? 0.0f : ptx::reciprocal(l[mi]) * dropout_scale();
    }
    if (params_.problem.features & FLASHATTN_FEATURE_SINK) {
      float o_scale[2];
      beyond = add_sink(redo, o_scale);
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        const float sum = row_sum_[mi];
        factor[mi] = sum == 0.0f ? 0.0f : ptx::reciprocal(sum) * o_scale[mi] * dropout_scale();
      }
    }
    const bool fp32 = params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    if (!__all_sync(~0u, usual) || beyond || fp32) {
      bool base_overflowed = beyond;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        const int32_t keys = this->visible_keys_of(mi);
        bool bad = !(l[mi] <= kMaxRowSum && all[mi] == 0.0f);
        bad |= base[mi] != -INFINITY && !(fabsf(base[mi]) <= kFartherScore / kScoreUnit);
        if (Config::kScoreMod != ScoreModKind::kRuntime) {
          // Too little for keys that there are; 0 where scores above -FLT_MAX are -inf in log2
          // units.
          bad |= !(l[mi] >= kMinRowSum) && keys > 0;
          // Done over, the weight of a single key is 1: to the last digit, O is that key's value.
          bad |= fp32 && keys == 1;
        }
        base_overflowed |= bad && work_tile().query + row() + mi * 8 < work_tile().query_end;
        // Of a single key the product has the weight as it was rounded.
        if (keys == 1 && l[mi] > 0.0f) factor[mi] *= l[mi] * ptx::reciprocal(round_to_type(l[mi]));
      }
      if (__any_sync(~0u, base_overflowed) && !redo && lane() == 0) {
        storage_.redo_queue[work_tile().redo_slot] = work_tile().linear_idx + 1;
        storage_.base_overflowed = 1;
      }
    }
  }

  // Of a quad's two rows the first two lanes store one each.
  __device__ __forceinline__ void store_lse(bool redo) const {
    const int32_t mi = lane() % 4;
    const int32_t i = work_tile().query + row() + mi * 8;
    if (mi > 1 || params_.args.lse == nullptr || i >= work_tile().query_end) return;
    const RowLayout layout = row_layout(params_.problem, params_.args.shape);
    const int64_t place = work_tile().b * layout.batch_stride + work_tile().h * layout.head_stride;
    const float l = mi == 0 ? row_sum_[0] : row_sum_[1];
    params_.args.lse[place + work_tile().offset_q + i] =
        lse_of(mi == 0 ? softmax_base_[0] : softmax_base_[1], log2_unit(redo), l);
  }

  // A number as weights are rounded.
  static __device__ __forceinline__ float round_to_type(float x) {
    return ptx::unpack<T>(ptx::pack<T>(x, 0.0f)).x;
  }

  // Of a row's sum. Less only where the reference was foreseen, not seen, or another row's: fp16
  // has few numbers there.
  static constexpr float kMaxRowSum = 0x1p100f;
  static constexpr float kMinRowSum = Config::kScoreMod != ScoreModKind::kAlibi ? FLT_MIN
                                      : std::is_same<T, __half>::value          ? 0x1p-2f
                                                                                : 0x1p-60f;

  float softmax_base_[2];  // in the units of the scores: see unit()
  float row_sum_[2];       // of this lane's columns
  float s_[kTileKv / 2];
  float s_half_[kTileKv / 4];  // the scores of half a tile
};

}  // namespace flashattn::cuda::sm90
