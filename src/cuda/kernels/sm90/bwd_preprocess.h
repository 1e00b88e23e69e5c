// The preprocess kernel of the Hopper backward pass, for backward kernels that start before it
// ends.
#pragma once

#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

constexpr int32_t kBoxRows = 32;  // rows of a TMA box of O and dO: one warp's work

struct BwdPreprocessParams {
  CUtensorMap o, dout;  // (column, row, head, batch), boxes of kBoxRows
  cuda::BackwardParams common;
  int32_t max_q_tiles;    // Q tiles of the longest sequence, tile_q queries each
  FastDivmod head_boxes;  // boxes per head of a sequence
  FastDivmod heads_q;
  int32_t heads;        // batch * heads_q
  int32_t first_heads;  // preprocessed by all CTAs together, before the backward kernel starts
  int32_t tail_ctas;    // CTA n of these preprocesses heads first_heads + n + i * tail_ctas, i >= 0
  PreprocessProgress* progress;
  uint64_t stamp;
};

// The grid is at most one CTA per multiprocessor, and at least tail_ctas.
struct BwdPreprocessKernel {
  int32_t threads, shared_bytes;
  void (*kernel)(BwdPreprocessParams);
};

// dtype: f16 or bf16. dim_v: at most 256.
BwdPreprocessKernel bwd_preprocess_kernel(int32_t dtype, int32_t dim_v);

}  // namespace flashattn::cuda::sm90
