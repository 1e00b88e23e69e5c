// The distribution of a sequence's rows over Q tiles of several warpgroups. Pure, for the host and
// for kernels.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn {

constexpr int32_t kWarpgroupRows = 64;  // rows of a warpgroup's WGMMA

// How many warpgroups the last tile lacks, if a tile has at most `most`.
FLASHATTN_HD constexpr int32_t missing_warpgroups(int32_t warpgroups, int32_t most) {
  return (most - warpgroups % most) % most;
}

// Q tile n takes warpgroups [begin, end) of a sequence's `warpgroups`, 64 rows each: `most` or
// fewer. If they do not divide evenly, each of the first tiles takes one fewer, instead of the last
// tile several fewer: a tile of two warpgroups takes little longer than a tile of one. Empty past
// the last tile.
FLASHATTN_HD constexpr Interval warpgroups_of_tile(int32_t warpgroups, int32_t most, int32_t n) {
  const int32_t missing = missing_warpgroups(warpgroups, most);
  const int32_t begin = n * most - (n < missing ? n : missing);
  const int32_t end = begin + most - (n < missing ? 1 : 0);
  return {begin, end < warpgroups ? end : warpgroups};
}

}  // namespace flashattn
