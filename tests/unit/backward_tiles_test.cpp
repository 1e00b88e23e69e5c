// The CPU's tiles of keys: enough turns are planned for every sequence that a shape allows.
#include "cpu/job.h"

#include "check.h"

using namespace flashattn;
using namespace flashattn::cpu;

int main() {
  for (const Tiling tiling : {Tiling{96, 96, 384, 256}, Tiling{96, 96, 256, 128},
                              Tiling{96, 96, 192, 128}, Tiling{96, 96, 64}}) {
    for (const int32_t heads : {1, 2, 3, 8, 31, 32, 100}) {
      Problem problem{};
      problem.heads_kv = heads;
      int64_t most = 0;
      for (int32_t keys = 0; keys <= 14000; ++keys) {
        const int32_t tile = backward_tile_kv(tiling, problem, keys);
        CHECK(tile == tiling.tile_kv || tile == tiling.few_kv);
        const int64_t tiles = ceil_div(keys, tile);
        // Few: not without need, and then no fewer.
        CHECK(tile == tiling.tile_kv || ceil_div(keys, tiling.tile_kv) * heads < kFewTiles);
        CHECK(tiles >= ceil_div(keys, tiling.tile_kv));
        if (tiles > most) most = tiles;
        CHECK(backward_key_tiles(tiling, problem, keys) >= most);
      }
      // No more than some sequence makes.
      CHECK(backward_key_tiles(tiling, problem, 14000) == most);
    }
  }
  return check_report();
}
