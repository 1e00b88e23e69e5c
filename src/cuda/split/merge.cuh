// Merges partial results over disjoint keys: lse = ln(sum of e^lse_p), o = sum of e^(lse_p - lse)
// o_p.
#pragma once

#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda {

__device__ __forceinline__ float load_element(const void* p, int32_t dtype, int64_t i) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return __half2float(static_cast<const __half*>(p)[i]);
    case FLASHATTN_DTYPE_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}

__device__ __forceinline__ void store_element(void* p, int32_t dtype, int64_t i, float x) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: static_cast<__half*>(p)[i] = __float2half_rn(x); break;
    case FLASHATTN_DTYPE_BF16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x); break;
    default: static_cast<float*>(p)[i] = x;
  }
}

// Where the parts of one row lie, and where it goes.
struct MergeRow {
  int32_t parts, dim, part_dtype, dtype;
  void* o;
  float* lse;  // may be NULL
};

// One warp merges one row and multiplies it by `factor`. lse_of(p) and o_of(p) give the parts.
template <class LseOf, class OOf>
__device__ __forceinline__ void merge_row(const MergeRow& row, LseOf lse_of, OOf o_of,
                                          float factor) {
  float top = -INFINITY;
  for (int32_t p = 0; p < row.parts; ++p) top = fmaxf(top, lse_of(p));
  const float reference = top == -INFINITY ? 0.0f : top;
  float total = 0.0f;
  for (int32_t p = 0; p < row.parts; ++p) total += ptx::exp2((lse_of(p) - reference) * kLog2E);
  const float inverse = total == 0.0f ? 0.0f : factor / total;
  for (int32_t c = threadIdx.x % 32; c < row.dim; c += 32) {
    float x = 0.0f;
    for (int32_t p = 0; p < row.parts; ++p) {
      const float weight = ptx::exp2((lse_of(p) - reference) * kLog2E) * inverse;
      if (weight != 0.0f) x = fmaf(weight, load_element(o_of(p), row.part_dtype, c), x);
    }
    store_element(row.o, row.dtype, c, x);
  }
  // The caller's lse may be that of a part: every lane has read it.
  __syncwarp();
  if (row.lse && threadIdx.x % 32 == 0) {
    *row.lse = total == 0.0f ? -INFINITY : reference + logf(total);
  }
}

}  // namespace flashattn::cuda
