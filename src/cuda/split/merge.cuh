// Merges partial results over disjoint keys: lse = ln(sum of e^lse_p), o = sum of e^(lse_p - lse)
// o_p.
#pragma once

#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

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

// One warp merges one row and multiplies it by `factor`. lse_of(p) and o_of(p) give the parts: no
// load waits for that of another part.
template <class LseOf, class OOf>
__device__ __forceinline__ void merge_row(const MergeRow& row, LseOf lse_of, OOf o_of,
                                          float factor) {
  constexpr int kColumns = 4;  // a lane
  const int32_t lane = threadIdx.x % 32;
  float top = -INFINITY;
  for (int32_t p = lane; p < row.parts; p += 32) top = fmaxf(top, lse_of(p));
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float reference = top == -INFINITY ? 0.0f : top;
  const auto weight_of = [&](int32_t p) { return ptx::exp2((lse_of(p) - reference) * kLog2E); };
  float total = 0.0f;
  for (int32_t p = lane; p < row.parts; p += 32) total += weight_of(p);
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  const float inverse = total == 0.0f ? 0.0f : factor * ptx::reciprocal(total);
  for (int32_t first = lane; first - lane < row.dim; first += 32 * kColumns) {
    float x[kColumns] = {};
#pragma unroll 4
    for (int32_t p = 0; p < row.parts; ++p) {
      const float weight = weight_of(p) * inverse;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int32_t c = first + n * 32;
        // A part without weight may never have been written.
        const bool some = weight != 0.0f && c < row.dim;
        x[n] = fmaf(weight, some ? to_float(o_of(p)[c]) : 0.0f, x[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (first + n * 32 < row.dim) store_element(row.o, row.dtype, first + n * 32, x[n]);
    }
  }
  // The caller's lse may be that of a part: every lane has read it.
  __syncwarp();
  if (row.lse && lane == 0) *row.lse = total == 0.0f ? -INFINITY : reference + logf(total);
}

}  // namespace flashattn::cuda
