// The grid of the kernels of flashattn_quantize: tokens, clusters and shared memory of a block.
#include "cuda/host/quantize.h"

#include <algorithm>

#include "cuda/host/launch.h"

namespace flashattn::cuda {
namespace {

using namespace quantize;

constexpr int kMinThreads = 64;
constexpr int64_t kLeastShare = 8192;  // bytes of a block that a CTA has at least

// The most shared memory, in bytes, that each of two CTAs on a multiprocessor may have; the system
// takes 1024 bytes of each.
int32_t shared_of_two(const QuantizeLimits& limits) {
  return (limits.shared_bytes + 1024) / 2 - 1024;
}

int32_t log2_floor(int64_t x) {
  int32_t n = 0;
  while (x >> (n + 1) > 0) ++n;
  return n;
}

struct StreamLaunch {
  QuantizeKernel kernel = nullptr;  // NULL: quantize_stream_kernel cannot do the work
  int64_t ctas = 0;
  int32_t threads = 0, shared_bytes = 0;
};

// Cuts blocks into CTAs' shares, and these into chunks. Returns the chunks of the largest share.
int64_t cut_blocks(QuantizeParams& p, int32_t log2_ctas, int32_t threads) {
  int64_t chunks = 1;
  for (QuantizeOperand& x : p.operands) {
    const int32_t rows = threads >> x.log2_lanes;
    const bool together = (x.heads & (x.heads - 1)) == 0 && x.heads <= rows;
    x.log2_inner = together ? log2_floor(x.heads) : 0;
    x.log2_tokens = log2_floor(rows) - x.log2_inner;
    const int64_t tokens = ceil_div(x.tokens, 1 << log2_ctas);
    chunks =
        std::max(chunks, ceil_div(tokens, kChunk << x.log2_tokens) * (x.heads >> x.log2_inner));
  }
  QuantizeStream& stream = p.stream;
  stream.log2_ctas = log2_ctas;
  const int32_t maxima = threads / 32 + (log2_ctas > 0 ? 1 << log2_ctas : 0);
  stream.mean_offset =
      static_cast<int32_t>(ceil_div(kExchangeBarrierBytes + 2 * 4 * maxima, 16) * 16);
  // At least 64 columns, as the kernel loads pairs of 32.
  stream.mean_bytes =
      p.args.k_mean.data ? std::max((4 * kVector) << p.operands[1].log2_lanes, 256) : 0;
  stream.control_bytes =
      static_cast<int32_t>(ceil_div(stream.mean_offset + 3 * stream.mean_bytes, 128) * 128);
  return chunks;
}

// Fills the fields of quantize_stream_kernel, and chooses its kind and grid.
StreamLaunch plan_stream(QuantizeParams& p, const QuantizeLimits& limits) {
  StreamLaunch launch;
  int64_t blocks = 0;
  for (QuantizeOperand& x : p.operands) {
    if (x.blocks > 0 && !(x.vectors && x.out.data && x.dtype_out == FLASHATTN_DTYPE_F8E4M3)) {
      return launch;
    }
    x.first_block = static_cast<int32_t>(blocks);
    x.per_block = FastDivmod::of(std::max(x.blocks, 1));
    blocks += int64_t{p.args.shape.batch} * p.problem.heads_kv * x.blocks;
    if (std::max(blocks, int64_t{x.tokens} * x.heads) > INT32_MAX / 2) return launch;
  }
  if (blocks == 0 || limits.max_ctas == 0) return launch;
  p.stream.blocks = static_cast<int32_t>(blocks);
  // Part of k lies in the L2 cache if its mean was computed.
  p.stream.first = p.args.k_mean.data ? p.operands[1].first_block : 0;
  p.stream.per_kv_head = FastDivmod::of(p.problem.heads_kv);
  const QuantizeStreamKernels of = quantize_stream_kernels(p.args.dtype);
  const int32_t slot_bytes = kVector * dtype_size(p.args.dtype);
  const bool transforms = p.args.transform != 0 || p.args.lse_shift;
  // Tensor cores transform 32 columns at once.
  if (transforms && p.problem.dim_qk < 32) return launch;
  const int32_t most_ctas = log2_floor(limits.max_ctas);
  const auto run = [&](QuantizeKernel kernel, int64_t kept_chunks, int32_t threads, int64_t bytes,
                       int64_t clusters) {
    p.stream.kept_chunks = static_cast<int32_t>(kept_chunks);
    clusters = std::min(std::max<int64_t>(clusters, 1), blocks);
    return StreamLaunch{kernel, clusters << p.stream.log2_ctas, threads,
                        static_cast<int32_t>(bytes)};
  };
  // CTAs of a cluster: the fewest of which two fit on a multiprocessor, or one with transforms,
  // whose clusters wait longer for each other; else the most.
  for (int32_t log2_ctas = 0; log2_ctas <= most_ctas; ++log2_ctas) {
    int64_t share = 0;
    for (const QuantizeOperand& x : p.operands) {
      const int64_t tokens = ceil_div(x.tokens, 1 << log2_ctas);
      share = std::max(share, tokens * x.heads * slot_bytes << x.log2_lanes);
    }
    const bool last = log2_ctas == most_ctas;
    if (!last && share > kLeastShare && blocks << log2_ctas < limits.multiprocessors) continue;
    for (const bool two : {true, false}) {
      if (!two && !last && !transforms) break;
      // Registers allow two CTAs with transforms half of the threads each.
      const int32_t most_threads =
          transforms && two ? limits.stream_threads / 2 : limits.stream_threads;
      // Rows of a thread: fewer do not pay for the begin of a block, unless more leave few threads.
      const int32_t rows = transforms && share > 16384 ? 8 : 16;
      int32_t threads = 32;
      while (threads < most_threads && int64_t{threads} * rows * slot_bytes < share) threads *= 2;
      const int64_t chunks = cut_blocks(p, log2_ctas, threads);
      const int64_t most_bytes = two ? shared_of_two(limits) : limits.shared_bytes;
      const auto bytes_with = [&](int32_t ahead) {
        p.stream.ahead_chunks = ahead;
        return p.stream.control_bytes + (ahead + chunks) * slot_bytes * kChunk * threads;
      };
      int64_t bytes = bytes_with(kAheadChunks);
      if (transforms && bytes > most_bytes) bytes = bytes_with(kFewAheadChunks);
      if (bytes > most_bytes) continue;
      int64_t clusters = (two ? limits.clusters_of_halves : limits.clusters_of_wholes)[log2_ctas];
      if (log2_ctas == 0) {
        // As many as shared memory and registers allow.
        const int32_t by_threads = (transforms ? 1 : 2) * limits.stream_threads / threads;
        clusters = std::min<int64_t>((limits.shared_bytes + 1024) / (bytes + 1024), by_threads) *
                   limits.multiprocessors;
      }
      return run(transforms ? of.transforms : of.plain, chunks, threads, bytes, clusters);
    }
  }
  for (int32_t threads = kMaxThreadsOfSome; threads >= 64; threads /= 2) {
    const int64_t chunks = cut_blocks(p, most_ctas, threads);
    const int64_t chunk_bytes = int64_t{slot_bytes} * kChunk * threads;
    const int64_t fit = (limits.shared_bytes - p.stream.control_bytes) / chunk_bytes - kAheadChunks;
    const int64_t kept = chunks <= fit ? chunks : fit - kAheadChunks;
    if (kept < kAheadChunks) continue;
    p.stream.ahead_chunks = kAheadChunks;
    return run(
        of.some, kept, threads,
        p.stream.control_bytes + (kept + kAheadChunks * (chunks <= fit ? 1 : 2)) * chunk_bytes,
        limits.clusters_of_wholes[most_ctas]);
  }
  return launch;
}

cudaError_t launch_mean(QuantizeParams& p, const QuantizeLimits& limits, cudaStream_t stream) {
  const QuantizeOperand& k = p.operands[1];
  const int64_t runs = std::max<int64_t>(ceil_div(p.args.shape.seqlen_kv, kMeanKeys), 1);
  const int64_t lanes = runs << k.log2_lanes;
  int32_t threads = 32, ctas = 1;
  while (threads < std::min<int64_t>(lanes, kMaxThreads)) threads *= 2;
  while (ctas < std::min(kMeanCtas, limits.max_ctas) && int64_t{ctas} * threads < lanes) ctas *= 2;
  p.mean_ctas = ctas;
  const dim3 grid(static_cast<unsigned>(p.problem.heads_kv * p.args.shape.batch * ctas));
  const size_t unused = (kMeanCtas - ctas) * sizeof(MeanStorage::cta_sums[0]);
  return launch_kernel(k_mean_kernel(p.args.dtype), grid, threads,
                       static_cast<int>(sizeof(MeanStorage) - unused), p, stream, ctas);
}

}  // namespace

cudaError_t ready_quantize_kernels(QuantizeLimits* limits) {
  cudaError_t error = cudaSuccess;
  const auto then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  limits->max_ctas = kMaxCtas;
  limits->stream_threads = kMaxThreads;
  for (const int32_t dtype : {FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16}) {
    const QuantizeStreamKernels stream = quantize_stream_kernels(dtype);
    for (const QuantizeKernel each : {quantize_any_kernel(dtype), k_mean_kernel(dtype),
                                      stream.plain, stream.transforms, stream.some}) {
      const void* const kernel = reinterpret_cast<const void*>(each);
      cudaFuncAttributes attributes{};
      then(cudaFuncGetAttributes(&attributes, kernel));
      if (each == stream.plain || each == stream.transforms) {
        limits->stream_threads = std::min(limits->stream_threads, attributes.maxThreadsPerBlock);
      }
      then(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                limits->shared_bytes));
      // Code compiled from older PTX cannot run in clusters.
      if (attributes.ptxVersion < 90) {
        limits->max_ctas = 0;
        continue;
      }
      then(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
  }
  if (error != cudaSuccess || limits->max_ctas == 0) return error;
  // Every device with clusters has those of 8.
  const void* const kernel =
      reinterpret_cast<const void*>(quantize_stream_kernels(FLASHATTN_DTYPE_BF16).plain);
  for (int32_t n = 0; n < 5; ++n) {
    const auto clusters = [&](int32_t bytes) {
      return n == 0 ? 0 : active_clusters(kernel, 1 << n, limits->stream_threads, bytes);
    };
    limits->clusters_of_halves[n] = clusters(shared_of_two(*limits));
    limits->clusters_of_wholes[n] = clusters(limits->shared_bytes);
  }
  if (4 * kMaxCtas * limits->clusters_of_wholes[4] < 3 * limits->multiprocessors) {
    limits->max_ctas = 8;
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
  if (args.k_mean.data) {
    const cudaError_t error = launch_mean(p, limits, stream);
    if (error != cudaSuccess) return error;
  }
  if (const StreamLaunch launch = plan_stream(p, limits); launch.kernel) {
    return launch_with(true, launch.kernel, dim3(static_cast<unsigned>(launch.ctas)),
                       launch.threads, launch.shared_bytes, p, stream, 1 << p.stream.log2_ctas);
  }

  // Bytes of a block in shared memory, and of the largest share of one that a CTA has.
  const auto block_bytes = [size](const QuantizeOperand& of) {
    return int64_t{of.tokens} * of.heads * size * kVector << of.log2_lanes;
  };
  const int64_t heads = int64_t{shape.batch} * problem.heads_kv;
  int64_t ctas = 0, share_bytes = 0, grid = 0;
  for (const QuantizeOperand& each : x) ctas += heads * each.blocks;
  if (ctas == 0) return cudaSuccess;
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
  const int shared_bytes = static_cast<int>(kControlBytes + p.slots * slot_bytes);
  return launch_with(limits.max_ctas > 1, quantize_any_kernel(args.dtype),
                     dim3(static_cast<unsigned>(grid)), threads, shared_bytes, p, stream,
                     1 << log2_cluster);
}

}  // namespace flashattn::cuda
