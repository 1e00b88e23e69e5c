#include "cuda/kernels/common/combine.h"

#include "core/philox.h"
#include "cuda/host/schedule/warpgroup_rows.h"
#include "cuda/kernels/common/combine_rows.cuh"
#include "cuda/kernels/common/with_type.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kWarps = kCombineWarps;
constexpr int kLoads = 8;  // parts of a row in flight per warp

// Combines the KV splits of a forward pass. Rows of O are aligned as for the forward kernels. Grid:
// heads of all sequences, queries, slices of columns.
template <int kWarpsPerRow>
__global__ void __launch_bounds__(32 * kWarps, 1)
    combine_kernel(const __grid_constant__ ForwardParams params) {
  constexpr int32_t kRows = kWarps / kWarpsPerRow;
  const ForwardArrays& args = params.args;
  const int32_t heads = params.problem.heads_q, row = threadIdx.x / (32 * kWarpsPerRow);
  const int32_t log2 = log2_combine_queries(kRows, params.partial_queries), queries = 1 << log2;
  const int32_t head = blockIdx.x * (kRows >> log2) + (row >> log2);
  const int32_t b = head / heads, h = head % heads;
  const bool is_head = kRows == 1 || b < args.shape.batch;  // the last CTA may have fewer
  // Lengths are complete: where there are any, the forward kernel has not started early.
  const SeqlenInfo sequence = seqlen_info(params.problem, args.shape, args.inputs, is_head ? b : 0);
  const int32_t parts = split_count(params.split, sequence.len);
  // Waits for the forward kernel. Nothing above reads its results. CTAs with nothing to combine
  // wait, too: the next kernel of the stream relies on both being complete.
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (parts <= 1 || !is_head) return;
  const int64_t stride = params.partial_row(1, 0, 0, 0);
  const RowLayout layout = row_layout(params.problem, args.shape);
  const float keep_scale = Dropout::keep_scale(params.dropout_threshold);
  for (int32_t i = blockIdx.y * queries + (row & (queries - 1)); i < sequence.len.q;
       i += gridDim.y * queries) {
    const int64_t first = params.partial_row(0, b, h, i), token = sequence.offset_q + i;
    combine_row<kWarpsPerRow, kLoads, true>(
        {parts, params.problem.dim_v, params.problem.dtype_o,
         tensor_row(args.o, dtype_size(params.problem.dtype_o), b, h, token),
         args.lse ? args.lse + b * layout.batch_stride + h * layout.head_stride + token : nullptr,
         static_cast<int32_t>(blockIdx.z), static_cast<int32_t>(gridDim.z)},
        [&](int32_t p) { return params.partial_sums[first + p * stride]; },
        [&](int32_t p, int32_t column) {
          return load_vec4<true>(params.partial_o + (first + p * stride) * params.problem.dim_v +
                                 column);
        },
        keep_scale);
  }
}

// Combines the partial results of stream-K, a warp per row. Grid: rows of a tile, tiles.
__global__ void __launch_bounds__(32 * kWarps, 12)
    combine_tiles_kernel(const __grid_constant__ CombineTilesParams params) {
  const ForwardArrays& args = params.args;
  const int32_t split_tile = blockIdx.y, row = blockIdx.x * kWarps + threadIdx.x / 32;
  const StreamK::Partials partials = params.stream_k.partials_of(split_tile);
  const L2Swizzle::Tile position = params.swizzle.tile(params.stream_k.whole_tiles + split_tile);
  const int32_t queries = args.shape.seqlen_q;
  const Interval warpgroups = warpgroups_of_tile(
      static_cast<int32_t>(ceil_div(queries, kWarpgroupRows)), params.tile_q / kWarpgroupRows,
      params.swizzle.tiles - 1 - position.tile_idx);
  const int32_t i = warpgroups.begin * kWarpgroupRows + row;
  const int32_t b = position.head_idx / params.problem.heads_q,
                h = position.head_idx - b * params.problem.heads_q;
  const RowLayout layout = row_layout(params.problem, args.shape);
  // Nothing above reads results of the forward kernel.
  ptx::griddep_wait();
  if (i >= min(warpgroups.end * kWarpgroupRows, queries)) return;
  const int64_t first = static_cast<int64_t>(partials.first) * params.tile_q + row;
  combine_row<1, 2, true>(
      {partials.count, params.problem.dim_v, params.problem.dtype_o,
       tensor_row(args.o, dtype_size(params.problem.dtype_o), b, h, i),
       args.lse ? args.lse + b * layout.batch_stride + h * layout.head_stride + i : nullptr, 0, 1},
      [&](int32_t p) { return params.partial_sums[first + int64_t{p} * params.tile_q]; },
      [&](int32_t p, int32_t column) {
        return load_vec4<true>(params.partial_o +
                               (first + int64_t{p} * params.tile_q) * params.problem.dim_v +
                               column);
      },
      1.0f);
}

// Merges the caller's partial results (flashattn_merge), a warp per row: throughput depends on the
// bytes in flight over all rows.
template <class Part, int kLoads, bool kAligned>
__global__ void __launch_bounds__(32 * kWarps, kLoads > 2 ? 6 : 12)
    merge_kernel(const __grid_constant__ MergeParams<kMaxMergeParts> params) {
  const int32_t b = blockIdx.x / params.heads, h = blockIdx.x % params.heads;
  for (int64_t token = blockIdx.y * kWarps + threadIdx.x / 32; token < params.tokens;
       token += gridDim.y * kWarps) {
    const int64_t at =
        b * params.lse_layout.batch_stride + h * params.lse_layout.head_stride + token;
    combine_row<1, kLoads, kAligned>(
        {params.parts, params.dim, params.dtype,
         tensor_row(params.o, dtype_size(params.dtype), b, h, token),
         params.lse ? params.lse + at : nullptr, 0, 1},
        [&](int32_t p) { return PartialSum{params.part_lse[p][at], 1.0f}; },
        [&](int32_t p, int32_t column) {
          return load_vec4<kAligned>(reinterpret_cast<const Part*>(
                                         tensor_row(params.part_o[p], sizeof(Part), b, h, token)) +
                                     column);
        },
        1.0f);
  }
}

// One CTA per row of the mask at a time.
__global__ void __launch_bounds__(32 * kWarps, 1)
    dropout_mask_kernel(const __grid_constant__ DropoutMaskParams params) {
  const uint64_t* rng = params.rng_device;
  const DropoutStream stream = DropoutStream::make(params.seed + (rng ? rng[0] : 0),
                                                   params.offset + (rng ? rng[1] : 0), blockIdx.x);
  for (int32_t i = blockIdx.y; i < params.queries; i += gridDim.y) {
    uint8_t* row =
        params.keep + (static_cast<int64_t>(blockIdx.x) * params.queries + i) * params.keys;
    for (int32_t j = threadIdx.x; j < params.keys; j += blockDim.x) {
      row[j] = stream.number(i, j) >= params.threshold;
    }
  }
}

}  // namespace

CombineKernels combine_kernels() {
  return {&combine_kernel<1>, &combine_kernel<kWarps>, &combine_tiles_kernel};
}

MergeKernels merge_kernels(int32_t dtype_part) {
  return with_type(dtype_part, [](auto number) {
    using Part = decltype(number);
    return MergeKernels{&merge_kernel<Part, kLoads, false>, &merge_kernel<Part, 2, true>,
                        &merge_kernel<Part, kLoads, true>};
  });
}

DropoutMaskKernel dropout_mask_kernel_of() { return &dropout_mask_kernel; }

}  // namespace flashattn::cuda
