// Grids and choice of the kernels that combine partial results.
#include "cuda/host/combine.h"

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/host/row_grid.h"

namespace flashattn::cuda {
namespace {

constexpr int kThreads = 32 * kCombineWarps;
constexpr int kMinPartsForCta = 8;  // with fewer parts, one warp combines a row
// More rows keep the device busy with a warp each. H200, 2,048 rows of 128: 7 parts by warps took 7
// us less than 8 by CTAs.
constexpr int64_t kManyRows = 1024;
constexpr int kFewCtas = 512;  // CTAs of the combine kernel: fewer than a GPU runs at once

}  // namespace

cudaError_t combine_waits(bool* waits) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(combine_kernels().by_warp));
  *waits = attributes.ptxVersion >= 90;
  return error;
}

cudaError_t preload_combine_kernels(const Problem& problem) {
  cudaError_t error = cudaSuccess;
  const auto also = [&error](auto... kernels) {
    if (error == cudaSuccess) error = preload(kernels...);
  };
  const CombineKernels combine = combine_kernels();
  if (problem.splits != 1) also(combine.by_warp, combine.tiles);
  if (problem.splits == 0 || problem.splits >= kMinPartsForCta) also(combine.by_cta);
  for (const int32_t dtype : {problem.dtype_o, static_cast<int32_t>(FLASHATTN_DTYPE_F32)}) {
    const MergeKernels merge = merge_kernels(dtype);
    also(merge.unaligned, merge.two_parts, merge.any_parts);
  }
  also(dropout_mask_kernel_of());
  return error;
}

cudaError_t launch_combine(const ForwardParams& params, bool early, cudaStream_t stream) {
  const int64_t all_rows =
      int64_t{params.args.shape.batch} * params.problem.heads_q * params.partial_queries;
  const bool many = params.max_splits >= kMinPartsForCta && all_rows <= kManyRows;
  const int32_t rows = many ? 1 : kCombineWarps,
                log2 = log2_combine_queries(rows, params.partial_queries);
  dim3 grid =
      row_grid(params.args.shape.batch, params.problem.heads_q, params.partial_queries, 1 << log2);
  grid.x = static_cast<unsigned>(ceil_div(grid.x, rows >> log2));
  // A CTA waits for memory once per slice of columns. If CTAs are few, each takes one slice.
  if (int64_t{grid.x} * grid.y <= kFewCtas) {
    grid.z = static_cast<unsigned>(ceil_div(params.problem.dim_v, 128));
  }
  const CombineKernels kernels = combine_kernels();
  return launch_with(early, many ? kernels.by_cta : kernels.by_warp, grid, kThreads, 0, params,
                     stream, 1);
}

cudaError_t launch_combine_tiles(const CombineTilesParams& params, bool early,
                                 cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.tile_q, kCombineWarps)),
                  static_cast<unsigned>(params.stream_k.tiles_split()));
  return launch_with(early, combine_kernels().tiles, grid, kThreads, 0, params, stream, 1);
}

cudaError_t launch_merge(const MergeParams<kMaxMergeParts>& params, cudaStream_t stream) {
  const dim3 grid = row_grid(params.batch, params.heads, params.tokens, kCombineWarps);
  const MergeKernels of = merge_kernels(params.dtype_part);
  const auto kernel = !params.vectors     ? of.unaligned
                      : params.parts <= 2 ? of.two_parts
                                          : of.any_parts;
  return launch_kernel(kernel, grid, kThreads, 0, params, stream);
}

cudaError_t launch_dropout_mask(const Problem& problem, const ForwardArgs& args, uint8_t* keep,
                                cudaStream_t stream) {
  const Shape& shape = args.shape;
  const DropoutMaskParams params{shape.seqlen_q,
                                 shape.seqlen_kv,
                                 problem.dropout_threshold(),
                                 args.inputs.rng_seed,
                                 args.inputs.rng_offset,
                                 args.inputs.rng_device,
                                 keep};
  const dim3 grid = row_grid(shape.batch, problem.heads_q, shape.seqlen_q, 1);
  return launch_kernel(dropout_mask_kernel_of(), grid, kThreads, 0, params, stream);
}

}  // namespace flashattn::cuda
