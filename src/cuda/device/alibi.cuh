// ALiBi: -slope * |position of the query - key|, added to a score.
#pragma once

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/fragment.cuh"
#include "cuda/device/score_stage.cuh"

namespace flashattn::cuda {

struct Alibi {
  static constexpr ScoreStage kStage = ScoreStage::kBias;
  static constexpr bool kBoundsGrowth = true, kReadsMemory = false;
  static __device__ __forceinline__ bool is_on(const Problem& problem) {
    return problem.bias & FLASHATTN_BIAS_ALIBI;
  }
  // The slope of a head; 0: there is no ALiBi.
  static __device__ __forceinline__ float slope_of(const Problem& problem, const Inputs& in,
                                                   int32_t b, int32_t h) {
    if (!is_on(problem)) return 0.0f;
    return in.alibi_slopes[b * in.alibi_stride_batch + h * in.alibi_stride_head];
  }

  float slope;     // in the units of the scores
  float distance;  // from the lane's first key to its first query's position; exact below 2^24

  // Signed distance of an element.
  template <class Layout>
  __device__ __forceinline__ float away(Layout layout, int x) const {
    return distance + static_cast<float>(layout.query(x) - layout.key(x));
  }
  // Returns `score` plus the bias of an element.
  template <class Layout>
  __device__ __forceinline__ float add_to(float score, Layout layout, int x) const {
    return fmaf(-slope, fabsf(away(layout, x)), score);
  }

  // Multiplies scores by factor, which they still lack, and adds the bias. Returns the factor that
  // is then still to be applied: 1.
  template <class Layout, int kCount>
  __device__ __forceinline__ float forward(Layout layout, float (&s)[kCount], float factor) const {
#pragma unroll
    for (int x = 0; x < Layout::count(kCount); ++x) {
      float& score = s[layout.element(x)];
      score = fmaf(score, factor, -slope * fabsf(away(layout, x)));
    }
    return 1.0f;
  }

  // Adds the bias to scores to which the factor has been applied.
  template <class Layout, int kCount>
  __device__ __forceinline__ void add(Layout layout, float (&s)[kCount]) const {
#pragma unroll
    for (int x = 0; x < Layout::count(kCount); ++x) {
      float& score = s[layout.element(x)];
      score = add_to(score, layout, x);
    }
  }
};

// ALiBi with the slope multiplied into the distance: elements of one diagonal share a bias.
struct ScaledAlibi {
  float slope, first;  // Alibi's slope, and its distance times the slope

  // The distance of an element, times the slope.
  template <class Layout>
  __device__ __forceinline__ float away(Layout layout, int x) const {
    return fabsf(fmaf(slope, static_cast<float>(layout.query(x) - layout.key(x)), first));
  }
};

// ALiBi of a fragment of S where all keys lie on one side of all queries: rise * key + first[row].
struct LinearAlibi {
  float rise, first[2];

  static __device__ __forceinline__ LinearAlibi of(const Alibi& alibi, bool keys_before) {
    const float rise = keys_before ? alibi.slope : -alibi.slope;
    return {rise, {-rise * alibi.distance, -rise * (alibi.distance + 8.0f)}};
  }
  __device__ __forceinline__ LinearAlibi plus(const float (&addend)[2]) const {
    return {rise, {first[0] + addend[0], first[1] + addend[1]}};
  }
  __device__ __forceinline__ float at(int i) const {
    return fmaf(rise, static_cast<float>(SLayout::key(i)), first[SLayout::query(i) / 8]);
  }
};

}  // namespace flashattn::cuda
