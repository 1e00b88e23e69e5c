// Stream-K: every iteration of every tile is in one partial, partials have distinct indices, those
// of a tile follow each other, and no work item has more iterations than another.
#include "cuda/host/schedule/heuristics.h"

#include <algorithm>
#include <climits>
#include <initializer_list>
#include <vector>

#include "check.h"

using namespace flashattn;

namespace {

bool right(int32_t items, int32_t steps, int32_t workers, int32_t cost, int32_t least = 0) {
  const StreamK cut = StreamK::of(items, steps, workers, cost, least);
  if (cut.work_items == items)
    return cut.whole_tiles == items && cut.tiles_split() == 0 && !cut.partials();
  if (cut.whole_tiles % workers != 0 || cut.tiles_split() != items - cut.whole_tiles) return false;
  if (cut.work_items - cut.whole_tiles > workers || cut.item_iterations.divisor < cost)
    return false;
  std::vector<int32_t> done(static_cast<size_t>(cut.tiles_split()));  // steps
  std::vector<int32_t> found(done.size());                            // pieces
  int32_t last = -1;                                                  // number of a partial
  for (int32_t work_item = cut.whole_tiles; work_item < cut.work_items; ++work_item) {
    if (!cut.splits(work_item)) return false;
    int32_t length = 0;
    bool more = true;
    for (int second = 0; second < 2 && more; ++second) {
      const StreamK::Partial partial = cut.partial(work_item, second != 0);
      const auto n = static_cast<size_t>(partial.split_tile);
      if (n >= done.size() || partial.tile != cut.whole_tiles + partial.split_tile) return false;
      if (partial.begin != done[n] || partial.begin >= partial.end || partial.end > steps)
        return false;
      if (partial.index <= last || partial.index != partial.first + found[n]) return false;
      last = partial.index;
      length += partial.end - partial.begin;
      done[n] = partial.end;
      if ((++found[n] == partial.count) != (done[n] == steps)) return false;
      more = partial.more;
    }
    if (more || length > cut.item_iterations.divisor) return false;
  }
  for (const int32_t n : done) {
    if (n != steps) return false;
  }
  return last < cut.partials();
}

// The partial results of a forward pass's last wave fit what the workspace holds, which never
// shrinks for a larger shape.
void test_last_wave(const TileCost& cost, int32_t ctas) {
  int64_t larger_kv = 0;
  for (const int32_t kv : {64, 1000, 2047, 4096, 5000, 16384, 65536}) {
    int64_t most = 0;
    for (int64_t heads = 1; heads <= 3 * ctas; heads += heads < 20 ? 1 : 7) {
      for (const int32_t q : {1, 100, 192, 700}) {
        const int64_t tiles = heads * ceil_div(q, cost.rows);
        const StreamK items = split_last_wave(cost, {q, kv}, heads, ctas);
        const int64_t room = most_partials(cost, {q, kv}, heads, ctas);
        CHECK(items.partials() <= room && room >= (q == 1 ? most : 0));
        CHECK(items.whole_tiles + items.tiles_split() == tiles);
        if (q == 1) most = room;
        if (items.tiles_split() == 0) continue;
        const MaskRule none{0, -1, -1, 0};
        CHECK(stream_k_time(cost, items, {q, kv}, ctas) <
              forward_time(cost, none, {q, kv}, heads, ctas));
      }
    }
    CHECK(most >= larger_kv);
    larger_kv = most;
  }
}

}  // namespace

int main() {
  for (const int32_t ctas : {4, 78, 108, 132}) {
    for (const TileCost& cost : {hopper_cost(192, 128, 64, 1), hopper_cost(192, 64, 128, 1),
                                 hopper_cost(128, 128, 128, 1), hopper_cost(128, 64, 256, 1)}) {
      test_last_wave(cost, ctas);
    }
  }
  // 16 heads of 16k tokens: the 56 tiles after ten waves are split along their keys.
  CHECK(split_last_wave(hopper_cost(192, 64, 128, 1), {16384, 16384}, 16, 132).tiles_split() == 56);
  CHECK(split_last_wave(hopper_cost(192, 64, 128, 1), {1024, 1024}, 256, 132).tiles_split() == 0);
  for (int32_t items = 0; items <= 40; ++items) {
    for (int32_t steps = 1; steps <= 30; ++steps) {
      for (const int32_t workers : {1, 2, 5, 7, 16, 132}) {
        for (const int32_t cost : {1, 2, 4}) CHECK(right(items, steps, workers, cost));
      }
    }
  }
  // 16k tokens, heads * dim = 2048, on 132 multiprocessors: 15.5 rounds of D = 128, 31.03 of 64.
  CHECK(StreamK::of(2048, 52, 132, 4, 12).item_iterations.divisor == 27);
  CHECK(StreamK::of(4096, 64, 132, 4, 12).item_iterations.divisor == 4);
  CHECK(StreamK::of(2048, 8, 132, 4, 0).work_items == 2048);  // too short
  CHECK(StreamK::of(2048, 16, 132, 4, 7).work_items > 2048 - 68);
  CHECK(StreamK::of(2048, 16, 132, 4, 12).work_items == 2048);  // too little saved
  CHECK(StreamK::of(100, 1000, 132, 4, 12).whole_tiles == 0);
  CHECK(right(131, INT32_MAX / 132, 132, 4) && right(131, INT32_MAX, 132, 4));
  CHECK(StreamK::of(5, 100, 0, 1, 0).work_items == 5);
  return check_report();
}
