// The order of a forward pass's tiles: each once, heavy ones first, a last section that evens out.
#include "core/tile_order.h"

#include <vector>

#include "check.h"

using namespace flashattn;

namespace {

void check_each_once(const TileOrder& order) {
  std::vector<int> seen(static_cast<size_t>(order.count()), 0);
  bool inside = true;
  for (int32_t t = 0; t < order.count(); ++t) {
    const TilePosition p = tile_position(order, t);
    inside = inside && p.query_tile >= 0 && p.query_tile < order.query_tiles && p.unit >= 0 &&
             p.unit < order.units;
    if (inside) ++seen[static_cast<size_t>(p.unit * order.query_tiles + p.query_tile)];
  }
  CHECK(inside);
  bool once = true;
  for (const int n : seen) once = once && n == 1;
  CHECK(once);
}

// Within a section query tiles never rise, and a section has one tile of each kind a unit.
void check_falling(const TileOrder& order) {
  bool falls = true;
  int32_t begin = 0;
  while (begin < order.units) {
    const bool last = begin == order.units - order.rest;
    const int32_t width = last ? order.rest : order.section;
    for (int32_t k = 1; k < width * order.query_tiles; ++k) {
      const int32_t t = begin * order.query_tiles + k;
      falls = falls && tile_position(order, t).query_tile <= tile_position(order, t - 1).query_tile;
    }
    begin += width;
  }
  CHECK(falls && begin == order.units);
}

}  // namespace

int main() {
  CHECK(heavy_first_order(0, 3, 1, 132).count() == 0);
  CHECK(heavy_first_order(3, 0, 1, 132).count() == 0);
  for (int32_t tiles = 1; tiles <= 9; ++tiles) {
    for (int32_t units = 1; units <= 17; ++units) {
      check_each_once({tiles, units, 0, units});
      for (int32_t fitting = 0; fitting <= 18; ++fitting) {
        for (const int32_t workers : {1, 2, 5, 132}) {
          const TileOrder order = heavy_first_order(tiles, units, fitting, workers);
          CHECK(order.section >= 1 && (order.units - order.rest) % order.section == 0);
          CHECK(order.rest >= 1 && order.rest <= units);
          // Two tiles a worker in the last section, or all there are.
          CHECK(order.rest == units || order.rest * tiles >= 2 * workers);
          check_each_once(order);
          check_falling(order);
        }
      }
    }
  }
  return check_report();
}
