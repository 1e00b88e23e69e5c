#include "cuda/kernels/common/combine.h"

#include "core/philox.h"
#include "cuda/host/row_grid.h"
#include "cuda/host/preload.h"
#include "cuda/host/launch.h"
#include "cuda/host/schedule/warpgroup_rows.h"
#include "cuda/kernels/common/combine_rows.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMinPartsForCta = 8;  // with fewer parts, one warp combines a row
// More rows keep the device busy with a warp each. H200, 2,048 rows of 128: 7 parts by warps took 7
// us less than 8 by CTAs.
constexpr int64_t kManyRows = 1024;
constexpr int kLoads = 8;      // parts of a row in flight per warp
constexpr int kFewCtas = 512;  // CTAs of the combine kernel: fewer than a GPU runs at once

// log2 of the queries of one head that a CTA of `rows` rows combines; its other rows belong to the
// next heads.
FLASHATTN_HD constexpr int32_t log2_queries(int32_t rows, int32_t queries) {
  return rows == 1 || queries <= 1 ? 0 : queries == 2 ? 1 : 2;
}

// Combines the KV splits of a forward pass. Rows of O are aligned as for the forward kernels. Grid:
// heads of all sequences, queries, slices of columns.
template <int kWarpsPerRow>
__global__ void __launch_bounds__(32 * kWarps, 1)
    combine_kernel(const __grid_constant__ ForwardParams params) {
  constexpr int32_t kRows = kWarps / kWarpsPerRow;
  const ForwardArrays& args = params.args;
  const int32_t heads = params.problem.heads_q, row = threadIdx.x / (32 * kWarpsPerRow);
  const int32_t log2 = log2_queries(kRows, params.partial_queries), queries = 1 << log2;
  const int32_t head = blockIdx.x * (kRows >> log2) + (row >> log2);
  const int32_t b = head / heads, h = head % heads;
  const bool is_head = kRows == 1 || b < args.shape.batch;  // the last CTA may have fewer
  const SeqlenInfo sequence = seqlen_info(params.problem, args.shape, args.inputs, is_head ? b : 0);
  const int32_t parts = split_count(params.split, sequence.len);
  // Waits for the forward kernel. Nothing above reads its results. CTAs with nothing to combine
  // wait, too: the next kernel of the stream relies on both being complete.
  ptx::griddep_wait();
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

template <class Part>
struct MergeKernels {
  static constexpr auto kUnaligned = &merge_kernel<Part, kLoads, false>;
  static constexpr auto kTwoParts = &merge_kernel<Part, 2, true>;
  static constexpr auto kAnyParts = &merge_kernel<Part, kLoads, true>;
};

// Calls use(MergeKernels<T>()) with the type of the parts.
template <class Use>
auto with_merge_kernels(int32_t dtype_part, Use use) {
  switch (dtype_part) {
    case FLASHATTN_DTYPE_F16: return use(MergeKernels<__half>());
    case FLASHATTN_DTYPE_BF16: return use(MergeKernels<__nv_bfloat16>());
    default: return use(MergeKernels<float>());
  }
}

struct DropoutMaskParams {
  int32_t queries, keys;
  uint32_t threshold;
  uint64_t seed, offset;
  const uint64_t* rng_device;  // may be NULL
  uint8_t* keep;
};

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

cudaError_t combine_waits(bool* waits) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&combine_kernel<1>));
  *waits = attributes.ptxVersion >= 90;
  return error;
}

cudaError_t preload_combine_kernels(const Problem& problem) {
  cudaError_t error = cudaSuccess;
  const auto also = [&error](auto... kernels) {
    if (error == cudaSuccess) error = preload(kernels...);
  };
  if (problem.splits != 1) also(&combine_kernel<1>, &combine_tiles_kernel);
  if (problem.splits == 0 || problem.splits >= kMinPartsForCta) also(&combine_kernel<kWarps>);
  for (const int32_t dtype : {problem.dtype_o, static_cast<int32_t>(FLASHATTN_DTYPE_F32)}) {
    with_merge_kernels(dtype, [&](auto of) { also(of.kUnaligned, of.kTwoParts, of.kAnyParts); });
  }
  also(&dropout_mask_kernel);
  return error;
}

cudaError_t launch_combine(const ForwardParams& params, bool early, cudaStream_t stream) {
  const int64_t all_rows =
      int64_t{params.args.shape.batch} * params.problem.heads_q * params.partial_queries;
  const bool many = params.max_splits >= kMinPartsForCta && all_rows <= kManyRows;
  const int32_t rows = many ? 1 : kWarps, log2 = log2_queries(rows, params.partial_queries);
  dim3 grid =
      row_grid(params.args.shape.batch, params.problem.heads_q, params.partial_queries, 1 << log2);
  grid.x = static_cast<unsigned>(ceil_div(grid.x, rows >> log2));
  // A CTA waits for memory once per slice of columns. If CTAs are few, each takes one slice.
  if (int64_t{grid.x} * grid.y <= kFewCtas) {
    grid.z = static_cast<unsigned>(ceil_div(params.problem.dim_v, 128));
  }
  const auto kernel = many ? &combine_kernel<kWarps> : &combine_kernel<1>;
  return early ? launch_pdl(kernel, grid, 32 * kWarps, 0, params, stream)
               : launch_kernel(kernel, grid, 32 * kWarps, 0, params, stream);
}

cudaError_t launch_combine_tiles(const CombineTilesParams& params, bool early,
                                 cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.tile_q, kWarps)),
                  static_cast<unsigned>(params.stream_k.tiles_split()));
  return early ? launch_pdl(&combine_tiles_kernel, grid, 32 * kWarps, 0, params, stream)
               : launch_kernel(&combine_tiles_kernel, grid, 32 * kWarps, 0, params, stream);
}

cudaError_t launch_merge(const MergeParams<kMaxMergeParts>& params, cudaStream_t stream) {
  const dim3 grid = row_grid(params.batch, params.heads, params.tokens, kWarps);
  const auto kernel = with_merge_kernels(params.dtype_part, [&params](auto of) {
    return !params.vectors ? of.kUnaligned : params.parts <= 2 ? of.kTwoParts : of.kAnyParts;
  });
  return launch_kernel(kernel, grid, 32 * kWarps, 0, params, stream);
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
  return launch_kernel(&dropout_mask_kernel, grid, 32 * kWarps, 0, params, stream);
}

}  // namespace flashattn::cuda
