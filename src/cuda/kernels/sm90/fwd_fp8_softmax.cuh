// Softmax of a consumer warpgroup of the Hopper forward pass in E4M3: from products of Q and K to
// P, with a base that stays within the range of E4M3. See fwd_fp8.cuh.
#pragma once

#include "cuda/kernels/sm90/fwd_fp8_descales.cuh"
#include "cuda/kernels/sm90/fwd_softmax.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdFp8Softmax : public FwdSoftmax<Config> {
  using Base = FwdSoftmax<Config>;

 public:
  using Base::kTileKv, Base::kScoreUnit;
  using Base::params_, Base::softmax_base_, Base::row_sum_, Base::s_;
  using Base::score_mod, Base::work_tile, Base::warpgroup_tile, Base::row;
  static constexpr int kDimV = Config::kDimV;
  static constexpr bool kIsRuntime = Config::kIsRuntime;
  static constexpr bool kHasBlockDescales = Config::kHasBlockDescales;
  // log2 of the largest P in a row's first KV tile: it leaves room for larger scores later.
  static constexpr int kFirstPeak = 4;
  // log2 of a lone P, a row's largest and more than 1 / kLoneShare of its tile's sum: later scores
  // seldom exceed it, and if it were smaller the others would be too small for E4M3.
  static constexpr int kLonePeak = 7, kLoneShare = 3;

  // The largest slope, in units of log2(e), with which add_to_bases() rounds bases by little.
  static constexpr float kSteepest = 4.0f;

  using Base::Base;

  // Turns scores into P, in s_, and sums P over this lane's columns. Returns whether a P of this
  // warp may exceed the largest number of E4M3.
  template <bool kMasked>
  __device__ __forceinline__ bool softmax(int32_t n) {
    if constexpr (kIsRuntime) {
      descales().apply(s_, n);
      score_mod().modify(s_, n * kTileKv, false);
    }
    if constexpr (kMasked) {
      this->apply_masks(n);
      if constexpr (Config::kHasAlibi) add_alibi(n);
      if constexpr (kHasBlockDescales) scale_halves(n, [](const HalfDescales& x) { return x.k; });
      set_base();
    }
    if constexpr (kHasBlockDescales) {
      exp2_of_halves<kMasked>(n);
    } else if constexpr (Config::kHasSoftcap && !kMasked) {
      exp2_softcap();
    } else if constexpr (Config::kHasAlibi && !kMasked) {
      const float rise = alibi_rise(n),
                  first = rise * static_cast<float>(n * kTileKv - warpgroup_tile().diagonal);
      const LinearAlibi line{rise, {first - softmax_base_[0], first - softmax_base_[1]}};
      exp2_and_sum([&](float x, int i) { return fmaf(x, exponent_scale_, line.at(i)); });
    } else if constexpr (Config::kHasSoftcap) {
      exp2_tanh<true>();
    } else {
      exp2_plain<kMasked>();
    }
    return exceeds_e4m3();
  }

  // Whether a P of this warp may exceed the largest number of E4M3.
  __device__ __forceinline__ bool exceeds_e4m3() const {
    return __any_sync(~0u, !(fmaxf(tile_sum_[0], tile_sum_[1]) <= ptx::kMaxE4m3));
  }

  // P of scores that nothing modifies but the scale, and its sums.
  template <bool kMasked, int kBegin = 0, int kEnd = kTileKv / 2>
  __device__ __forceinline__ void exp2_plain() {
    exp2_and_sum<kBegin, kEnd>([&](float x, int i) {
      const int mi = i / 2 % 2;
      const float base = kMasked ? this->base(mi) : softmax_base_[mi] * kScoreUnit;
      return fmaf(x, score_factor(), -base);
    });
  }

  // The factor from s_, modified, to scores in units of kScoreUnit log2(e).
  __device__ __forceinline__ float score_factor() const {
    return kHasBlockDescales || Config::kHasAlibi ? 1.0f : exponent_scale_;
  }

  // Turns scores [kBegin, kEnd) into P = 2^exponent(score, i), and sums all up to there.
  template <int kBegin = 0, int kEnd = kTileKv / 2, class Exponent>
  __device__ __forceinline__ void exp2_and_sum(Exponent exponent) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      s_[i] = ptx::exp2(exponent(s_[i], i));
      float& t = tile_sum_[i / 2 % 2];
      t = i < 4 && i % 2 == 0 ? s_[i] : t + s_[i];
    }
  }

  // A product's tanh. Hidden ones stay -infinity.
  static __device__ __forceinline__ float tanh_of(float product, float inner) {
    return fmaf(product, FLT_MIN, ptx::tanh(product * inner));
  }

  // Softcap of any products, and P. In order, as registers are scarce: with a softcap descales are
  // not by blocks here, and descale_block is 0.
  template <bool kMasked>
  __device__ __forceinline__ void exp2_tanh() {
    constexpr int kAtOnce = 4;
    float inner = params_.softcap.input_scale * exponent_scale_;
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      if (i % kAtOnce == 0 && i > 0)
        inner = ptx::order_after(inner, s_[i - kAtOnce], params_.problem.descale_block);
      s_[i] = tanh_of(s_[i], inner);
    }
    exp2_and_sum([&](float x, int i) {
      const int mi = i / 2 % 2;
      return fmaf(x, params_.softcap_log2, kMasked ? -this->base(mi) : -softmax_base_[mi]);
    });
  }

  // Softcap and P of a tile without masks: by a polynomial of degree 3, fused into the exponent, if
  // its range suffices for the whole warp. The special functions are the bottleneck.
  __device__ __forceinline__ void exp2_softcap() {
    const SoftcapPolynomials& fit = params_.softcap;
    const float descale = exponent_scale_;
    if (__all_sync(~0u, max_abs(s_) * descale < fit.poly3_limit)) {
      const float first = fit.poly3[0] * descale,
                  third = fit.poly3[1] * descale * descale * descale;
      exp2_and_sum([&](float x, int i) {
        return fmaf(x, fmaf(third, x * x, first), -softmax_base_[i / 2 % 2]);
      });
    } else {
      exp2_tanh<false>();
    }
  }

  // How ALiBi rises from key to key of tile n, whose keys lie on one side of all rows.
  __device__ __forceinline__ float alibi_rise(int32_t n) const {
    const float slope = work_tile().alibi_slope;
    return n < warpgroup_tile().linear_begin ? slope : -slope;
  }
  // From the lane's first key of a tile that begins where the rows do to its first query.
  static __device__ __forceinline__ int32_t own_distance() {
    const uint32_t thread = no_hoist(threadIdx.x) % 128;
    return static_cast<int32_t>(thread / 32 * 16 + thread % 32 / 4 - thread % 4 * 2);
  }
  // While keys lie on one side, bases include the part of ALiBi that depends on the lane.
  __device__ __forceinline__ void add_to_bases(float rise) {
    const float own = static_cast<float>(own_distance());
    softmax_base_[0] = fmaf(rise, own, softmax_base_[0]);
    softmax_base_[1] = fmaf(rise, own + 8.0f, softmax_base_[1]);
  }

  // ALiBi and the scale, after masks. Of tiles behind all rows, the first of which are visited
  // first, scores grow towards the rows: the base of a row that has seen no key is predicted.
  __device__ __forceinline__ void add_alibi(int32_t n) {
    if (n >= warpgroup_tile().linear_begin && warpgroup_tile().fixed_base_end > 0) {
      float top[2], peak[2];
      row_max(top);
      score_mod().max_alibi_bias(peak);
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        if (softmax_base_[mi] == -INFINITY)
          softmax_base_[mi] = fmaf(top[mi], exponent_scale_, peak[mi] - kFirstPeak);
      }
    }
    const float slope = work_tile().alibi_slope;
    // Rows r and r + 8 have some biases in common: registers are too scarce to keep them.
    float away[2];
    away[0] = static_cast<float>(warpgroup_tile().diagonal - n * kTileKv + own_distance());
    away[1] = __int_as_float(no_hoist(__float_as_int(away[0] + 8.0f)));
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      const float bias = -slope * fabsf(away[i / 2 % 2] - static_cast<float>(SLayout::key(i)));
      s_[i] = fmaf(s_[i], exponent_scale_, bias);
    }
  }

  // P of both halves of the tile, weighed by the descales of V; its sums are not.
  template <bool kMasked>
  __device__ __forceinline__ void exp2_of_halves(int32_t n) {
    const HalfDescales* const halves = descales().halves(n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const HalfDescales of = descales().load(halves + half);
      float base[2], sum[2];
#pragma unroll
      for (int mi = 0; mi < 2; ++mi)
        base[mi] = (kMasked ? this->base(mi) : softmax_base_[mi]) - of.log2_v;
#pragma unroll
      for (int i = 0; i < kTileKv / 4; ++i) {
        const int mi = i / 2 % 2;
        float& p = s_[half * (kTileKv / 4) + i];
        p = ptx::exp2(kMasked ? p - base[mi] : fmaf(p, of.k, -base[mi]));
        sum[mi] = i < 4 && i % 2 == 0 ? p : sum[mi] + p;
      }
      const float unweighed = ptx::exp2(-of.log2_v);
#pragma unroll
      for (int mi = 0; mi < 2; ++mi)
        tile_sum_[mi] = half == 0 ? sum[mi] * unweighed : fmaf(sum[mi], unweighed, tile_sum_[mi]);
    }
  }

  // Sets the base of rows that had seen no key, and in a redone tile raises those of others.
  __device__ __forceinline__ void set_base() {
    const bool redo = work_tile().redo_online;
    float top[2];
    if constexpr (!kHasBlockDescales) row_max(top);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      if constexpr (kHasBlockDescales) top[mi] = row_max_of(mi);
      float raised;
      if constexpr (Config::kHasSoftcap) {
        const float tanh = tanh_of(top[mi], params_.softcap.input_scale * exponent_scale_);
        raised = fmaf(tanh, params_.softcap_log2, -kFirstPeak);
      } else if constexpr (kHasBlockDescales || Config::kHasAlibi) {
        raised = top[mi] - kFirstPeak;
      } else {
        raised = fmaf(top[mi], exponent_scale_, -kFirstPeak) * (1.0f / kScoreUnit);
      }
      const float before = softmax_base_[mi];
      bool moves = redo && raised > before;
      if constexpr (Config::kHasAlibi) {
        // A predicted base that is too high is lowered where what came before weighs little.
        float sum = row_sum_[mi] + __shfl_xor_sync(~0u, row_sum_[mi], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        moves |= raised < before && sum * ptx::exp2(before - raised) <= 1 << kFirstPeak;
      }
      if (before == -INFINITY) {
        softmax_base_[mi] = raised;
      } else if (moves) {
        softmax_base_[mi] = raised;
        scale_row(mi, ptx::exp2((before - raised) * kScoreUnit));
      }
    }
  }

  // The largest element of s_ in each row.
  __device__ __forceinline__ void row_max(float (&top)[2]) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) top[mi] = row_max_of(mi);
  }
  __device__ __forceinline__ float row_max_of(int mi) const {
    float top = s_[2 * mi];
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      if (i / 2 % 2 == mi) top = fmaxf(top, s_[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  // Multiplies the elements of each half of tile n by a factor made from its descales.
  template <class Factor>
  __device__ __forceinline__ void scale_halves(int32_t n, Factor factor) {
    if constexpr (kHasBlockDescales) {
      const HalfDescales* const halves = descales().halves(n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = factor(descales().load(halves + half));
#pragma unroll
        for (int i = 0; i < kTileKv / 4; ++i) s_[half * (kTileKv / 4) + i] *= x;
      }
    }
  }

  // Multiplies a row's sum, its O and its P V that is not yet promoted by a factor.
  __device__ __forceinline__ void scale_row(int mi, float factor) {
    row_sum_[mi] *= factor;
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) {
      if (i / 2 % 2 != mi) continue;
      o_[i] *= factor;
      if constexpr (!Config::kSerial) pv_[i] *= factor;
    }
  }

  // The sum of a row's P of this tile.
  __device__ __forceinline__ float sum_of_quad(int mi) const {
    const float sum = tile_sum_[mi] + __shfl_xor_sync(~0u, tile_sum_[mi], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

  // Multiplies a row's P, not yet packed, and lowers its base. Returns the factor.
  __device__ __forceinline__ float scale_p(int mi, float log2_factor) {
    const float factor = ptx::exp2(log2_factor);
    softmax_base_[mi] -= log2_factor * (1.0f / kScoreUnit);
    tile_sum_[mi] *= factor;
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      if (i / 2 % 2 == mi) s_[i] *= factor;
    }
    return factor;
  }

  // Raises a lone P in a row's first tile.
  __device__ __forceinline__ void raise_lone_p() {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      scale_p(mi, sum_of_quad(mi) < (kLoneShare << kFirstPeak) ? kLonePeak - kFirstPeak : 0);
    }
  }

  // Lowers P of rows with a sum above E4M3's largest number; a row's largest is then 2^peak, less
  // where many keys are nearly as large, so that their sum leaves room, too. kFirst: O is still 0.
  template <bool kFirst>
  __device__ __forceinline__ void lower_p(int32_t n) {
    float top[2];
    scale_halves(n, [](const HalfDescales& x) { return ptx::exp2(-x.log2_v); });
    row_max(top);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float sum = sum_of_quad(mi);
      if (!(sum > ptx::kMaxE4m3 && sum < INFINITY)) continue;
      int peak = sum < kLoneShare * top[mi] ? kLonePeak : kFirstPeak;
      peak -= (sum > kTileKv / 4 * top[mi]) + (sum > kTileKv / 2 * top[mi]);
      const float factor = scale_p(mi, peak - log2f(top[mi]));
      if (!kFirst) scale_row(mi, factor);
    }
    scale_halves(n, [](const HalfDescales& x) { return ptx::exp2(x.log2_v); });
  }

  __device__ __forceinline__ FwdFp8Descales<Config> descales() const {
    return FwdFp8Descales<Config>(*this);
  }

  // Loads the factors of a work tile.
  __device__ __forceinline__ void load_exponent_scale() {
    exponent_scale_ = Config::kHasAlibi ? Base::ScoreMod::scale(params_)
                                        : Base::ScoreMod::exponent_scale(params_);
    if constexpr (kHasBlockDescales) {
      descales().begin_work_tile();
    } else if constexpr (!kIsRuntime) {
      // With a factor of 0 hidden scores would be NaN.
      exponent_scale_ = fmaxf(exponent_scale_ * descales().of_scores(), FLT_MIN);
    }
    if (kIsRuntime && params_.problem.descale_block != 0) {
      const float largest = descales().largest_of_v();
      inverse_v_ = largest == 0.0f ? 0.0f : 1.0f / largest;
    }
  }

  float exponent_scale_;
  float inverse_v_;  // 1 / largest_of_v(), with descales by blocks
  float tile_sum_[2];
  float o_[kDimV / 2];
  float pv_[Config::kSerial ? 1 : kDimV / 2];  // P V of unpromoted_ tiles
};

}  // namespace flashattn::cuda::sm90
