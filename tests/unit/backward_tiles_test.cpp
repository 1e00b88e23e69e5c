// The CPU's tiles of keys: all of a sequence as large, as far as steps allow, and enough turns
// planned for every sequence that a shape allows.
#include "cpu/job.h"

#include "check.h"

using namespace flashattn;
using namespace flashattn::cpu;

int main() {
  for (const Tiling tiling :
       {Tiling{96, 96, 384, 256}, Tiling{96, 96, 256, 128}, Tiling{96, 96, 192, 128},
        Tiling{96, 96, 320, 320}, Tiling{96, 96, 64}}) {
    for (const int32_t heads : {1, 2, 3, 8, 31, 32, 100}) {
      Problem problem{};
      problem.heads_kv = heads;
      int64_t most = 0;
      for (int32_t keys = 0; keys <= 14000; ++keys) {
        const int32_t tile = backward_tile_kv(tiling, problem, keys);
        const int64_t tiles = ceil_div(keys, tile), many = ceil_div(keys, tiling.tile_kv);
        CHECK(tile > 0 && tile % kTileKvStep == 0 && tile <= tiling.tile_kv);
        // Few: not without need, and then no fewer.
        const bool few = tiling.tile_kv_short > 0 && many * heads < kFewTiles;
        CHECK(tiles == (few ? ceil_div(keys, tiling.tile_kv_short) : many));
        // The last is short of the others by less than a step for each of them.
        CHECK(tiling.tile_kv_short == 0 || tiles * tile - keys < tiles * kTileKvStep || tiles == 0);
        if (tiles > most) most = tiles;
        CHECK(backward_kv_tiles(tiling, problem, keys) >= most);
      }
      // No more than some sequence makes.
      CHECK(backward_kv_tiles(tiling, problem, 14000) == most);
    }
  }
  return check_report();
}
