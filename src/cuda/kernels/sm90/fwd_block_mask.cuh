// Block mask of the Hopper forward pass: the KV tiles of a work tile in which it leaves a visible
// key.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/work_tile.cuh"
#include "cuda/device/block_mask.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
using KvTiles =
    typename std::conditional<Config::ScoreMod::template kHas<BlockMask>,
                              BlockSparseTiles<ForwardParams, Config::kTileQ, Config::kTileKv>,
                              DenseTiles>::type;

}  // namespace flashattn::cuda::sm90
