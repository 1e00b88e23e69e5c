// The order of work: every tile of every head comes once, group by group, and in each group all
// heads before the next tile. The last group is long enough to even out the end.
#include "core/l2_swizzle.h"

#include <climits>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

bool in_order(const L2Swizzle& swizzle, int32_t heads, int32_t tiles) {
  int32_t index = 0, most = 0;
  for (int32_t group = 0; group <= swizzle.last; ++group) {
    const int32_t width =
        group == swizzle.last ? swizzle.last_heads.divisor : swizzle.heads.divisor;
    const int32_t first = group * swizzle.heads.divisor;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      for (int32_t head = first; head < first + width; ++head, ++index) {
        const L2Swizzle::Tile at = swizzle.tile(index);
        if (at.tile_idx != tile || at.head_idx != head) return false;
        most = most > head ? most : head + 1;
        if (swizzle.heads_of(index + 1) != most) return false;
      }
    }
  }
  return index == heads * tiles && index == swizzle.count() && swizzle.tiles == tiles;
}

bool right(int32_t heads, int32_t tiles, int32_t fitting, int32_t workers) {
  const L2Swizzle swizzle =
      L2Swizzle::of(heads, tiles, fitting, L2Swizzle::even_end(workers, tiles));
  const int32_t most = fitting < 1 ? 1 : fitting < heads ? fitting : heads;
  const int32_t rest = swizzle.last_heads.divisor;
  // Two tiles a worker in the last group, or all there are; and no group too many.
  const bool even = rest == heads || rest * tiles >= 2 * workers;
  const bool least = rest <= most || (rest - most) * tiles < 2 * workers;
  const L2Swizzle others = swizzle.with_tiles(3);
  return in_order(others, heads, 3) && others.last == swizzle.last &&
         in_order(swizzle, heads, tiles) && swizzle.heads.divisor == most && even && least;
}

}  // namespace

int main() {
  for (int32_t heads = 1; heads <= 20; ++heads) {
    for (int32_t tiles = 1; tiles <= 9; ++tiles) {
      for (int32_t fitting = 0; fitting <= 22; ++fitting) {
        for (const int32_t workers : {0, 1, 2, 5, 132}) {
          CHECK(right(heads, tiles, fitting, workers));
        }
      }
    }
  }
  CHECK(L2Swizzle::of(0, 5, 1).count() == 0 && L2Swizzle::of(5, 0, 1, 132).count() == 0);
  CHECK(L2Swizzle::of(INT64_C(1) << 16, INT64_C(1) << 15, 1).count() == 0);
  CHECK(L2Swizzle::of(INT32_MAX, 1, INT32_MAX).tile(INT32_MAX - 1).head_idx == INT32_MAX - 1);
  CHECK(L2Swizzle::of(INT32_MAX, 1, 7, 132).count() == INT32_MAX);
  CHECK(L2Swizzle::of(0, 5, 1).with_tiles(3).count() == 0);
  CHECK(L2Swizzle::of(5, 2, 1).with_tiles(0).count() == 0);
  CHECK(L2Swizzle::of(5, 2, 1).with_tiles(INT32_MAX).count() == 0);
  return check_report();
}
