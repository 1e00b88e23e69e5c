// What the tiles of a forward pass cost, to choose between kernels by: pure, tested without a GPU.
#pragma once

#include "cuda/host/schedule/warpgroup_rows.h"

namespace flashattn {

// Of a kernel, per row of a tile: what a key costs, and what the tile's start and end cost. Only
// ratios between kernels for the same heads matter: 100 is a key in the one for long sequences.
struct TileCost {
  int32_t rows, keys;  // of a tile
  int32_t per_key, start;
  int32_t blocks = 1;  // that share a multiprocessor
};

// Of the Hopper kernels, fitted to what they take on an H100 for 64 to 16k queries and 4 to 32,768
// heads.
constexpr TileCost hopper_cost(int32_t rows, int32_t keys, int32_t dim_v, int32_t blocks) {
  if (blocks > 1) return {rows, keys, dim_v == 64 ? 118 : 140, dim_v == 64 ? 20000 : 19000, blocks};
  if (rows == 128) return {rows, keys, 97, 26500};
  return {rows, keys, dim_v == 96 && keys == 64 ? 103 : 100, 7800 + 48 * keys};
}

// Time of a sequence's tiles beside that of as many full ones.
constexpr double strips_time(const TileCost& cost, int32_t queries) {
  constexpr double kLacking = 0.12;  // less than a full tile takes one that lacks a strip: fitted
  const int32_t most = cost.rows / kWarpgroupRows;
  const int32_t strips = static_cast<int32_t>(ceil_div(queries, kWarpgroupRows));
  const int32_t lacking = missing_warpgroups(strips, most), tiles = (strips + lacking) / most;
  return tiles == 0 ? 1 : 1 - kLacking * (lacking < tiles ? lacking : tiles) / tiles;
}

// Keys that a query sees at most.
constexpr int64_t most_keys(const MaskRule& rule, int32_t keys) {
  int64_t left = keys, right = keys, most = keys;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_left >= 0) left = rule.window_left;
    if (rule.window_right >= 0) right = rule.window_right;
  }
  if (rule.mask & FLASHATTN_MASK_CAUSAL) right = 0;
  if (left + 1 + right < most) most = left + 1 + right;
  if ((rule.mask & FLASHATTN_MASK_CHUNK) && rule.chunk < most) most = rule.chunk;
  return most;
}

// Of a tile of which each row sees so many keys, in whole tiles of these, of which warpgroups of 64
// rows skip some; of sequences with at most so many.
constexpr double tile_time(const TileCost& cost, const MaskRule& rule, int32_t longest,
                           int64_t keys) {
  // Of a tile whose rows, one after the other, see the most.
  const int64_t span = most_keys(rule, longest) + (3 * cost.rows + 64) / 4 + cost.keys - 2;
  return static_cast<double>(cost.rows * ((keys < span ? keys : span) * cost.per_key + cost.start));
}

// Time until the last of `heads` (of all sequences) is done, where blocks on a multiprocessor share
// it: as many tiles one after the other as the busiest one has.
constexpr double forward_time(const TileCost& cost, const MaskRule& rule, Lengths len,
                              int64_t heads, int32_t units) {
  const auto time = [&cost, &rule, len](int64_t keys) {
    return tile_time(cost, rule, len.kv, keys);
  };
  const int64_t tiles = heads * ceil_div(len.q, cost.rows);
  const double share = strips_time(cost, len.q);
  const double longest = time(ceil_div(len.kv, cost.keys) * static_cast<int64_t>(cost.keys));
  if (!(rule.mask & FLASHATTN_MASK_CAUSAL)) {
    return static_cast<double>(ceil_div(tiles, units)) * longest * share;
  }
  // Half a tile too many of keys in the mean. Long tiles come first, so that short ones level out.
  const int64_t hidden = len.q < len.kv ? len.q : len.kv;  // below the first query's last key
  const double mean = time(len.kv - hidden / 2 + (cost.rows + cost.keys) / 2) * share;
  const double each = static_cast<double>(tiles) / units;
  // Where blocks share a multiprocessor and have less than two tiles each, long ones stay alone at
  // the end, and use a part of it.
  const double few = 2.0 - each / cost.blocks, part = few < 0.0 ? 0.0 : few < 1.0 ? few : 1.0;
  const double alone = longest > mean ? (longest - mean) * (cost.blocks - 1) * part : 0.0;
  const double level = each * mean + alone;
  return level < longest ? longest : level;
}

// The same of packed sequences of which the host knows the mean and the longest. Where they are of
// very different lengths each has half a tile of keys too much, and of queries what its tiles lack,
// and when the last tile begins others have been done; the nearer the mean is to the longest, the
// more they are all as long as that.
constexpr double packed_time(const TileCost& cost, const MaskRule& rule, Lengths mean,
                             Lengths longest, int64_t heads, int32_t units) {
  // Of the sequence that a query is in: a third more than the mean where lengths are spread evenly
  // up to twice that.
  const int64_t q = (2 * int64_t{mean.q} + longest.q) / 3,
                kv = (2 * int64_t{mean.kv} + longest.kv) / 3;
  const bool causal = rule.mask & FLASHATTN_MASK_CAUSAL;
  const int64_t keys =
      causal ? kv - (q < kv ? q : kv) / 2 + (cost.rows + cost.keys) / 2 : kv + cost.keys / 2;
  const double lacking = 0.4 * (cost.rows - kWarpgroupRows);
  const double tiles = static_cast<double>(heads) * (mean.q + lacking) / cost.rows;
  const double uneven = tiles / units * tile_time(cost, rule, longest.kv, keys) +
                        tile_time(cost, rule, longest.kv, longest.kv) / 2;
  const double share = longest.q > 0 ? 2.0 * mean.q / longest.q - 1 : 1;
  const double even = share < 0 ? 0 : share > 1 ? 1 : share;
  return (1 - even) * uneven + even * forward_time(cost, rule, longest, heads, units);
}

}  // namespace flashattn
