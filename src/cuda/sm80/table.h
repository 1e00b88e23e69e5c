// The kernels of the portable family in this build. Rows come from table.txt.
#pragma once

#include <cstddef>

#include "cuda/params.h"

namespace flashattn::cuda::sm80 {

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // the largest it takes
  int32_t strips;         // of 16 rows, a warp
  bool modified;
  int32_t tile_q, tile_kv, threads, shared_bytes;
  void (*kernel)(ForwardParams);
};

struct ForwardTable {
  const ForwardEntry* const* entries;  // for each dtype and kind, smaller heads first
  size_t count;
};

ForwardTable forward_table();

}  // namespace flashattn::cuda::sm80
