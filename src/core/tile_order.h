// In which order the tiles of a forward pass are worked on: pure, for the host and for kernels.
#pragma once

#include "core/geometry.h"

namespace flashattn {

// Tiles of queries, of units (query heads of sequences). Under a causal mask the last queries take
// longest: units are taken a section at a time, whose keys and values fit the L2 cache, and of a
// section the last queries of all units first. The last section, `rest` units, is large enough that
// its light tiles even out the end.
struct TileOrder {
  int32_t query_tiles;  // of a unit
  int32_t units;
  int32_t section;  // units; 0: a unit's tiles follow each other
  int32_t rest;     // units - rest is a multiple of section

  FLASHATTN_HD constexpr int64_t count() const { return static_cast<int64_t>(query_tiles) * units; }
};

struct TilePosition {
  int32_t query_tile, unit;
};

// tile in [0, order.count()).
FLASHATTN_HD constexpr TilePosition tile_position(const TileOrder& order, int32_t tile) {
  if (order.section == 0) return {tile % order.query_tiles, tile / order.query_tiles};
  const int32_t in_sections = (order.units - order.rest) * order.query_tiles;
  int32_t first = order.units - order.rest, place = tile - in_sections, width = order.rest;
  if (tile < in_sections) {
    width = order.section;
    first = tile / (width * order.query_tiles) * width;
    place = tile % (width * order.query_tiles);
  }
  return {order.query_tiles - 1 - place / width, first + place % width};
}

// fitting: units whose keys and values fit the L2 cache at once.
FLASHATTN_HD constexpr TileOrder heavy_first_order(int32_t query_tiles, int32_t units,
                                                   int32_t fitting, int32_t workers) {
  // Two tiles a worker: then the last heavy ones start before half of the last section's work.
  const int64_t even =
      ceil_div(2 * static_cast<int64_t>(workers), query_tiles < 1 ? 1 : query_tiles);
  const int32_t most = fitting < units ? fitting : units;
  const int32_t section = most < 1 ? 1 : most;
  const int32_t least = even < units ? static_cast<int32_t>(even) : units;
  return {query_tiles, units, section, units - (units - least) / section * section};
}

}  // namespace flashattn
