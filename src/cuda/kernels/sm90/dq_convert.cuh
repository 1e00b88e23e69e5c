// Conversion of fp32 accumulators of dQ to the problem's type, which the postprocess kernel
// (bwd_postprocess.cuh) and the backward kernel itself (dq_inline_postprocess.cuh) share.
#pragma once

#include "cuda/device/packed_pair.cuh"

namespace flashattn::cuda::sm90 {

template <class T>
__device__ __forceinline__ PackedPair<T> convert_dq(float2 dq, float scale) {
  return PackedPair<T>::of(dq.x * scale, dq.y * scale);
}

// Four neighbouring accumulators of a lane: two columns of a row, and of the row 8 below.
template <class T>
struct DqQuad {
  __device__ __forceinline__ DqQuad(const float4& dq, float scale)
      : upper(convert_dq<T>({dq.x, dq.y}, scale)), lower(convert_dq<T>({dq.z, dq.w}, scale)) {}

  PackedPair<T> upper, lower;
};

}  // namespace flashattn::cuda::sm90
