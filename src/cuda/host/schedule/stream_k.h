// Stream-K (Osama et al. 2023): the last partial wave of a grid of equal tiles is split along its
// iterations, so that all CTAs end at the same time. Pure, for the host and for kernels.
#pragma once

#include <algorithm>

#include "core/fast_divmod.h"

namespace flashattn {

// CTAs take work items in order. The first items are a whole tile each. The others are an equal
// number of iterations each, of one tile or of the end of a tile and the beginning of the next: one
// or two partials. Who adds up the partials of a tile is up to the kernel: forward the combine
// kernel, backward the last CTA to finish the tile.
struct StreamK {
  int32_t whole_tiles;         // tiles that are not split; they come first
  int32_t work_items;          // whole tiles and the others
  int32_t iterations;          // all iterations of the split tiles
  FastDivmod tile_iterations;  // iterations of one tile
  FastDivmod item_iterations;  // iterations of one work item

  // A grid without split tiles.
  static constexpr StreamK unsplit(int32_t tiles) {
    return {tiles, tiles, 0, FastDivmod::of(1), FastDivmod::of(1)};
  }

  // Splits the tiles of the last partial wave if that saves at least `least` iterations. A partial
  // costs as much as `cost` iterations beside its own.
  static constexpr StreamK of(int32_t tiles, int32_t iterations, int32_t ctas, int32_t cost,
                              int32_t least) {
    const int32_t left = ctas > 0 ? tiles % ctas : 0;
    const int64_t all = static_cast<int64_t>(left) * iterations;
    if (all <= 0 || all > INT32_MAX) return unsplit(tiles);
    const int64_t each = std::max<int64_t>(ceil_div(all, ctas), cost);
    if (iterations - each < std::max(least, 2 * cost + 1)) return unsplit(tiles);
    return {tiles - left, tiles - left + static_cast<int32_t>(ceil_div(all, each)),
            static_cast<int32_t>(all), FastDivmod::of(iterations),
            FastDivmod::of(static_cast<int32_t>(each))};
  }

  // A range of iterations of a split tile.
  struct Partial {
    int32_t tile;        // in the grid
    int32_t begin, end;  // iterations
    int32_t split_tile;  // index of the tile among the split tiles
    int32_t index;       // below partials(); a tile's partials are consecutive
    int32_t first;       // index of the tile's first partial
    int32_t count;       // partials of the tile; 1: this is the whole tile
    bool more;           // the work item has a second partial
  };

  FLASHATTN_HD constexpr bool splits(int32_t work_item) const { return work_item >= whole_tiles; }

  // second: the second partial of the work item, if its first has `more`.
  FLASHATTN_HD constexpr Partial partial(int32_t work_item, bool second) const {
    const int32_t n = work_item - whole_tiles, last = (n + 1) * item_iterations.divisor;
    const int32_t item_end = last < iterations ? last : iterations;
    int32_t tile = tile_iterations.quotient(n * item_iterations.divisor);
    if (second) ++tile;
    const int32_t from = tile * tile_iterations.divisor, to = from + tile_iterations.divisor;
    const int32_t begin = second ? from : n * item_iterations.divisor;
    const Partials of_tile = partials_of(tile);
    return {whole_tiles + tile,
            begin - from,
            (to < item_end ? to : item_end) - from,
            tile,
            n + tile,
            of_tile.first,
            of_tile.count,
            to < item_end};
  }

  struct Partials {
    int32_t first, count;
  };

  // The partials of a split tile.
  FLASHATTN_HD constexpr Partials partials_of(int32_t split_tile) const {
    const int32_t from = split_tile * tile_iterations.divisor, to = from + tile_iterations.divisor;
    const int32_t first = item_iterations.quotient(from);
    return {first + split_tile, item_iterations.quotient(to - 1) - first + 1};
  }

  FLASHATTN_HD constexpr int32_t tiles_split() const {
    return tile_iterations.quotient(iterations);
  }
  FLASHATTN_HD constexpr int32_t partials() const {
    return work_items - whole_tiles + tiles_split();
  }
};

}  // namespace flashattn
