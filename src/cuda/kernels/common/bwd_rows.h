// The kernels before and after the backward pass.
#pragma once

#include "cuda/params.h"

namespace flashattn::cuda {

// Threads of a CTA of these kernels.
constexpr int kRowThreads = 128;

using BackwardKernel = void (*)(BackwardParams);

// CTAs take `rows` rows of a head of a sequence at once.
struct BwdRowKernel {
  BackwardKernel kernel;
  int32_t rows;
  int32_t ctas_per_sm;  // no more need be launched; 0: one for all rows
};

// Writes lse2, delta and base, and dO rounded to the problem's dtype where that differs from dO's.
// Clears dq and dq_order, or sets dq_states and dq_first; clears the work counters.
BwdRowKernel bwd_preprocess_rows(const Problem& problem);
// Scales the fp32 sums of dq, converts them and writes args.dq.
BwdRowKernel bwd_postprocess_rows(const Problem& problem);
// Writes args.dsink from lse2, delta and base. One CTA per head.
BackwardKernel dsink_kernel_of(const Problem& problem);
// Clears args.dbias, of dbias_rows().
BackwardKernel clear_dbias_kernel_of();

// Rows of the gradient of the bias, over (sequence, head, query).
FLASHATTN_HD int64_t dbias_rows(const BackwardParams& params) {
  const BackwardArgs& args = params.args;
  const auto extent = [](int64_t stride, int64_t count) { return stride == 0 ? 1 : count; };
  return extent(args.dbias_stride_row, args.shape.seqlen_q) *
         extent(args.dbias_stride_head, params.problem.heads_q) *
         extent(args.dbias_stride_batch, args.shape.batch);
}

}  // namespace flashattn::cuda
