// Grids of the kernels before and after the backward pass.
#include "cuda/host/bwd_rows.h"

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/host/row_grid.h"

namespace flashattn::cuda {
namespace {

// With sequences of different lengths, this many times as many CTAs are launched, so that long
// sequences end with the others. (Lengths up to twice the mean, D = 128, H200: 117 us with as many
// CTAs as run at once; 8 times as many are not measured.)
constexpr unsigned kUnevenCtas = 8;

dim3 grid_for(const BwdRowKernel& kernel, const BackwardParams& params) {
  const Shape& shape = params.args.shape;
  return row_grid(shape.batch, params.problem.heads_q, shape.seqlen_q, kernel.rows);
}

}  // namespace

cudaError_t preload_bwd_preprocess(const Problem& problem) {
  return preload(bwd_preprocess_rows(problem).kernel);
}

cudaError_t preload_bwd_postprocess(const Problem& problem) {
  const cudaError_t error = preload(bwd_postprocess_rows(problem).kernel);
  const bool sink = problem.has_feature(FLASHATTN_FEATURE_DSINK);
  return error == cudaSuccess && sink ? preload(dsink_kernel_of(problem)) : error;
}

cudaError_t preload_clear_dbias() { return preload(clear_dbias_kernel_of()); }

cudaError_t launch_bwd_preprocess(const BackwardParams& params, int32_t multiprocessors,
                                  cudaStream_t stream) {
  const BwdRowKernel kernel = bwd_preprocess_rows(params.problem);
  dim3 grid = grid_for(kernel, params);
  const bool uneven =
      params.problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) || params.args.inputs.lens_q != nullptr;
  const unsigned most = static_cast<unsigned>(multiprocessors * kernel.ctas_per_sm) *
                        (uneven ? kUnevenCtas : 1) / std::max(grid.x, 1u);
  grid.y = std::min(grid.y, std::max(most, 1u));
  // tile_q is set on Hopper, where the kernel may start before the preceding one has ended.
  return launch_with(params.tile_q != 0, kernel.kernel, grid, kRowThreads, 0, params, stream, 1);
}

cudaError_t launch_bwd_postprocess(const BackwardParams& params, cudaStream_t stream) {
  const BwdRowKernel kernel = bwd_postprocess_rows(params.problem);
  return launch_kernel(kernel.kernel, grid_for(kernel, params), kRowThreads, 0, params, stream);
}

cudaError_t launch_clear_dbias(const BackwardParams& params, int32_t multiprocessors,
                               cudaStream_t stream) {
  constexpr int kCtasPerSm = 8;
  const int64_t ctas = std::min<int64_t>(dbias_rows(params), int64_t{multiprocessors} * kCtasPerSm);
  return launch_kernel(clear_dbias_kernel_of(), dim3(static_cast<unsigned>(ctas)), kRowThreads, 0,
                       params, stream);
}

cudaError_t launch_dsink(const BackwardParams& params, cudaStream_t stream) {
  return launch_kernel(dsink_kernel_of(params.problem),
                       dim3(static_cast<unsigned>(params.problem.heads_q)), kRowThreads, 0, params,
                       stream);
}

}  // namespace flashattn::cuda
