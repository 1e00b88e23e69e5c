// The kernels of the portable family in this build. Rows come from table.txt.
#pragma once

#include <cstddef>

#include "cuda/params.h"

namespace flashattn::cuda::sm80 {

// Of a forward kernel's blocks: 128 or 64 rows, or fewer, for decoding: 32, with tiles of 64 keys
// or fewer, or 16, with much or less of K and V on its way.
enum class Size { kWide, kNarrow, kTiny, kSmall, kMedium, kLarge };

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // the largest it takes
  Size size;
  bool modified;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  void (*kernel)(ForwardParams);
};

// One of the backward pass, or of the gradient of the bias.
struct BackwardEntry {
  int32_t dtype;
  int32_t dim;  // the largest it takes, of either kind
  bool modified;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  void (*kernel)(BackwardParams);
};

// For each dtype and kind, smaller heads first.
template <class Entry>
struct Table {
  const Entry* const* entries;
  size_t count;
};

Table<ForwardEntry> forward_table();
Table<BackwardEntry> backward_table();
Table<BackwardEntry> bias_gradient_table();

}  // namespace flashattn::cuda::sm80
