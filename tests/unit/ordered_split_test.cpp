// Splits whose sums are added in order: the ranges of a tile are all of its steps, one after the
// other, and a split takes fewer waves of steps than a tile as a whole.
#include "cuda/host/schedule/ordered_split.h"

#include <climits>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

bool right(int32_t tiles, int32_t steps, int32_t ctas) {
  const OrderedSplit split = OrderedSplit::of(tiles, steps, ctas);
  if (split.tiles != tiles || split.steps != steps || split.splits < 1) return false;
  int32_t end = 0, longest = 0;
  for (int32_t n = 0; n < split.splits; ++n) {
    const Interval range = split.range(n);
    if (range.begin != end || range.end < range.begin) return false;
    end = range.end;
    longest = std::max(longest, range.end - range.begin);
  }
  if (end != steps) return false;
  return split.splits == 1 ||
         ceil_div(split.ctas(), ctas) * longest < ceil_div(tiles, ctas) * steps;
}

}  // namespace

int main() {
  for (const int32_t ctas : {1, 7, 108, 132, 264}) {
    for (int32_t tiles = 1; tiles <= 300; tiles += tiles < 20 ? 1 : 7) {
      for (const int32_t steps : {1, 2, 8, 31, 256, 768, 100000}) CHECK(right(tiles, steps, ctas));
    }
  }
  CHECK(right(INT_MAX, 1 << 30, 132));
  CHECK(right(1, 1 << 30, 132));
  // A wave of CTAs has all of it.
  CHECK(OrderedSplit::of(16, 256, 132).splits == 8);
  CHECK(OrderedSplit::of(1024, 8, 132).splits == 1);
  return check_report();
}
