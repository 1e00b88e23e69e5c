// The preparation of the Hopper backward pass, for kernels that begin before it has ended.
#pragma once

#include <cuda.h>

#include "cuda/params.h"

namespace flashattn::cuda::sm90 {

constexpr int32_t kBoxRows = 32;  // of O and dO, a warp's at a time
constexpr int32_t kBoxPanelBytes = 2 * kBoxRows * 128;
constexpr int32_t kMostPreparers = 12;

struct PrepareParams {
  CUtensorMap o, dout;  // (column, row, head, batch), boxes of kBoxRows
  cuda::BackwardParams common;
  int32_t panels;  // of 64 columns of O
  int32_t tiles;   // of a head of a sequence, tile_q queries each
  Divisor boxes;   // of a head of a sequence
  Divisor heads_q;
  int32_t heads;        // of all sequences
  int32_t first_heads;  // of those all blocks prepare a part, before the next kernel starts
  int32_t preparers;    // blocks that then prepare the others, whole heads in turn
  // Of each, kMostPreparers: the head, b * heads_q + h, before which it has nothing left to do.
  int32_t* prepared;
};

// Each has a box at work and one warp more tells how far all are.
constexpr int32_t prepare_warps(int32_t panels) {
  return panels == 1 ? 24 : 224 * 1024 / (panels * kBoxPanelBytes);
}
constexpr int32_t prepare_threads(int32_t panels) { return 32 * (prepare_warps(panels) + 1); }
constexpr int32_t prepare_shared_bytes(int32_t panels) {
  return prepare_warps(panels) * panels * kBoxPanelBytes + 1024;
}

// For a problem's dtype: f16 or bf16. Blocks: no more than multiprocessors, no fewer than
// preparers.
void (*prepare_kernel(int32_t dtype))(PrepareParams);

}  // namespace flashattn::cuda::sm90
