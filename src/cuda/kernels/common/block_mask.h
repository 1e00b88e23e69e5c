// Makes a block mask in the workspace: see BlockMaskRows.
#pragma once

#include "core/block_mask_rows.h"

namespace flashattn::cuda {

struct BlockMaskParams {
  BlockMaskArgs args;
  BlockMaskRows mask;
  uint8_t* base;
};

constexpr int kBlockMaskThreads = 128;

// A CTA a row.
using BlockMaskKernel = void (*)(BlockMaskParams);
BlockMaskKernel block_mask_kernel();

}  // namespace flashattn::cuda
