// The tables of portable kernels in this build, generated from table.txt.
#pragma once

#include "cuda/host/schedule/ordered_split.h"
#include "cuda/kernels/table.h"
#include "cuda/params.h"

namespace flashattn::cuda::sm80 {

// Forward kernels by the rows of their work tile: 128 (kLarge), 64 (kMedium; 32 for the largest
// heads, where shared memory has no room for more), 32 with KV tiles of 64 keys (kSmall) or fewer
// (kTiny). Decode kernels: 64 rows (kDecode64), 32 (kDecode32), or 16 with many or few stages of K
// and V (kDeepPipeline, kShallowPipeline). A cache of E4M3 has decode kernels only: there kSmall
// and kMedium are those for short calls, with 16 and 64 rows.
enum class Size {
  kDeepPipeline,
  kShallowPipeline,
  kDecode32,
  kDecode64,
  kTiny,
  kSmall,
  kMedium,
  kLarge
};

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // the largest heads it computes
  Size size;
  bool modified;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  bool decodes;
  void (*kernel)(ForwardParams);
  // The kernel that merges splits in clusters; NULL: the entry has none.
  void (*merging_kernel)(ForwardParams);
  int32_t merging_shared_bytes;

  // The entry of merging_kernel.
  ForwardEntry merging() const {
    ForwardEntry entry = *this;
    entry.kernel = merging_kernel;
    entry.shared_bytes = merging_shared_bytes;
    return entry;
  }
};

// A kernel of the backward pass, or of the gradient of the dense bias.
template <class Params>
struct GradientEntry {
  int32_t dtype;
  int32_t dim;  // the largest dim_qk and dim_v it computes
  bool modified;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  void (*kernel)(Params);
};
using BackwardEntry = GradientEntry<BackwardParams>;

// common.arrived: counters that are 0, if the split has several CTAs a tile. The CTAs that have
// started, then for each tile the CTAs that have added their part.
struct DbiasParams {
  BackwardParams common;
  OrderedSplit split;
};
// Not modified: scores have the dense bias alone, which is the same for all that a tile sums.
using DbiasEntry = GradientEntry<DbiasParams>;

// Entries of a dtype are in order of head size.
Table<ForwardEntry> forward_table();
Table<BackwardEntry> backward_table();
Table<DbiasEntry> dbias_table();

inline bool same_heads(const ForwardEntry& a, const ForwardEntry& b) {
  return a.dim_qk == b.dim_qk && a.dim_v == b.dim_v;
}
template <class Params>
bool same_heads(const GradientEntry<Params>& a, const GradientEntry<Params>& b) {
  return a.dim == b.dim;
}

// Heads above 256 have only the kernel that takes any score modification at run time: beside
// products of this size that costs little.
inline bool has_plain_kernels(const Problem& p) { return p.dim_qk <= 256 && p.dim_v <= 256; }

// Whether a kernel computes the problem's dtype and head sizes.
template <class Params>
bool takes(const GradientEntry<Params>& e, const Problem& p, bool modified) {
  return e.dtype == p.dtype && e.modified == modified && e.dim >= p.dim_qk && e.dim >= p.dim_v;
}

// Among the entries that fit, those for the smallest heads are considered. Returns the first whose
// shared memory the device has; if there is none, the one that needs the least. NULL: nothing fits.
template <class Entry, class Fits>
const Entry* find(Table<Entry> table, int32_t shared_memory, Fits fits) {
  const Entry* best = nullptr;
  for (const Entry* e : table) {
    if (!fits(*e) || (best && !same_heads(*e, *best))) continue;
    if (e->shared_bytes <= shared_memory) return e;
    if (!best || e->shared_bytes < best->shared_bytes) best = e;
  }
  return best;
}

}  // namespace flashattn::cuda::sm80
