// The grid of the kernels of flashattn_quantize: tokens, clusters and shared memory of a block.
#include "cuda/host/quantize.h"

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"

namespace flashattn::cuda {
namespace {

using namespace quantize;

constexpr int kMinThreads = 64;

// The most shared memory, in bytes, that each of two CTAs on a multiprocessor may have.
int32_t shared_of_two(const QuantizeLimits& limits) { return limits.shared_bytes / 2 - 1024; }

}  // namespace

cudaError_t ready_quantize_kernels(QuantizeLimits* limits) {
  cudaError_t error = cudaSuccess;
  const auto then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  limits->max_ctas = kMaxCtas;
  for (const int32_t dtype : {FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16}) {
    const QuantizeKernels of = quantize_kernels(dtype);
    then(preload(of.k_mean));
    for (const QuantizeKernels::Kernel each : {of.any, of.plain}) {
      const void* const kernel = reinterpret_cast<const void*>(each);
      cudaFuncAttributes attributes{};
      then(cudaFuncGetAttributes(&attributes, kernel));
      then(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                limits->shared_bytes));
      // Code compiled from older PTX cannot run in clusters.
      if (error != cudaSuccess || attributes.ptxVersion < 90) {
        limits->max_ctas = 1;
        break;
      }
      then(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      // Every device with clusters has those of 8.
      const int clusters = active_clusters(kernel, kMaxCtas, kMaxThreads, limits->shared_bytes);
      if (4 * kMaxCtas * clusters < 3 * limits->multiprocessors) {
        limits->max_ctas = std::min(limits->max_ctas, 8);
      }
    }
  }
  return error;
}

cudaError_t launch_quantize(const Problem& problem, const QuantizeArgs& args,
                            const QuantizeLimits& limits, cudaStream_t stream) {
  const Shape& shape = args.shape;
  const Inputs& in = args.inputs;
  const int32_t size = dtype_size(args.dtype);
  QuantizeParams p{};
  p.problem = problem;
  p.args = args;
  const auto aligned = [](const flashattn_tensor& t, int32_t element, uint32_t bytes) {
    const uint64_t strides = static_cast<uint64_t>(t.stride_batch) |
                             static_cast<uint64_t>(t.stride_head) |
                             static_cast<uint64_t>(t.stride_seq);
    return ((reinterpret_cast<uintptr_t>(t.data) | strides * element) & (bytes - 1)) == 0;
  };
  const auto operand = [&](const flashattn_tensor& from, const flashattn_tensor& to,
                           const flashattn_tensor& descale, int32_t heads, int32_t dim,
                           int32_t dtype_out, int32_t seqlen) {
    QuantizeOperand x{};
    x.in = from;
    x.out = to;
    x.descale = descale;
    const int32_t size_out = dtype_size(dtype_out);
    x.vectors = dim % kVector == 0 && aligned(from, size, 16) &&
                (!to.data || aligned(to, size_out, std::min(16, kVector * size_out)));
    x.heads = heads;
    x.dim = dim;
    x.dtype_out = dtype_out;
    while (kVector << x.log2_lanes < dim) ++x.log2_lanes;
    if (!from.data) return x;
    x.tokens = problem.descale_block > 0 ? std::min(problem.descale_block, seqlen) : seqlen;
    if (dtype_out != FLASHATTN_DTYPE_F8E4M3) x.tokens = std::max(kMaxThreads / heads, 1);
    x.blocks = static_cast<int32_t>(x.tokens > 0 ? ceil_div(seqlen, x.tokens) : 0);
    return x;
  };
  QuantizeOperand(&x)[3] = p.operands;
  x[0] = operand(in.q, args.q_out, args.descale_q, problem.q_heads_per_kv_head(), problem.dim_qk,
                 problem.dtype, shape.seqlen_q);
  x[1] = operand(in.k, args.k_out, args.descale_k, 1, problem.dim_qk, problem.dtype_kv,
                 shape.seqlen_kv);
  x[2] = operand(in.v, args.v_out, args.descale_v, 1, problem.dim_v, problem.dtype_kv,
                 shape.seqlen_kv);
  x[0].is_q = x[1].is_k = true;
  const bool is_plain =
      args.transform == 0 && !args.lse_shift &&
      std::all_of(x, x + 3, [](const QuantizeOperand& each) {
        return !each.in.data || (each.vectors && each.dtype_out == FLASHATTN_DTYPE_F8E4M3);
      });

  // Bytes of a block in shared memory, and of the largest share of one that a CTA has.
  const auto block_bytes = [size](const QuantizeOperand& of) {
    return int64_t{of.tokens} * of.heads * size * kVector << of.log2_lanes;
  };
  const int64_t heads = int64_t{shape.batch} * problem.heads_kv;
  int64_t ctas = 0, share_bytes = 0, grid = 0;
  for (const QuantizeOperand& each : x) ctas += heads * each.blocks;
  if (ctas == 0 && !args.k_mean.data) return cudaSuccess;
  constexpr int64_t kLeastShare = 8192;
  const bool fills = ctas >= limits.multiprocessors;
  int32_t log2_cluster = 0;
  for (QuantizeOperand& each : x) {
    if (each.blocks > 0 && each.dtype_out == FLASHATTN_DTYPE_F8E4M3) {
      const int64_t bytes = block_bytes(each);
      const auto share = [&] { return bytes >> each.log2_ctas; };
      while (
          2 << each.log2_ctas <= limits.max_ctas &&
          (share() > shared_of_two(limits) - kControlBytes - 2 * kMaxThreads * 16 ||
           (!fills && share() > kLeastShare && ctas << each.log2_ctas < limits.multiprocessors))) {
        ++each.log2_ctas;
      }
    }
    log2_cluster = std::max(log2_cluster, each.log2_ctas);
    share_bytes = std::max(share_bytes, block_bytes(each) >> each.log2_ctas);
  }
  // Threads for the largest share, and its slots: those of two CTAs, or of one that has all memory.
  const int32_t most = kMaxThreads * 2 / std::max(size, 2);
  const int64_t wanted = share_bytes / (kVector * size * kAhead);
  const int32_t threads =
      static_cast<int32_t>(std::max<int64_t>(std::min<int64_t>(wanted, most), kMinThreads)) / 32 *
      32;
  const int64_t slot_bytes = int64_t{threads} * kVector * size;
  const int64_t passes = ceil_div(share_bytes, slot_bytes) + 1;
  const int64_t bytes_of_two = shared_of_two(limits) - kControlBytes;
  const int64_t bytes =
      passes * slot_bytes <= bytes_of_two
          ? passes * slot_bytes
          : std::min<int64_t>(passes * slot_bytes, limits.shared_bytes - kControlBytes);
  p.slots = static_cast<int32_t>(bytes / slot_bytes);
  for (QuantizeOperand& each : x) {
    const int32_t rows = threads >> each.log2_lanes;
    each.row_step = rows / each.heads;
    each.row_step_heads = rows % each.heads;
    each.first_cta = static_cast<uint32_t>(grid);
    const int64_t clusters = ceil_div((heads * each.blocks) << each.log2_ctas, 1 << log2_cluster);
    grid += clusters << log2_cluster;
    if (grid > INT32_MAX) return cudaErrorInvalidConfiguration;
  }
  const QuantizeKernels of = quantize_kernels(args.dtype);
  if (args.k_mean.data) {
    const dim3 columns(static_cast<unsigned>(heads),
                       static_cast<unsigned>(ceil_div(problem.dim_qk, kMeanColumns)));
    const cudaError_t error = launch_kernel(of.k_mean, columns, kMeanThreads, 0, p, stream);
    if (error != cudaSuccess) return error;
  }
  if (grid == 0) return cudaSuccess;
  const int shared_bytes = static_cast<int>(kControlBytes + p.slots * slot_bytes);
  return launch_with(limits.max_ctas > 1, is_plain ? of.plain : of.any,
                     dim3(static_cast<unsigned>(grid)), threads, shared_bytes, p, stream,
                     1 << log2_cluster);
}

}  // namespace flashattn::cuda
