// Splits tiles whose steps are added up in a fixed order: each CTA takes a range of a tile's steps,
// and the CTAs of a tile add their sums one after the other. Pure, for the host and for kernels.
#pragma once

#include <algorithm>

#include "core/mask_geometry.h"

namespace flashattn {

// Where all CTAs of a tile run at once, each range is longer than the one before, by about the
// steps that adding a sum takes, so that the CTAs need not wait for each other.
struct OrderedSplit {
  int32_t tiles, steps;  // of the grid; of a tile
  int32_t splits;        // CTAs of a tile
  int32_t first, more;   // steps of the first range; by how many the next one is longer

  static constexpr int32_t kAddSteps = 2;    // adding a sum takes as long as these
  static constexpr int32_t kStartSteps = 2;  // and a CTA's start and end

  static constexpr OrderedSplit unsplit(int32_t tiles, int32_t steps) {
    return {tiles, steps, 1, steps, 0};
  }

  // Chooses the number of splits whose waves of `ctas` CTAs, which run at once, take the fewest
  // steps.
  static constexpr OrderedSplit of(int32_t tiles, int32_t steps, int32_t ctas) {
    OrderedSplit best = unsplit(tiles, steps);
    if (tiles <= 0 || ctas <= 0) return best;
    int64_t least = ceil_div(tiles, ctas) * (steps + kStartSteps);
    const int64_t at_once = ctas / tiles;  // CTAs of a tile
    const int64_t most = std::min<int64_t>(steps, std::max<int64_t>(at_once, kMostSplits));
    for (int64_t n = 2; n <= most; ++n) {
      const int64_t waves = ceil_div(tiles * n, ctas), more = waves == 1 ? kAddSteps : 0;
      const int64_t first = ceil_div(steps - more * n * (n - 1) / 2, n);
      if (first < 1) break;
      const int64_t adds = std::max<int64_t>(std::min(n, at_once), 1);  // one after the other
      const int64_t time = waves * (first + kStartSteps + kAddSteps * adds);
      if (time >= least) continue;
      least = time;
      best = {tiles, steps, static_cast<int32_t>(n), static_cast<int32_t>(first),
              static_cast<int32_t>(more)};
    }
    return best;
  }

  // CTAs of a tile, where they need more than a wave.
  static constexpr int32_t kMostSplits = 8;

  FLASHATTN_HD constexpr int64_t ctas() const { return static_cast<int64_t>(tiles) * splits; }

  // The steps of CTA n of a tile; may be empty.
  FLASHATTN_HD constexpr Interval range(int32_t n) const { return {begin(n), begin(n + 1)}; }

 private:
  FLASHATTN_HD constexpr int32_t begin(int32_t n) const {
    const int64_t at =
        static_cast<int64_t>(n) * first + static_cast<int64_t>(more) * n * (n - 1) / 2;
    return n >= splits || at > steps ? steps : static_cast<int32_t>(at);
  }
};

}  // namespace flashattn
