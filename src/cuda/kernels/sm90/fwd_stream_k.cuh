// Stream-K in the Hopper forward pass: where the last wave of Q tiles would leave multiprocessors
// idle, its tiles are split along their keys. The combine kernel adds up their partial results.
#pragma once

#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

// Plans a work tile as plan_work_tile() does. work_idx: twice the number of a work item, plus 1 for
// its second partial.
template <class Config>
__device__ __forceinline__ bool plan_stream_k_tile(const ForwardParams& params, int32_t work_idx,
                                                   bool redo,
                                                   WorkTile<Config::kConsumers>& work_tile,
                                                   SplitTile& split_tile) {
  const StreamK& stream_k = params.stream_k;
  const bool is_split = stream_k.splits(work_idx / 2);
  int32_t linear_idx = work_idx / 2, split_idx = 0, partial_idx = 0;
  Interval keys{0, INT32_MAX};
  if (is_split) {
    const StreamK::Partial partial = stream_k.partial(work_idx / 2, work_idx & 1);
    linear_idx = partial.tile;
    split_idx = partial.index - partial.first;
    partial_idx = partial.index;
    keys = {partial.begin * Config::kTileKv, partial.end * Config::kTileKv};
  }
  if (threadIdx.x % 32 == 0) {
    split_tile.split_idx = split_idx;
    split_tile.is_split = is_split;
    split_tile.partial = partial_idx;
    split_tile.keys = keys;
  }
  return plan_work_tile<Config>(params, work_idx, linear_idx, keys, redo, work_tile);
}

}  // namespace flashattn::cuda::sm90
