// How the rows of a sequence are dealt out to tiles of several strips: pure, for the host and for
// kernels.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn {

constexpr int32_t kWarpgroupRows = 64;  // of a Hopper warpgroup

// How many more its tiles, of so many at most, could take.
FLASHATTN_HD constexpr int32_t missing_warpgroups(int32_t strips, int32_t most) {
  return (most - strips % most) % most;
}

// Which of a sequence's strips tile n takes, of tiles of at most so many. A tile takes little
// longer with two strips than with one: where the last tile would lack some, that many of the first
// ones lack one each. Empty past the last.
FLASHATTN_HD constexpr Interval warpgroups_of_tile(int32_t strips, int32_t most, int32_t n) {
  const int32_t lacking = missing_warpgroups(strips, most);
  const int32_t begin = n * most - (n < lacking ? n : lacking);
  const int32_t end = begin + most - (n < lacking ? 1 : 0);
  return {begin, end < strips ? end : strips};
}

}  // namespace flashattn
