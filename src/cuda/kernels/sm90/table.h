// The Hopper kernels in this build: one entry per row of table.txt.
#pragma once

#include <cstddef>

#include "cuda/host/schedule/heuristics.h"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // largest head dimensions that the kernel takes
  ScoreModKind score_mod;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  TileCost cost;
  void (*kernel)(ForwardParams);
};

struct BackwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // largest head dimensions that the kernel takes
  ScoreModKind score_mod;
  int32_t tile_q, tile_kv;
  int32_t cluster_size;      // CTAs that share a KV tile
  int32_t consumers;         // warpgroups of a CTA that accumulate dK and dV
  int32_t partial_bytes;     // dK and dV of all of these; 0: stream-K is off
  bool overlaps_preprocess;  // the kernel may start before bwd_preprocess is done
  int32_t stages, threads, shared_bytes;
  void (*kernel)(BackwardParams);
  void (*postprocess)(cuda::BackwardParams);  // dq from fp32 to the output type
  int32_t postprocess_threads;                // per CTA
};

struct ForwardTable {
  const ForwardEntry* const* entries;  // per dtype and score_mod, in ascending head dimensions
  size_t count;
};

struct BackwardTable {
  const BackwardEntry* const* entries;  // per dtype, in ascending head dimensions
  size_t count;
};

// Whether only kernels of ScoreModKind::kRuntime, in both passes, compute the problem.
bool needs_runtime_kernel(const Problem& problem);
// Suffixes of kernel names, by ScoreModKind.
extern const char* const kScoreModNames[];

ForwardTable forward_table();
ForwardTable fp8_forward_table();  // q, k and v in E4M3; dtype is that of o
BackwardTable backward_table();
BackwardTable two_warpgroup_backward_table();  // for long Q

}  // namespace flashattn::cuda::sm90
