// q, k and v to E4M3, with transforms: flashattn_quantize.
#pragma once

#include "core/call.h"
#include "core/fast_divmod.h"
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
  // The fields below are quantize_stream_kernel's.
  int32_t first_block;
  int32_t log2_inner, log2_tokens;  // heads and tokens of a step of all threads
  FastDivmod per_block;             // blocks
};

// The grid of quantize_stream_kernel.
struct QuantizeStream {
  int32_t blocks, first;   // of all operands; the one to begin with
  FastDivmod per_kv_head;  // KV heads
  int32_t log2_ctas;       // CTAs of a cluster, which share a block
  int32_t kept_chunks;     // of rows of a thread in the largest block
  int32_t control_bytes;   // of shared memory, before the rows
  int32_t ahead_chunks;    // that a thread loads ahead: 2 or 3
  int32_t mean_offset;     // in the control bytes: of three tables of the mean of k
  int32_t mean_bytes;      // of a table
};

struct QuantizeParams {
  Problem problem;
  QuantizeArgs args;
  QuantizeOperand operands[3];
  int32_t slots;  // rows of a thread that fit in shared memory
  QuantizeStream stream;
  int32_t mean_ctas;  // of a cluster of k_mean_kernel
};
static_assert(sizeof(QuantizeParams) <= 4096, "kernel parameters of any toolkit and driver");

namespace quantize {

constexpr int kVector = 8;  // columns that a thread has
constexpr int kMaxThreads = 512;
constexpr int kMaxThreadsOfSome = 256;                   // where blocks are partly loaded again
constexpr int kAhead = 8;                                // rows that a thread loads ahead
constexpr int kMaxCtas = 16;                             // CTAs of a cluster
constexpr int kControlBytes = 256;                       // of shared memory, before the rows
constexpr int kLog2Chunk = 2, kChunk = 1 << kLog2Chunk;  // rows that a thread moves at a time
constexpr int kAheadChunks = 3, kFewAheadChunks = 2;     // that a thread loads ahead
constexpr int kExchangeBarrierBytes = 32;
constexpr int kMeanKeys = 64;  // keys that are summed in fp32, as on the CPU
constexpr int kMeanCtas = 16;  // CTAs of a cluster that share a head

// The shared memory of k_mean_kernel.
struct MeanStorage {
  uint64_t barrier;  // counts the bytes of cta_sums
  double warp_sums[kMaxThreads / 32][kMaxQuantizeDim];
  double cta_sums[kMeanCtas][kMaxQuantizeDim];  // of the cluster's first CTA
};

}  // namespace quantize

using QuantizeKernel = void (*)(QuantizeParams);
struct QuantizeStreamKernels {
  QuantizeKernel plain, transforms, some;  // some: see Kept
};
// dtype: of the input.
QuantizeKernel quantize_any_kernel(int32_t dtype);
QuantizeStreamKernels quantize_stream_kernels(int32_t dtype);
QuantizeKernel k_mean_kernel(int32_t dtype);

}  // namespace flashattn::cuda
