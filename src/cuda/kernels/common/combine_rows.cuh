// Combines partial results over disjoint keys: lse = ln(sum of e^lse_p), o = sum of e^(lse_p - lse)
// o_p, where e^lse_p = sum_p e^base_p.
#pragma once

#include "cuda/device/score_mod.cuh"
#include "cuda/device/vec4.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// One row to combine: the number of its parts, and where its results go. Columns are taken in
// slices of 128: slices first_slice, first_slice + slice_step and so on are this CTA's.
struct CombineRow {
  int32_t parts, dim, dtype;
  void* o;
  float* lse;  // may be NULL; the CTA of slice 0 writes it
  int32_t first_slice, slice_step;
};

// A row is summed in kChains chains, by part modulo kChains, whose sums are then added in order. So
// the bits do not depend on the number of warps.
constexpr int kChains = 4;

// Sums x over the four warps of the CTA; all receive the result.
__device__ __forceinline__ void sum_warps(float (&x)[4]) {
  __shared__ float partials[kChains][4][32];
  const int32_t lane = threadIdx.x % 32;
  __syncthreads();  // all warps have read the last values
#pragma unroll
  for (int n = 0; n < 4; ++n) partials[threadIdx.x / 32][n][lane] = x[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    x[n] = partials[0][n][lane];
#pragma unroll
    for (int w = 1; w < kChains; ++w) x[n] += partials[w][n][lane];
  }
}

// kWarpsPerRow warps, 1 or 4, combine a row and multiply it by `factor`; each has kLoads parts in
// flight. load_sum(p) returns the sum of part p, load_o(p, c) four columns of its O. kAligned: as
// for store_vec4(). The code is short because decoding runs it once, and waits for every line of it
// to be fetched.
template <int kWarpsPerRow, int kLoads, bool kAligned, class LoadSum, class LoadO>
__device__ __forceinline__ void combine_row(const CombineRow& row, LoadSum load_sum, LoadO load_o,
                                            float factor) {
  static_assert(kWarpsPerRow == 1 || kWarpsPerRow == kChains, "a warp has all chains or one");
  constexpr int kOwnChains = kChains / kWarpsPerRow, kBatch = kLoads * kWarpsPerRow;
  const int32_t lane = threadIdx.x % 32, warp = kWarpsPerRow == 1 ? 0 : threadIdx.x / 32;
  const int32_t first_column = row.first_slice * 128 + lane * 4;
  float4 partial_o[kLoads];
  const auto load = [&](int32_t begin, int32_t column) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int32_t p = begin + n * kWarpsPerRow + warp;
      partial_o[n] = p < row.parts && column < row.dim ? load_o(p, column) : float4{};
    }
  };
  load(0, first_column);  // in flight while weights are computed
  const auto lane_sum = [&](int32_t p) {
    return p < row.parts ? load_sum(p) : PartialSum{-INFINITY, 0.0f};
  };
  const PartialSum first = lane_sum(lane);
  float base_max = first.base;
#pragma unroll 1
  for (int32_t p = lane + 32; p < row.parts; p += 32) base_max = fmaxf(base_max, load_sum(p).base);
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) base_max = fmaxf(base_max, __shfl_xor_sync(~0u, base_max, d));
  const float base = base_max == -INFINITY ? 0.0f : base_max;
  const auto weight_of = [&](PartialSum x) { return x.sum * ptx::exp2((x.base - base) * kLog2E); };
  float total = weight_of(first);
#pragma unroll 1
  for (int32_t p = lane + 32; p < row.parts; p += 32) total += weight_of(load_sum(p));
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  const float inverse = total == 0.0f ? 0.0f : factor * ptx::reciprocal(total);
#pragma unroll 1
  for (int32_t column = first_column; column - lane * 4 < row.dim; column += row.slice_step * 128) {
    float sums[kOwnChains][4] = {}, weights = 0.0f;
#pragma unroll 1
    for (int32_t begin = 0; begin < row.parts; begin += kBatch) {
      if (begin > 0 || column > first_column) load(begin, column);
      if (begin % 32 == 0) weights = weight_of(lane_sum(begin + lane)) * inverse;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const float weight = __shfl_sync(~0u, weights, begin % 32 + n * kWarpsPerRow + warp);
        if (weight == 0.0f) continue;  // a part without keys may not have been written
        float (&sum)[4] = sums[n % kOwnChains];
        sum[0] = fmaf(weight, partial_o[n].x, sum[0]);
        sum[1] = fmaf(weight, partial_o[n].y, sum[1]);
        sum[2] = fmaf(weight, partial_o[n].z, sum[2]);
        sum[3] = fmaf(weight, partial_o[n].w, sum[3]);
      }
    }
#pragma unroll
    for (int x = 1; x < kOwnChains; ++x) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[0][n] += sums[x][n];
    }
    if constexpr (kWarpsPerRow > 1) sum_warps(sums[0]);
    if (warp == 0 && column < row.dim) {
      switch (row.dtype) {
        case FLASHATTN_DTYPE_F16:
          store_vec4<kAligned>(static_cast<__half*>(row.o) + column, sums[0]);
          break;
        case FLASHATTN_DTYPE_BF16:
          store_vec4<kAligned>(static_cast<__nv_bfloat16*>(row.o) + column, sums[0]);
          break;
        default: store_vec4<kAligned>(static_cast<float*>(row.o) + column, sums[0]);
      }
    }
  }
  // row.lse may be the lse of a part, which all lanes must have read.
  if constexpr (kWarpsPerRow > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  if (row.lse && warp == 0 && lane == 0 && row.first_slice == 0) {
    *row.lse = total == 0.0f ? -INFINITY : base + logf(total);
  }
}

}  // namespace flashattn::cuda
