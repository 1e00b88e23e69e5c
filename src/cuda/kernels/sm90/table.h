// The Hopper kernels in this build. Rows come from table.txt.
#pragma once

#include <cstddef>

#include "cuda/host/schedule/heuristics.h"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // the largest it takes
  ScoreModKind scores;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  TileCost cost;
  void (*kernel)(ForwardParams);
};

struct BackwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // the largest it takes
  ScoreModKind scores;
  int32_t tile_q, tile_kv;
  int32_t blocks;         // that share a tile of keys: a cluster
  int32_t consumers;      // of a block: warpgroups that hold sums of dK and dV
  int32_t partial_bytes;  // of all these; 0: tiles of keys are not cut
  bool starts_early;      // it may begin before all is prepared
  int32_t stages, threads, shared_bytes;
  void (*kernel)(BackwardParams);
  void (*convert_dq)(cuda::BackwardParams);  // of so many threads a block
  int32_t convert_threads;
};

struct ForwardTable {
  const ForwardEntry* const* entries;  // for each dtype and kind, smaller heads first
  size_t count;
};

struct BackwardTable {
  const BackwardEntry* const* entries;  // for each dtype, smaller heads first
  size_t count;
};

// Whether a problem asks for what only kernels for any scores can do, in both passes.
bool needs_any(const Problem& problem);
// Added to names, what a kernel can do.
extern const char* const kScoreModNames[];

ForwardTable forward_table();
BackwardTable backward_table();
BackwardTable two_warpgroup_backward_table();  // for many queries

}  // namespace flashattn::cuda::sm90
