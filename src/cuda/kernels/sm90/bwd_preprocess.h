// The preparation of the Hopper backward pass, for kernels that begin before it has ended.
#pragma once

#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

constexpr int32_t kBoxRows = 32;  // of O and dO, a warp's at a time

struct PrepareParams {
  CUtensorMap o, dout;  // (column, row, head, batch), boxes of kBoxRows
  cuda::BackwardParams common;
  int32_t tiles;     // of a head of a sequence, tile_q queries each
  FastDivmod boxes;  // of a head of a sequence
  FastDivmod heads_q;
  int32_t heads;        // of all sequences
  int32_t first_heads;  // of those all blocks prepare a part, before the next kernel starts
  int32_t preparers;    // blocks that then prepare the others, whole heads in turn
  Preparation* prepared;
  uint64_t stamp;
};

// Blocks: no more than multiprocessors, no fewer than preparers.
struct PrepareKernel {
  int32_t threads, shared_bytes;
  void (*kernel)(PrepareParams);
};

// For f16 or bf16, and heads of O of up to 128.
PrepareKernel prepare_kernel(int32_t dtype, int32_t dim_v);

}  // namespace flashattn::cuda::sm90
