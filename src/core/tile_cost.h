// What the tiles of a forward pass cost, to choose between kernels by: pure, tested without a GPU.
#pragma once

#include "core/geometry.h"

namespace flashattn {

// Of a kernel, per row of a tile: what a key costs, and what the tile's start and end cost. Only
// ratios between kernels for the same heads matter: 100 is a key in the one for long sequences.
struct TileCost {
  int32_t rows, keys;  // of a tile
  int32_t per_key, start;
};

// Of the Hopper kernels, fitted to what they take on an H200 for 64 to 16k queries. blocks: on a
// multiprocessor.
constexpr TileCost hopper_cost(int32_t rows, int32_t keys, int32_t dim_v, int32_t blocks) {
  if (blocks > 1) {
    return dim_v == 64 ? TileCost{rows, keys, 111, 18500} : TileCost{rows, keys, 150, 42500};
  }
  return {rows, keys, keys > 128 ? 98 : 100, dim_v == 64 ? 12000 : 22500};
}

// Time until the last of `heads` (of all sequences) is done, where blocks on a multiprocessor share
// it: as many tiles one after the other as the busiest one has.
constexpr int64_t forward_time(const TileCost& cost, bool causal, Lengths len, int64_t heads,
                               int32_t units) {
  const int64_t tiles = heads * ceil_div(len.q, cost.rows);
  // Keys of a tile: whole tiles of keys, under a causal mask half of one too many in the mean.
  int64_t keys = ceil_div(len.kv, cost.keys) * static_cast<int64_t>(cost.keys);
  if (causal) {
    const int64_t hidden = len.q < len.kv ? len.q : len.kv;  // below the first query's last key
    keys = len.kv - hidden / 2 + (cost.rows + cost.keys) / 2;
  }
  return ceil_div(tiles, units) * cost.rows * (keys * cost.per_key + cost.start);
}

}  // namespace flashattn
