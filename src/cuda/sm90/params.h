// What the host hands to the Hopper kernels, by value.
#pragma once

#include <cuda.h>

#include "core/sequence.h"
#include "core/tile_order.h"

namespace flashattn::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q, k, v, o;  // (column, row, head, batch or page)
  Problem problem;
  flashattn_forward_args args;
  TileOrder order;
  int32_t* counter;     // tiles handed out beyond the first of each block
  int32_t kv_box;       // rows of a box of K and V: a tile's, or what of a tile lies in one page
  int32_t kv_has_tail;  // rows past a sequence's keys may lie in memory: they need not be finite
  int32_t store_boxes;  // O leaves by the copy engine; else row by row, as lengths allow
};

}  // namespace flashattn::cuda::sm90
