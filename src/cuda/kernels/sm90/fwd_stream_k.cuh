// Stream-K in the Hopper forward pass: where the last wave of Q tiles would leave multiprocessors
// idle, its tiles are split along their keys. The combine kernel adds up their partial results.
#pragma once

#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

// is_split(): whether a work tile is a partial of a split Q tile. partial_of(): which partial.
// work_idx: twice the index of a work item, plus 1 for its second partial.
__device__ __forceinline__ bool is_split(const ForwardParams& params, int32_t work_idx) {
  return params.stream_k.splits(work_idx / 2);
}
__device__ __forceinline__ StreamK::Partial partial_of(const ForwardParams& params,
                                                       int32_t work_idx) {
  return params.stream_k.partial(work_idx / 2, work_idx & 1);
}

// Plans a work tile as plan_work_tile() does.
template <class Config>
__device__ __forceinline__ bool plan_stream_k_tile(const ForwardParams& params, int32_t work_idx,
                                                   bool redo,
                                                   WorkTile<Config::kConsumers>& work_tile) {
  if (threadIdx.x % 32 == 0) work_tile.is_partial = is_split(params, work_idx);
  int32_t linear_idx = work_idx / 2;
  Interval keys{0, INT32_MAX};
  if (is_split(params, work_idx)) {
    const StreamK::Partial partial = partial_of(params, work_idx);
    linear_idx = partial.tile;
    keys = {partial.begin * Config::kTileKv, partial.end * Config::kTileKv};
  }
  return plan_work_tile<Config>(params, work_idx, linear_idx, keys, redo, work_tile);
}

}  // namespace flashattn::cuda::sm90
