// The tables of Hopper kernels in this build, generated from table.txt.
#pragma once

#include "cuda/host/schedule/heuristics.h"
#include "cuda/kernels/sm90/params.h"
#include "cuda/kernels/table.h"

namespace flashattn::cuda::sm90 {

struct ForwardEntry {
  int32_t dtype;
  int32_t dim_qk, dim_v;  // largest head dimensions that the kernel takes
  ScoreModKind score_mod;
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  TileCost cost;
  bool uses_stream_k;
  bool transposes_v;  // E4M3: else V is transposed before
  void (*kernel)(ForwardParams);
};

// A kernel for latent attention.
struct MlaEntry {
  int32_t dtype, dtype_kv;  // dtype_kv: F8E4M3 with LATENT_KV, else dtype
  int32_t dim_qk, dim_v;    // largest head dimensions that the kernel takes
  bool transposes;          // with LATENT_KV: computes with S^T and O^T, for few rows
  int32_t tile_q, tile_kv, stages, threads, shared_bytes;
  void (*kernel)(MlaParams);
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
  bool whole_blocks;         // blocks of a mask must be multiples of tiles, and all keys count
  int32_t stages, threads, shared_bytes;
  void (*kernel)(BackwardParams);
  void (*postprocess)(cuda::BackwardParams);  // dq from fp32 to the output type
  int32_t postprocess_threads;                // per CTA
};

// Whether only kernels of ScoreModKind::kRuntime, in both passes, compute the problem.
bool needs_runtime_kernel(const Problem& problem);
// Whether a block mask is all that the problem has beside a scale and a mask by position.
bool has_block_mask_alone(const Problem& problem);
// Whether a dense bias is all that the problem has beside a scale and a mask by position, and
// kernels of ScoreModKind::kDenseBias take its type.
bool has_dense_bias_alone(const Problem& problem);
// Suffixes of kernel names, by ScoreModKind.
extern const char* const kScoreModNames[];

// Entries of a dtype and score_mod are in ascending order of head dimensions.
Table<ForwardEntry> forward_table();
Table<ForwardEntry> packed_forward_table();  // see PackedHeads
Table<MlaEntry> mla_table();
Table<BackwardEntry> backward_table();
Table<BackwardEntry> two_warpgroup_backward_table();  // for long Q

}  // namespace flashattn::cuda::sm90
