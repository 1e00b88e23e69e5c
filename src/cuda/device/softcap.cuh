// Softcap: a score is softcap * tanh(product * scale / softcap).
#pragma once

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/fragment.cuh"
#include "cuda/device/score_stage.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// tanh, where it is near 0: minimax, relative error 4e-7.
constexpr float kTanhIsNear0 = 0.45f;
__device__ __forceinline__ float tanh_near_0(float x) {
  const float square = x * x;
  const float p = fmaf(fmaf(-0.0463218936f, square, 0.132466498f), square, -0.3333048452f);
  return x * fmaf(p, square, 1.0f);
}

// tanh(x * inner) * outer, with tanh(x) as 1 - 2 / (e^2x + 1): an absolute error of 3e-7, which is
// enough where some score of the warp is far from 0.
__device__ __forceinline__ float scaled_tanh(float x, float inner, float outer = 1.0f) {
  const float e = ptx::exp2(x * (inner * (2.0f * kLog2E)));
  return fmaf(-2.0f * outer, ptx::reciprocal(e + 1.0f), outer);
}

// The largest magnitude of the numbers; NaN is ignored.
template <int kCount>
__device__ __forceinline__ float max_abs(const float (&x)[kCount]) {
  float largest[8];  // independent chains hide latency
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest[i % 8] = i < 8 ? fabsf(x[i]) : fmaxf(largest[i % 8], fabsf(x[i]));
  }
#pragma unroll
  for (int n = 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) largest[i] = fmaxf(largest[i], largest[i + n]);
  }
  return largest[0];
}

struct Softcap {
  static constexpr ScoreStage kStage = ScoreStage::kProduct;
  static constexpr bool kBoundsGrowth = true, kReadsMemory = false;
  static __device__ __forceinline__ bool is_on(const Problem& problem) {
    return problem.softcap != 0;
  }
  static __device__ __forceinline__ float factor(const Problem& problem) { return problem.softcap; }

  float inner;  // scale / softcap
  float outer;  // the softcap, in the units of the scores

  // Whether tanh_near_0 serves for all products of the warp: most often, and at half the cost.
  template <int kCount>
  __device__ __forceinline__ bool all_near_0(const float (&s)[kCount]) const {
    return __all_sync(~0u, !(max_abs(s) * fabsf(inner) >= kTanhIsNear0));
  }

  // Turns products into tanh, which is still to be multiplied by `outer`.
  template <int kCount>
  __device__ __forceinline__ void forward(float (&s)[kCount], bool near_0) const {
    if (near_0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = tanh_near_0(s[i] * inner);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = scaled_tanh(s[i], inner);
    }
  }

  template <class Layout, int kCount>
  __device__ __forceinline__ float forward(Layout, float (&s)[kCount], float) const {
    forward(s, all_near_0(s));
    return outer;
  }

  // The derivative of a score by product * scale.
  static __device__ __forceinline__ float derivative_at(float tanh) {
    return fmaf(-tanh, tanh, 1.0f);
  }
};

// Softcap where the caller knows whether tanh_near_0 serves for all products.
struct RangedSoftcap {
  Softcap softcap;
  bool near_0;

  // Turns products into tanh, and multiplies the derivative of the score with respect to product *
  // scale by the softcap's.
  template <int kCount>
  __device__ __forceinline__ void forward_with_derivative(float (&s)[kCount],
                                                          float (&derivative)[kCount]) const {
    softcap.forward(s, near_0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) derivative[i] *= Softcap::derivative_at(s[i]);
  }
};

// Softcap to the last digits of fp32.
struct ExactSoftcap : Softcap {
  template <class Layout, int kCount>
  __device__ __forceinline__ float forward(Layout, float (&s)[kCount], float) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = tanhf(s[i] * inner);
    return outer;
  }
};

// A softcapped score in units of log2(e), by the host's polynomial of degree 3 in a product; plus
// an addend.
__device__ __forceinline__ float softcap_cubic(const SoftcapPolynomials& fit, float x,
                                               float addend) {
  return fmaf(x, fmaf(fit.poly3[1], x * x, fit.poly3[0]), addend);
}
// The factor from a product to that score, by the polynomial of degree 5. square: the product's.
__device__ __forceinline__ float softcap_quintic_factor(const float (&poly5)[3], float square) {
  return fmaf(fmaf(poly5[2], square, poly5[1]), square, poly5[0]);
}

// The softcap by polynomials that the host has fitted: both scales are part of them.
struct FittedSoftcap {
  const SoftcapPolynomials& fit;
  float outer;      // the softcap, in units of `unit` log2(e)
  float unit;       // scores are in units of `unit` log2(e)
  float remaining;  // factor still to be applied to scores

  // By the polynomial of degree 5 if its range suffices for the whole warp.
  template <class Layout, int kCount>
  __device__ __forceinline__ float forward(Layout, float (&s)[kCount], float) const {
    if (__all_sync(~0u, !(max_abs(s) >= fit.poly5_limit))) {
      const float factor[3] = {fit.poly5[0] / unit, fit.poly5[1] / unit, fit.poly5[2] / unit};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] *= softcap_quintic_factor(factor, s[i] * s[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = scaled_tanh(s[i], fit.input_scale, outer);
    }
    return remaining;
  }

  // Whether the polynomial of degree 3, in units of log2(e), serves for all products of the warp.
  template <int kCount>
  __device__ __forceinline__ bool cubic_serves(const float (&s)[kCount]) const {
    return __all_sync(~0u, !(max_abs(s) >= fit.poly3_limit));
  }
  // The polynomial of degree 3, plus an addend.
  __device__ __forceinline__ float cubic(float x, float addend) const {
    return softcap_cubic(fit, x, addend);
  }
};

}  // namespace flashattn::cuda
