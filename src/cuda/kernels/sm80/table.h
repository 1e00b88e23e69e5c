// The kernels of the portable backend in this build. Rows come from table.txt.
#pragma once

#include <cstddef>

#include "cuda/params.h"

namespace flashattn::cuda::sm80 {

// Of a forward kernel's blocks: 128 or 64 rows, or fewer, for decoding: 32, with tiles of 64 keys
// or fewer, or 16, with much or less of K and V on its way.
enum class Size { kDeepPipeline, kShallowPipeline, kTiny, kSmall, kMedium, kLarge };

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
Table<BackwardEntry> dbias_table();

inline bool same_heads(const ForwardEntry& a, const ForwardEntry& b) {
  return a.dim_qk == b.dim_qk && a.dim_v == b.dim_v;
}
inline bool same_heads(const BackwardEntry& a, const BackwardEntry& b) { return a.dim == b.dim; }

// Whether a kernel takes the problem's dtype and heads.
inline bool takes(const BackwardEntry& e, const Problem& p, bool modified) {
  return e.dtype == p.dtype && e.modified == modified && e.dim >= p.dim_qk && e.dim >= p.dim_v;
}

// Of those that fit, for the smallest heads: the first that the device's shared memory holds; if
// there is none, the one that needs the least.
template <class Entry, class Fits>
const Entry* find(Table<Entry> table, int32_t shared_memory, Fits fits) {
  const Entry* best = nullptr;
  for (size_t n = 0; n < table.count; ++n) {
    const Entry& e = *table.entries[n];
    if (!fits(e) || (best && !same_heads(e, *best))) continue;
    if (e.shared_bytes <= shared_memory) return &e;
    if (!best || e.shared_bytes < best->shared_bytes) best = &e;
  }
  return best;
}

}  // namespace flashattn::cuda::sm80
