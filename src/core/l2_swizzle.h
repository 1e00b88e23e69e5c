// L2 swizzle: the order in which the CTAs of a grid, or the tasks of a CPU call, take tiles whose
// heads share K and V. Pure, for the host and for kernels.
#pragma once

#include <algorithm>

#include "core/fast_divmod.h"

namespace flashattn {

// Heads are taken bundle by bundle; a bundle's K and V fit in the cache together. Within a bundle
// every head's tile 0 comes first, then every head's tile 1: if tiles differ in length, tile 0 is
// the longest. The caller decides what a head is: a query head or a KV head of one sequence.
struct L2Swizzle {
  int32_t tiles;                   // tiles per head
  FastDivmod bundle_tiles, heads;  // tiles and heads of a bundle
  FastDivmod last_heads;           // heads of the last bundle
  int32_t last;                    // index of the last bundle

  // fitting: heads whose K and V fit in the cache at once. at_end: the least number of heads in the
  // last bundle. The result is empty for a grid that cannot be launched: no tile, or 2^31 and more.
  static constexpr L2Swizzle of(int64_t heads, int64_t tiles, int64_t fitting, int64_t at_end = 1) {
    if (heads * tiles <= 0 || heads * tiles > INT32_MAX) return {};
    const int64_t width = std::clamp<int64_t>(fitting, 1, heads);
    const int64_t last = (heads - std::clamp<int64_t>(at_end, 1, heads)) / width;
    return {static_cast<int32_t>(tiles), FastDivmod::of(static_cast<int32_t>(width * tiles)),
            FastDivmod::of(static_cast<int32_t>(width)),
            FastDivmod::of(static_cast<int32_t>(heads - last * width)), static_cast<int32_t>(last)};
  }

  // The number of heads for the last bundle if tiles differ in length and `resident` CTAs or
  // clusters run at once: enough for two tiles each. The long ones then start before half of the
  // bundle's work is done, and the short ones even out the end.
  static constexpr int64_t even_end(int32_t resident, int64_t tiles) {
    return ceil_div(2 * static_cast<int64_t>(resident), std::max<int64_t>(tiles, 1));
  }

  // Returns the same bundles of heads with n tiles per head; empty if that is too many.
  constexpr L2Swizzle with_tiles(int64_t n) const {
    const int64_t all = static_cast<int64_t>(last) * heads.divisor + last_heads.divisor;
    if (all <= 0 || n <= 0 || n > INT32_MAX / all) return {};
    L2Swizzle s = *this;
    s.tiles = static_cast<int32_t>(n);
    s.bundle_tiles = FastDivmod::of(static_cast<int32_t>(heads.divisor * n));
    return s;
  }

  FLASHATTN_HD constexpr int32_t count() const {
    return (last * heads.divisor + last_heads.divisor) * tiles;
  }

  // Heads, counted from the first, of which the first n CTAs take a tile.
  constexpr int32_t heads_of(int32_t n) const {
    const int32_t before = std::min(bundle_tiles.quotient(n), last);
    const int32_t rest = n - before * bundle_tiles.divisor;
    return before * heads.divisor +
           std::min(rest, before == last ? last_heads.divisor : heads.divisor);
  }

  struct Tile {
    int32_t tile_idx, head_idx;
  };

  // The tile of CTA `index`.
  FLASHATTN_HD constexpr Tile tile(int32_t index) const {
    const int32_t number = bundle_tiles.quotient(index);
    const bool at_end = number >= last;
    const int32_t bundle = at_end ? last : number;
    const FastDivmod width = at_end ? last_heads : heads;
    const int32_t rest = index - bundle * bundle_tiles.divisor, tile_idx = width.quotient(rest);
    return {tile_idx, bundle * heads.divisor + rest - tile_idx * width.divisor};
  }
};

}  // namespace flashattn
