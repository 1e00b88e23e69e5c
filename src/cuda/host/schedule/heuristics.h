// Cost model of forward kernels, by which the launcher chooses a tile. Pure, tested without a GPU.
#pragma once

#include "cuda/host/schedule/stream_k.h"
#include "cuda/host/schedule/warpgroup_rows.h"

namespace flashattn {

// Cost per Q row: cost per KV column plus a fixed prologue and epilogue cost, in arbitrary units.
// Only ratios between kernels for the same head size matter: in the kernel for long sequences a KV
// column costs 100.
struct TileCost {
  int32_t rows, keys;  // Q rows and KV columns of a tile
  int32_t per_key, start;
  int32_t ctas_per_sm = 1;
};

// The costs of the Hopper kernels, fitted to their times on an H100 for 64 to 16k queries and 4 to
// 32,768 heads. D = 128: the cost of a KV column is fitted to an H200 for tiles of 128 rows, 4k to
// 17k queries of 11 to 64 heads, and scaled with it for tiles of 64 rows.
constexpr TileCost hopper_cost(int32_t rows, int32_t keys, int32_t dim_v, int32_t ctas_per_sm) {
  if (ctas_per_sm > 1)
    return {rows, keys, dim_v == 64 ? 118 : 149, dim_v == 64 ? 20000 : 19000, ctas_per_sm};
  if (rows == 128) return {rows, keys, 103, 26500};
  return {rows, keys, dim_v == 96 && keys == 64 ? 103 : 100, 7800 + 48 * keys};
}

// The time of a sequence's tiles relative to that of as many full tiles.
constexpr double partial_tile_time(const TileCost& cost, int32_t queries) {
  constexpr double kMissing = 0.12;  // saved by a tile that lacks a warpgroup's rows: fitted
  const int32_t most = cost.rows / kWarpgroupRows;
  const int32_t warpgroups = static_cast<int32_t>(ceil_div(queries, kWarpgroupRows));
  const int32_t missing = missing_warpgroups(warpgroups, most),
                tiles = (warpgroups + missing) / most;
  return tiles == 0 ? 1 : 1 - kMissing * (missing < tiles ? missing : tiles) / tiles;
}

// The most keys that a query sees.
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

// The time of a Q tile whose rows each see `keys` keys. It visits whole KV tiles, of which each
// warpgroup skips some. longest: the keys of the longest sequence.
constexpr double tile_time(const TileCost& cost, const MaskRule& rule, int32_t longest,
                           int64_t keys) {
  // The keys of a tile whose rows see consecutive windows of the largest size.
  const int64_t span = most_keys(rule, longest) + (3 * cost.rows + 64) / 4 + cost.keys - 2;
  return static_cast<double>(cost.rows * ((keys < span ? keys : span) * cost.per_key + cost.start));
}

// The time until the last of `heads` heads (of all sequences) is done: the tiles of the busiest
// multiprocessor, one after the other. CTAs on a multiprocessor share it.
constexpr double forward_time(const TileCost& cost, const MaskRule& rule, Lengths len,
                              int64_t heads, int32_t multiprocessors) {
  const auto time = [&cost, &rule, len](int64_t keys) {
    return tile_time(cost, rule, len.kv, keys);
  };
  const int64_t tiles = heads * ceil_div(len.q, cost.rows);
  const double share = partial_tile_time(cost, len.q);
  const double longest = time(ceil_div(len.kv, cost.keys) * static_cast<int64_t>(cost.keys));
  if (!(rule.mask & FLASHATTN_MASK_CAUSAL)) {
    return static_cast<double>(ceil_div(tiles, multiprocessors)) * longest * share;
  }
  // A tile computes half a tile of hidden keys on average. Long tiles come first, so that short
  // ones even out the end.
  const int64_t hidden = len.q < len.kv ? len.q : len.kv;  // keys that the first query does not see
  const double mean = time(len.kv - hidden / 2 + (cost.rows + cost.keys) / 2) * share;
  const double each = static_cast<double>(tiles) / multiprocessors;
  // If CTAs share a multiprocessor and have less than two tiles each, long tiles run alone at the
  // end and use only a part of it.
  const double missing = 2.0 - each / cost.ctas_per_sm;
  const double run_alone = missing < 0.0 ? 0.0 : missing < 1.0 ? missing : 1.0;
  const double alone = longest > mean ? (longest - mean) * (cost.ctas_per_sm - 1) * run_alone : 0.0;
  const double level = each * mean + alone;
  return level < longest ? longest : level;
}

// Stream-K without a mask, in KV columns of a tile: the cost of a partial result, and of the
// combine kernel with the uneven end before it. Fitted at D = 128 on an H200: a split costs 25 to
// 60 us.
constexpr int32_t kPartialKeys = 640, kCombineKeys = 640;
constexpr int32_t kSplitKeys = 2 * kPartialKeys + kCombineKeys;
// The fewest iterations of a work item, and the fewest that a split must save.
constexpr int32_t partial_cost(const TileCost& cost) { return kPartialKeys / cost.keys; }
constexpr int32_t least_saved(const TileCost& cost) { return kSplitKeys / cost.keys + 1; }

constexpr StreamK split_last_wave(const TileCost& cost, Lengths len, int64_t heads, int32_t ctas) {
  const int64_t tiles = heads * ceil_div(len.q, cost.rows);
  if (tiles > INT32_MAX) return StreamK::unsplit(INT32_MAX);
  return StreamK::of(static_cast<int32_t>(tiles), static_cast<int32_t>(ceil_div(len.kv, cost.keys)),
                     ctas, partial_cost(cost), least_saved(cost));
}

// The most partials that this grid or a smaller one may have.
constexpr int64_t most_partials(const TileCost& cost, Lengths len, int64_t heads, int32_t ctas) {
  const int64_t iterations = ceil_div(len.kv, cost.keys);
  if (iterations <= least_saved(cost)) return 0;
  const int64_t tiles = std::min<int64_t>(heads * ceil_div(len.q, cost.rows), ctas - 1);
  return std::min(tiles * (iterations / partial_cost(cost) + 2), ctas + tiles);
}

// forward_time() of tiles that stream_k splits, without a mask.
constexpr double stream_k_time(const TileCost& cost, const StreamK& stream_k, Lengths len,
                               int32_t multiprocessors) {
  const int64_t key = cost.per_key, iteration = cost.keys * key;
  const int64_t whole = ceil_div(len.kv, cost.keys) * iteration + cost.start;
  const int64_t end = stream_k.item_iterations.divisor * iteration + kSplitKeys * key;
  const double waves = static_cast<double>(ceil_div(stream_k.whole_tiles, multiprocessors));
  return cost.rows * partial_tile_time(cost, len.q) *
         (waves * static_cast<double>(whole) + static_cast<double>(end));
}

// forward_time() for packed sequences, of which the host knows the mean and the longest length. For
// lengths that differ much: half a tile of keys and a part of a Q tile are wasted per sequence, and
// the last tile begins when others are done. For equal lengths: forward_time(). Between them the
// ratio of mean and longest interpolates.
constexpr double packed_time(const TileCost& cost, const MaskRule& rule, Lengths mean,
                             Lengths longest, int64_t heads, int32_t multiprocessors) {
  // The length of the sequence that an average query is in: a third more than the mean if lengths
  // are spread evenly up to twice the mean.
  const int64_t q = (2 * int64_t{mean.q} + longest.q) / 3,
                kv = (2 * int64_t{mean.kv} + longest.kv) / 3;
  const bool causal = rule.mask & FLASHATTN_MASK_CAUSAL;
  const int64_t keys =
      causal ? kv - (q < kv ? q : kv) / 2 + (cost.rows + cost.keys) / 2 : kv + cost.keys / 2;
  const double missing = 0.4 * (cost.rows - kWarpgroupRows);
  const double tiles = static_cast<double>(heads) * (mean.q + missing) / cost.rows;
  const double uneven = tiles / multiprocessors * tile_time(cost, rule, longest.kv, keys) +
                        tile_time(cost, rule, longest.kv, longest.kv) / 2;
  const double share = longest.q > 0 ? 2.0 * mean.q / longest.q - 1 : 1;
  const double even = share < 0 ? 0 : share > 1 ? 1 : share;
  return (1 - even) * uneven + even * forward_time(cost, rule, longest, heads, multiprocessors);
}

}  // namespace flashattn
