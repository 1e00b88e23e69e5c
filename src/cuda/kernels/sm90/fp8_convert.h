// Converts rows of q, k and v, or of their gradients, between types: around the 16-bit backward
// kernels where q, k and v are E4M3.
#pragma once

#include <cuda_runtime_api.h>

#include "core/call.h"
#include "core/problem.h"

namespace flashattn::cuda::sm90 {

// One array. E4M3, F16 or BF16 becomes F16, BF16 or F32.
struct ConvertOperand {
  flashattn_tensor from, to, descale;  // descale: data NULL: 1
  int32_t dtype_from, dtype_to;
  bool is_q;  // has the rows and heads of q
  int32_t heads, dim, seqlen;
  // Filled by launch_convert().
  int32_t log2_lanes, tiles;
  int64_t first_cta;
};

struct ConvertParams {
  Problem problem;  // its lengths, heads_kv and descale_block are used
  Shape shape;
  Inputs inputs;  // lengths
  ConvertOperand operands[3];
};
static_assert(sizeof(ConvertParams) <= 4096, "kernel parameters of any toolkit and driver");

cudaError_t preload_convert();
// Vectors of 8 elements must be aligned in all arrays. One launch; rows past a sequence's length
// are neither read nor written.
cudaError_t launch_convert(ConvertParams params, cudaStream_t stream);

}  // namespace flashattn::cuda::sm90
