// q, k and v to E4M3, with transforms: flashattn_quantize.
#pragma once

#include <cuda_runtime_api.h>

#include "core/call.h"
#include "core/problem.h"

namespace flashattn::cuda {

constexpr int32_t kMaxQuantizeDim = 256;  // a row is a warp's, 8 elements a lane

// One of q, k and v.
struct QuantizeOperand {
  flashattn_tensor in, out, descale;
  bool is_q, is_k;
  bool vectors;  // 8 elements can be loaded and stored at once
  int32_t heads, dim, dtype_out;
  int32_t tokens, blocks;            // tokens of a block; blocks of the longest sequence
  int32_t log2_lanes, log2_ctas;     // lanes of a row; CTAs of a cluster that share a block
  int32_t row_step, row_step_heads;  // rows from one row of a thread to its next: tokens, heads
  uint32_t first_cta;
};

struct QuantizeParams {
  Problem problem;
  QuantizeArgs args;
  QuantizeOperand operands[3];
  int32_t slots;  // rows of a thread that fit in shared memory
};
static_assert(sizeof(QuantizeParams) <= 4096, "kernel parameters of any toolkit and driver");

// The resources of a device that the kernels may use.
struct QuantizeLimits {
  int32_t multiprocessors, shared_bytes;
  int32_t max_ctas;  // CTAs of a cluster
};

// Loads the kernels, and fills limits->max_ctas.
cudaError_t ready_quantize_kernels(QuantizeLimits* limits);
cudaError_t launch_quantize(const Problem& problem, const QuantizeArgs& args,
                            const QuantizeLimits& limits, cudaStream_t stream);

}  // namespace flashattn::cuda
