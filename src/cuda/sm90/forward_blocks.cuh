// Which tiles of keys a block mask leaves of an item.
#pragma once

#include <type_traits>

#include "cuda/sm90/work.cuh"
#include "cuda/tile/blocks.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
using Tiles = typename std::conditional<Config::kScores == Scores::kAny,
                                        BlockTiles<ForwardParams, Config::kTileQ, Config::kTileKv>,
                                        AllTiles>::type;

}  // namespace flashattn::cuda::sm90
