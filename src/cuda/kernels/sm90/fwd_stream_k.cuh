// Stream-K in the Hopper forward pass: where the last wave of Q tiles would leave multiprocessors
// idle, its tiles are split along their keys. The CTA that ends last adds up a tile's parts.
#pragma once

#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

// Whether a work tile is part of a tile that is split, and which. work_idx: twice the number of a
// work item, plus 1 for its second partial.
__device__ __forceinline__ bool is_split(const ForwardParams& params, int32_t work_idx) {
  return params.stream_k.splits(work_idx / 2);
}
__device__ __forceinline__ StreamK::Partial partial_of(const ForwardParams& params,
                                                       int32_t work_idx) {
  return params.stream_k.partial(work_idx / 2, work_idx & 1);
}

// Called once the part of this work tile is stored, by one thread of a CTA. Whether all others of
// the tile are; the next launch, which may have the same stamp, finds no part stored.
__device__ __forceinline__ bool is_last_part(const ForwardParams& params, int32_t work_idx) {
  const StreamK::Partial part = partial_of(params, work_idx);
  uint64_t* const done = params.parts_done + part.split_tile;
  if (ptx::count_arrival(done, params.stamp) < part.count - 1) return false;
  ptx::store_relaxed(done, uint64_t{0});
  return true;
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
