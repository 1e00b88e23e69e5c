// Finds the tiles of a Hopper backward kernel that a block mask does not hide.
#pragma once

#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

struct BwdBlockMaskKernel {
  int32_t threads;
  void (*kernel)(BackwardParams);
};

// Fills params.block_mask and, for Q tiles, sets dq_states to the number of KV tiles that they see.
// A CTA for each Q word of the longest sequence, each head and each sequence, or of those that
// share their bits the first.
BwdBlockMaskKernel bwd_block_mask_kernel();

}  // namespace flashattn::cuda::sm90
