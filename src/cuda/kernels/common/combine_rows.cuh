// Merges partial results over disjoint keys: lse = ln(sum of e^lse_p), o = sum of e^(lse_p - lse)
// o_p, with e^lse_p = sum_p e^base_p.
#pragma once

#include "cuda/device/vec4.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// Where the parts of one row lie, and where it goes.
struct MergeRow {
  int32_t parts, dim, dtype;
  void* o;
  float* lse;  // may be NULL
};

// Partial sums: of one row, by parts modulo kChains, which are then added in order. How many warps
// share them changes nothing.
constexpr int kChains = 4;

// The sum of the four warps' numbers, to all of them.
__device__ __forceinline__ void gather(float (&x)[4]) {
  __shared__ float shares[kChains][4][32];
  const int32_t lane = threadIdx.x % 32;
  __syncthreads();  // nobody reads what was here before
#pragma unroll
  for (int n = 0; n < 4; ++n) shares[threadIdx.x / 32][n][lane] = x[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    x[n] = shares[0][n][lane];
#pragma unroll
    for (int w = 1; w < kChains; ++w) x[n] += shares[w][n][lane];
  }
}

// kTeam warps, 1 or 4, merge one row and multiply it by `factor`; each has kLoads parts on their
// way. sum_of(p) gives a part's, and four_of(p, c) four of its columns. kVectors: as store_four
// wants the row. Short code: whoever decodes comes here once, and waits for every line of it.
template <int kTeam, int kLoads, bool kVectors, class SumOf, class FourOf>
__device__ __forceinline__ void merge_row(const MergeRow& row, SumOf sum_of, FourOf four_of,
                                          float factor) {
  static_assert(kTeam == 1 || kTeam == kChains, "a warp has all chains or one");
  constexpr int kOwn = kChains / kTeam, kBatch = kLoads * kTeam;
  const int32_t lane = threadIdx.x % 32, warp = kTeam == 1 ? 0 : threadIdx.x / 32;
  float4 four[kLoads];
  const auto load = [&](int32_t begin, int32_t column) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int32_t p = begin + n * kTeam + warp;
      four[n] = p < row.parts && column < row.dim ? four_of(p, column) : float4{};
    }
  };
  load(0, lane * 4);  // waits for no weight
  const auto lane_sum = [&](int32_t p) {
    return p < row.parts ? sum_of(p) : PartialSum{-INFINITY, 0.0f};
  };
  const PartialSum first = lane_sum(lane);
  float top = first.base;
#pragma unroll 1
  for (int32_t p = lane + 32; p < row.parts; p += 32) top = fmaxf(top, sum_of(p).base);
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float reference = top == -INFINITY ? 0.0f : top;
  const auto weight_of = [&](PartialSum x) {
    return x.sum * ptx::exp2((x.base - reference) * kLog2E);
  };
  float total = weight_of(first);
#pragma unroll 1
  for (int32_t p = lane + 32; p < row.parts; p += 32) total += weight_of(sum_of(p));
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  const float inverse = total == 0.0f ? 0.0f : factor * ptx::reciprocal(total);
#pragma unroll 1
  for (int32_t column = lane * 4; column - lane * 4 < row.dim; column += 128) {
    float sums[kOwn][4] = {}, weights = 0.0f;
#pragma unroll 1
    for (int32_t begin = 0; begin < row.parts; begin += kBatch) {
      if (begin > 0 || column >= 128) load(begin, column);
      if (begin % 32 == 0) weights = weight_of(lane_sum(begin + lane)) * inverse;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const float weight = __shfl_sync(~0u, weights, begin % 32 + n * kTeam + warp);
        if (weight == 0.0f) continue;  // such a part may never have been written
        float (&sum)[4] = sums[n % kOwn];
        sum[0] = fmaf(weight, four[n].x, sum[0]);
        sum[1] = fmaf(weight, four[n].y, sum[1]);
        sum[2] = fmaf(weight, four[n].z, sum[2]);
        sum[3] = fmaf(weight, four[n].w, sum[3]);
      }
    }
#pragma unroll
    for (int x = 1; x < kOwn; ++x) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[0][n] += sums[x][n];
    }
    if constexpr (kTeam > 1) gather(sums[0]);
    if (warp == 0 && column < row.dim) {
      switch (row.dtype) {
        case FLASHATTN_DTYPE_F16:
          store_four<kVectors>(static_cast<__half*>(row.o) + column, sums[0]);
          break;
        case FLASHATTN_DTYPE_BF16:
          store_four<kVectors>(static_cast<__nv_bfloat16*>(row.o) + column, sums[0]);
          break;
        default: store_four<kVectors>(static_cast<float*>(row.o) + column, sums[0]);
      }
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
