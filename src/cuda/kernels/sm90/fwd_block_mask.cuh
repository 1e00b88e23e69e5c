// Block mask of the Hopper forward pass: the KV tiles of a work tile in which it leaves a visible
// key. The scheduler finds the first and the last, the producers those between them, and the
// producer of K tells consumers which tile is in a stage.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/work_tile.cuh"
#include "cuda/device/block_mask.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
constexpr bool kMayHideTiles = Config::ScoreMod::template kHas<BlockMask>;

// For producers and the scheduler.
template <class Config>
using KvTiles =
    typename std::conditional<kMayHideTiles<Config>,
                              BlockSparseTiles<ForwardParams, Config::kTileQ, Config::kTileKv>,
                              DenseTiles>::type;

// The base of a kernel's shared memory. Empty without a block mask: other kernels keep their
// addresses.
template <bool kMayHideTiles, int kStages, int kWorkStages>
struct VisibleTiles {};
template <int kStages, int kWorkStages>
struct VisibleTiles<true, kStages, kWorkStages> {
  KvTileWindow last_windows[kWorkStages];  // of each planned work tile: around its last KV tile
  int32_t stage_tiles[kStages];  // of each stage of K: 2 n, plus 1 if the block mask hides nothing
};

}  // namespace flashattn::cuda::sm90
