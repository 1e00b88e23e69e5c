// q, k and v to E4M3, with transforms: flashattn_quantize.
#pragma once

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

namespace quantize {

constexpr int kVector = 8;  // columns that a thread has
constexpr int kMaxThreads = 512;
constexpr int kAhead = 8;           // rows that a thread loads ahead
constexpr int kMaxCtas = 16;        // CTAs of a cluster
constexpr int kControlBytes = 256;  // of shared memory, before the rows
constexpr int kMeanThreads = 512;
constexpr int kMeanColumns = 16;  // columns of a CTA: a 32-byte sector of 16-bit elements

}  // namespace quantize

struct QuantizeKernels {
  using Kernel = void (*)(QuantizeParams);
  Kernel any, plain;  // plain: see quantize_kernel
  Kernel k_mean;
};
// dtype: of the input.
QuantizeKernels quantize_kernels(int32_t dtype);

}  // namespace flashattn::cuda
