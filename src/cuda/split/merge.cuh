// Merges partial results over disjoint keys: lse = ln(sum of e^lse_p), o = sum of e^(lse_p - lse)
// o_p.
#pragma once

#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda {

__device__ __forceinline__ void store_element(void* p, int32_t dtype, int64_t i, float x) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: static_cast<__half*>(p)[i] = __float2half_rn(x); break;
    case FLASHATTN_DTYPE_BF16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x); break;
    default: static_cast<float*>(p)[i] = x;
  }
}

// Where the parts of one row lie, and where it goes.
struct MergeRow {
  int32_t parts, dim, dtype;
  void* o;
  float* lse;  // may be NULL
};

// The sum over a block's kTeam warps, to all of them.
template <int kTeam, int kColumns>
__device__ __forceinline__ void gather(float (&x)[kColumns]) {
  __shared__ float shares[kTeam][kColumns][32];
  const int32_t lane = threadIdx.x % 32;
  __syncthreads();  // nobody reads what was here before
#pragma unroll
  for (int n = 0; n < kColumns; ++n) shares[threadIdx.x / 32][n][lane] = x[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    x[n] = 0.0f;
#pragma unroll
    for (int w = 0; w < kTeam; ++w) x[n] += shares[w][n][lane];
  }
}

// kTeam warps merge one row and multiply it by `factor`. lse_of(p) and o_of(p) give the parts: no
// load waits for that of another part.
template <int kTeam, class LseOf, class OOf>
__device__ __forceinline__ void merge_row(const MergeRow& row, LseOf lse_of, OOf o_of,
                                          float factor) {
  constexpr int kColumns = 4;  // a lane
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kTeam;
  float top = -INFINITY;
  for (int32_t p = lane; p < row.parts; p += 32) top = fmaxf(top, lse_of(p));
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float reference = top == -INFINITY ? 0.0f : top;
  const auto weight_of = [&](int32_t p) { return ptx::exp2((lse_of(p) - reference) * kLog2E); };
  float total = 0.0f;
  for (int32_t p = lane; p < row.parts; p += 32) total += weight_of(p);
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  const float inverse = total == 0.0f ? 0.0f : factor * ptx::reciprocal(total);
  for (int32_t first = 0; first < row.dim; first += 32 * kColumns) {
    float x[kColumns] = {};
#pragma unroll 4
    for (int32_t p = warp; p < row.parts; p += kTeam) {
      const float weight = weight_of(p) * inverse;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int32_t c = first + n * 32 + lane;
        // A part without weight may never have been written.
        const bool some = weight != 0.0f && c < row.dim;
        x[n] = fmaf(weight, some ? to_float(o_of(p)[c]) : 0.0f, x[n]);
      }
    }
    if constexpr (kTeam > 1) gather<kTeam>(x);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int32_t c = first + n * 32 + lane;
      if (n % kTeam == warp && c < row.dim) store_element(row.o, row.dtype, c, x[n]);
    }
  }
  // The caller's lse may be that of a part: every lane has read it.
  if constexpr (kTeam > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  if (row.lse && warp == 0 && lane == 0) {
    *row.lse = total == 0.0f ? -INFINITY : reference + logf(total);
  }
}

}  // namespace flashattn::cuda
