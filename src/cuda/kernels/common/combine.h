// Combining of KV splits, merging of the caller's partial results, and the dropout mask.
#pragma once

#include "cuda/host/schedule/stream_k.h"
#include "cuda/params.h"

namespace flashattn::cuda {

// The most parts that one launch for flashattn_merge takes; limited by the size of kernel
// parameters.
constexpr int32_t kMaxMergeParts = 64;

constexpr int kCombineWarps = 4;  // of a CTA of these kernels

// log2 of the queries of one head that a CTA of `rows` rows combines; its other rows belong to the
// next heads.
FLASHATTN_HD constexpr int32_t log2_combine_queries(int32_t rows, int32_t queries) {
  return rows == 1 || queries <= 1 ? 0 : queries == 2 ? 1 : 2;
}

// The tiles of a forward pass that stream-K has split: Q tiles in the order of `swizzle`, of heads
// (batch, query head), see warpgroups_of_tile(). All sequences have shape.seqlen_q queries.
struct CombineTilesParams {
  Problem problem;
  ForwardArrays args;
  StreamK stream_k;
  L2Swizzle swizzle;
  int32_t tile_q;
  // (partial, row of the tile)
  const float* partial_o;
  const PartialSum* partial_sums;
};

struct CombineKernels {
  void (*by_warp)(ForwardParams);  // a warp combines a row
  void (*by_cta)(ForwardParams);
  void (*tiles)(CombineTilesParams);
};
CombineKernels combine_kernels();

struct MergeKernels {
  using Kernel = void (*)(MergeParams<kMaxMergeParts>);
  Kernel unaligned, two_parts, any_parts;
};
MergeKernels merge_kernels(int32_t dtype_part);

struct DropoutMaskParams {
  int32_t queries, keys;
  uint32_t threshold;
  uint64_t seed, offset;
  const uint64_t* rng_device;  // may be NULL
  uint8_t* keep;
};

using DropoutMaskKernel = void (*)(DropoutMaskParams);
DropoutMaskKernel dropout_mask_kernel_of();

}  // namespace flashattn::cuda
