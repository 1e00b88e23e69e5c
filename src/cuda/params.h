// What the host hands to the kernels, by value.
#pragma once

#include "core/sequence.h"

namespace flashattn::cuda {

struct ForwardParams {
  Problem problem;
  flashattn_forward_args args;
  SplitRule split;
  // A block of the grid works on `queries` queries of `heads` query heads: row r is query r %
  // queries of head r / queries. Several heads of a group share a block when queries are few.
  int32_t queries, heads, head_blocks, query_blocks;
  // Units of work that share keys, (batch, KV head, head block), are taken a section at a time,
  // whose keys and values fit the L2 cache.
  int32_t section;
  int32_t parts;  // of the sequence with the most
  // Partial results, (part, batch, head, query), of sequences with several parts: fp32.
  int32_t partial_queries;
  float* partial_o;
  float* partial_lse;
  uint32_t dropout_threshold;

  FLASHATTN_HD int64_t units() const {
    return static_cast<int64_t>(args.shape.batch) * problem.heads_kv * head_blocks;
  }

  FLASHATTN_HD int64_t blocks() const { return units() * query_blocks * parts; }

  FLASHATTN_HD int64_t partial_row(int32_t part, int32_t b, int32_t h, int32_t i) const {
    return ((static_cast<int64_t>(part) * args.shape.batch + b) * problem.heads_q + h) *
               partial_queries +
           i;
  }
};

// Merges the parts of a split forward, or the caller's.
template <int kCapacity>
struct MergeParams {
  flashattn_tensor o;
  float* lse;  // may be NULL
  RowLayout lse_layout;
  int32_t dtype, part_dtype, dim, heads, batch;
  int64_t tokens;
  int32_t parts;
  flashattn_tensor part_o[kCapacity];
  const float* part_lse[kCapacity];
};

}  // namespace flashattn::cuda
