// The online softmax of a warp of the portable decode kernel.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
struct DecodeSoftmax {
  static constexpr int kMmaM = Config::kMmaM;
  using ScoreFragment = float[kMmaM][Config::kWarpKv / 8][4];

  // Row maxima in units of kWideUnit log2(e); row sums over this lane's columns.
  float m_[kMmaM][2], l_[kMmaM][2];
  float o_[kMmaM][Config::kWarpDimV / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        m_[mma_m][half] = -INFINITY;
        l_[mma_m][half] = 0.0f;
      }
#pragma unroll
      for (auto& columns : o_[mma_m]) {
#pragma unroll
        for (float& x : columns) x = 0.0f;
      }
    }
  }

  // Turns S into P times 2^shift, updates the running maxima and sums, and rescales O. wide: the
  // factor of S in units of kWideUnit log2(e).
  __device__ __forceinline__ void update(ScoreFragment& s, float wide, float shift) {
    float factor = wide * kWideUnit, maxima[kMmaM * 2], offsets[kMmaM * 2];
    bool steady = true;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int half = x % 2;
      float row_max = -INFINITY;
#pragma unroll
      for (const auto& y : s[x / 2]) row_max = fmaxf(row_max, fmaxf(y[half * 2], y[half * 2 + 1]));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
      const float old_max = m_[x / 2][half], m = fmaxf(old_max, row_max * wide);
      steady = steady && m == old_max && fabsf(m) <= kLargeScore / kWideUnit;
      maxima[x] = m;
      offsets[x] = m * kWideUnit - shift;
    }
    // After the first tiles, maxima rarely increase.
    if (!__all_sync(~0u, steady)) raise_maxima(s, maxima, wide, shift, factor, offsets);
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      float total = 0.0f;
#pragma unroll
      for (auto& y : s[x / 2]) {
#pragma unroll
        for (int e = x % 2 * 2; e < x % 2 * 2 + 2; ++e) {
          y[e] = ptx::exp2(fmaf(y[e], factor, -offsets[x]));
          total += y[e];
        }
      }
      l_[x / 2][x % 2] += total;
    }
  }

  // Sets the running maxima, rescales sums and O, and, if a maximum is large, subtracts the maxima
  // from S. factor, offsets: of S in the exponents of P.
  __device__ __forceinline__ void raise_maxima(ScoreFragment& s, const float (&maxima)[kMmaM * 2],
                                               float wide, float shift, float& factor,
                                               float (&offsets)[kMmaM * 2]) {
    bool is_large = false;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      float& row_max = m_[x / 2][x % 2];
      // A row that has seen no key has P = 0, not NaN.
      const float base = maxima[x] == -INFINITY ? 0.0f : maxima[x];
      const float rescale = ptx::exp2((row_max - base) * kWideUnit);
      is_large = is_large || fabsf(base) > kLargeScore / kWideUnit;
      row_max = maxima[x];
      l_[x / 2][x % 2] *= rescale;
      offsets[x] = base * kWideUnit - shift;
#pragma unroll
      for (auto& columns : o_[x / 2]) {
        columns[x % 2 * 2] *= rescale;
        columns[x % 2 * 2 + 1] *= rescale;
      }
    }
    if (!__any_sync(~0u, is_large)) return;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const float base = maxima[x] == -INFINITY ? 0.0f : maxima[x];
#pragma unroll
      for (auto& y : s[x / 2]) {
#pragma unroll
        for (int e = x % 2 * 2; e < x % 2 * 2 + 2; ++e) {
          y[e] = __fsub_rn(__fmul_rn(y[e], wide), base);
        }
      }
      offsets[x] = -shift;
    }
    factor = kWideUnit;
  }
};

}  // namespace flashattn::cuda::sm80
