// Block masks from lists of blocks, and beside lengths of blocks. A CTA makes a row in shared
// memory, some columns after the other, so that global memory is written once, in whole vectors.
#include "cuda/kernels/common/block_mask.h"

#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kColumns = 4096;  // made at once

// For 9.0 ptxas would take 40 registers, and spill, without a number of CTAs.
__global__ void __launch_bounds__(kBlockMaskThreads, 8)
    make_block_mask(const __grid_constant__ BlockMaskParams params) {
  ptx::griddep_launch_dependents();  // the next kernel waits until this one has ended
  __shared__ uint4 vectors_made[kColumns / 16];
  uint8_t* const made = reinterpret_cast<uint8_t*>(vectors_made);
  const BlockMaskArgs& args = params.args;
  const BlockMaskRows& mask = params.mask;
  const auto columns = static_cast<int32_t>(mask.columns);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // In 32 bits, as divisions in 64 are calls.
  const auto rows = static_cast<uint32_t>(mask.rows), heads = static_cast<uint32_t>(mask.heads);
  const uint32_t head = blockIdx.x / rows, y = blockIdx.x - head * rows;
  const uint32_t b = head / heads, h = head - b * heads;
  uint8_t* const row = mask.row(params.base, b, h, y);
  const uint8_t* const given = static_cast<const uint8_t*>(args.mask.data) +
                               b * args.mask.stride_batch + h * args.mask.stride_head +
                               y * args.mask.stride_seq;
  BlockList list{nullptr, 0};
  if (!args.mask.data) list = block_list(args, b, h, y);
  for (int32_t first = 0; first < columns; first += kColumns) {
    const int32_t here = min(columns - first, kColumns), vectors = (here + 15) / 16;
    __syncthreads();  // the columns before have been stored
    for (int32_t n = thread; n < vectors; n += kBlockMaskThreads) {
      vectors_made[n] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (args.mask.data) {
      for (int32_t x = thread; x < here; x += kBlockMaskThreads) {
        if (given[first + x]) made[x] = block_byte(args, mask, b, h, first + x);
      }
    }
    for (int64_t n = thread; n < list.count; n += kBlockMaskThreads) {
      const int64_t x = int64_t{list.entries[n]} - first;
      if (x >= 0 && x < here) made[x] = block_byte(args, mask, b, h, first + x);
    }
    __syncthreads();
    for (int32_t n = thread; n < vectors; n += kBlockMaskThreads) {
      reinterpret_cast<uint4*>(row + first)[n] = vectors_made[n];
    }
  }
  if (!mask.has_lens || y > 0) return;
  int32_t* const lens = mask.lens(params.base, b, h);
  for (int32_t x = thread; x < columns; x += kBlockMaskThreads) {
    lens[x] = block_len(args, mask, b, h, x);
  }
}

}  // namespace

BlockMaskKernel block_mask_kernel() { return make_block_mask; }

}  // namespace flashattn::cuda
