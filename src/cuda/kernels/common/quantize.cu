// A cluster of CTAs quantises a block of tokens that share a descale: it reads the block once into
// shared memory, finds the largest magnitude, and writes the block. Rows that do not fit in the
// cluster's shared memory are read twice.
#include "cuda/kernels/common/quantize.h"

#include <algorithm>

#include "core/descale.h"
#include "core/seqlen_info.h"
#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/kernels/common/quantize_rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kMaxThreads = 512, kMinThreads = 64;
constexpr int kAhead = 8;     // rows that a thread loads ahead
constexpr int kMaxCtas = 16;  // CTAs of a cluster

// Lies before the rows in shared memory.
struct Control {
  uint64_t barrier;  // counts the bytes of cta_amax
  float warp_amax[kMaxThreads / 32];
  float cta_amax[kMaxCtas];  // maxima of the CTAs that share a block
};
constexpr int kControlBytes = 256;
static_assert(sizeof(Control) <= kControlBytes, "rows are aligned");

// The largest of the numbers of all threads of the CTAs that share a block; not below 0.
__device__ __forceinline__ float largest(float x, Control* control, int32_t ctas, uint32_t rank) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (lane == 0) control->warp_amax[warp] = x;
  __syncthreads();
  for (uint32_t n = 0; n < blockDim.x / 32; ++n) x = fmaxf(x, control->warp_amax[n]);
  if (!kHasClusters || ctas == 1) return x;
  const uint32_t barrier = ptx::shared_address(&control->barrier);
  ptx::cluster_wait();  // barriers of the others are initialised
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier, ctas * sizeof(float));
  if (threadIdx.x < static_cast<uint32_t>(ctas)) {
    const uint32_t to = ptx::cluster_rank() - rank + threadIdx.x;
    ptx::st_async(ptx::mapa(ptx::shared_address(&control->cta_amax[rank]), to), __float_as_uint(x),
                  ptx::mapa(barrier, to));
  }
  // Once all numbers have arrived, no other CTA accesses this CTA's memory any more.
  ptx::mbarrier_wait_cluster(barrier, 0);
  for (int32_t n = 0; n < ctas; ++n) x = fmaxf(x, control->cta_amax[n]);
  return x;
}

// kPlain: only aligned vectors, without a transform, to E4M3: no jumps over code for other cases.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads, 2)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
  ptx::griddep_wait();
  const Problem& problem = params.problem;
  const QuantizeArgs& args = params.args;
  const QuantizeOperand& x = operand_of_cta(params.operands);
  const uint32_t cta = blockIdx.x - x.first_cta, unit = cta >> x.log2_ctas;
  const int32_t ctas = 1 << x.log2_ctas, lanes = 1 << x.log2_lanes;
  const uint32_t rank = cta & (ctas - 1);
  const uint32_t section = unit / problem.heads_kv;
  const int32_t kv_head = unit - section * problem.heads_kv;
  const int32_t b = section / x.blocks, block = section - b * x.blocks;
  if (b >= args.shape.batch) return;  // this CTA only fills the last cluster
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  const int32_t length = x.is_q ? sequence.len.q : sequence.len.kv;
  const int64_t offset = x.is_q ? sequence.offset_q : sequence.offset_kv;
  const int64_t first = static_cast<int64_t>(block) * x.tokens;
  if (first >= length) return;

  Control* const control = reinterpret_cast<Control*>(ptx::dynamic_shared());
  if (kHasClusters && ctas > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&control->barrier), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  const int64_t rows = min(static_cast<int64_t>(x.tokens), length - first) * x.heads;
  const int64_t part_rows = ceil_div(rows, ctas), begin = min(rank * part_rows, rows);
  const int64_t skipped = begin / x.heads;
  const Part part{offset + first + skipped, static_cast<int32_t>(begin - skipped * x.heads),
                  static_cast<int32_t>(min(part_rows, rows - begin)),
                  static_cast<int32_t>(threadIdx.x) >> x.log2_lanes};
  const int32_t row_step = static_cast<int32_t>(blockDim.x) >> x.log2_lanes;
  const int32_t passes = static_cast<int32_t>(ceil_div(part.rows, row_step));
  const int32_t column = (static_cast<int32_t>(threadIdx.x) & (lanes - 1)) * kVector;
  const int32_t count = x.dim - column;  // columns left from there on
  const Transform transform(params, x, b, kv_head, column);
  const char* const in = tensor_row(x.in, sizeof(T), b, kv_head * x.heads, 0) + column * sizeof(T);
  const int64_t in_seq = x.in.stride_seq * sizeof(T), in_head = x.in.stride_head * sizeof(T);

  // The CTA's rows from this thread's first one on; 0: the thread has no columns.
  const int32_t own_left = count > 0 ? part.rows - part.own : 0;

  // Row n of a thread lies in slot n. Rows that do not stay resident take turns in the last kAhead
  // slots.
  const int32_t resident = passes <= params.slots ? passes : params.slots - kAhead;
  const uint32_t own_slot = kControlBytes + threadIdx.x * kVector * sizeof(T);
  const uint32_t slot_bytes = blockDim.x * kVector * sizeof(T);
  const SlotWalk first_slot{own_slot, slot_bytes, own_slot + params.slots * slot_bytes,
                            kAhead * slot_bytes};
  struct Loads {
    RowWalk row;
    SlotWalk slot;
    int32_t left;
  };
  // A cp.async group for each row, so that waits count rows. Without a row the slot keeps its
  // content.
  const auto load_ahead = [&](Loads& loads) {
    if (loads.left > 0) {
      const uint32_t to = ptx::shared_address(ptx::dynamic_shared()) + loads.slot.at;
#pragma unroll
      for (int at = 0; at < static_cast<int>(kVector * sizeof(T)); at += 16) {
        ptx::cp_async_16(to + at, in + loads.row.at + at, true);
      }
    }
    loads.left -= row_step;
    loads.row.next();
    loads.slot.next();
    ptx::cp_async_commit();
  };
  // Loads a row from its slot, or from memory where vectors cannot be copied.
  const bool vectors = kPlain || x.vectors;
  const auto load = [&](SlotWalk& slot, Loads& loads, float (&y)[kVector]) {
    if (vectors) {
      load_columns<T, true>(reinterpret_cast<const T*>(ptx::dynamic_shared() + slot.at), kVector,
                            y);
      return slot.next();
    }
    load_columns<T, false>(reinterpret_cast<const T*>(in + loads.row.at),
                           loads.left > 0 ? count : 0, y);
    loads.left -= row_step;
    loads.row.next();
  };
  const bool shifts = !kPlain && x.is_q && args.lse_shift;
  const bool is_f8 = kPlain || x.dtype_out == FLASHATTN_DTYPE_F8E4M3;

  const Loads first_loads{RowWalk(x, part, in_seq, in_head), first_slot, own_left};
  float amax = 0;
  if (is_f8 || shifts) {
    const RowLayout layout = row_layout(problem, args.shape);
    RowWalk shift(x, part, 1, layout.head_stride);
    float* const shift_to = args.lse_shift + b * layout.batch_stride +
                            static_cast<int64_t>(kv_head) * x.heads * layout.head_stride;
    Loads loads = first_loads;
    SlotWalk slot = first_slot;
    if (vectors) {
      for (int32_t n = 0; n < kAhead; ++n) load_ahead(loads);
    }
    int32_t left = own_left;
    for (int32_t n = 0; n < passes; ++n, left -= row_step) {
      if (vectors) ptx::cp_async_wait<kAhead - 1>();
      float y[kVector];
      load(slot, loads, y);
      if (shifts) {
        const double product = transform.mean_product(y, left > 0, lanes);
        if (column == 0 && left > 0) {
          shift_to[shift.at] = static_cast<float>(product * static_cast<double>(problem.scale));
        }
        shift.next();
      }
      if constexpr (!kPlain) transform.apply(y);
      if (left > 0) amax = fmaxf(amax, largest_finite(y));
      if (vectors) load_ahead(loads);
    }
  }
  if (!x.out.data) return;
  // Rows from here on were not kept in shared memory, or not loaded yet.
  const int32_t again = is_f8 || shifts ? resident : 0;
  Loads loads = first_loads;
  if (vectors && again < passes) {
    for (int32_t n = 0; n < again; ++n) {
      loads.left -= row_step;
      loads.row.next();
      loads.slot.next();
    }
    for (int32_t n = 0; n < kAhead; ++n) load_ahead(loads);
  }
  float factor = 1;
  if (is_f8) {
    amax = largest(amax, control, ctas, rank);
    const float descale = descale_of(amax, ptx::kMaxE4m3);
    if (rank == 0 && threadIdx.x == 0) {
      *reinterpret_cast<float*>(tensor_row(x.descale, 4, b, kv_head, block)) = descale;
    }
    factor = 1 / descale;
  }
  const int32_t size_out = dtype_size(x.dtype_out);
  char* const out = tensor_row(x.out, size_out, b, kv_head * x.heads, 0) + column * size_out;
  RowWalk to(x, part, x.out.stride_seq * size_out, x.out.stride_head * size_out);
  SlotWalk slot = first_slot;
  int32_t left = own_left;
  for (int32_t n = 0; n < passes; ++n, left -= row_step, to.next()) {
    if (vectors && n >= again) ptx::cp_async_wait<kAhead - 1>();
    float y[kVector];
    load(slot, loads, y);
    if constexpr (!kPlain) transform.apply(y);
    if (left > 0) {
#pragma unroll
      for (float& each : y) each *= factor;
      switch (kPlain ? FLASHATTN_DTYPE_F8E4M3 : x.dtype_out) {
        case FLASHATTN_DTYPE_F8E4M3:
          store_columns<ptx::E4m3>(out + to.at, count, vectors, y);
          break;
        case FLASHATTN_DTYPE_F16: store_columns<__half>(out + to.at, count, vectors, y); break;
        case FLASHATTN_DTYPE_BF16:
          store_columns<__nv_bfloat16>(out + to.at, count, vectors, y);
          break;
        default: store_columns<float>(out + to.at, count, vectors, y);
      }
    }
    if (vectors && n >= again) load_ahead(loads);
  }
}

constexpr int kMeanThreads = 512;
constexpr int kMeanColumns = 16;  // columns of a CTA: a 32-byte sector of 16-bit elements
constexpr int kMeanKeys = 64;     // keys that are summed in fp32, as on the CPU

// The mean of some columns of the keys of a head; 0 if there are no keys.
template <class T>
__global__ void __launch_bounds__(kMeanThreads)
    k_mean_kernel(const __grid_constant__ QuantizeParams params) {
  constexpr int kLanes = kMeanColumns / kVector, kWarps = kMeanThreads / 32;
  __shared__ double sums[kWarps][kMeanColumns];
  ptx::griddep_launch_dependents();  // quantize_kernel waits until this kernel has ended
  const QuantizeOperand& x = params.operands[1];
  const Problem& problem = params.problem;
  const QuantizeArgs& args = params.args;
  const int32_t b = blockIdx.x / problem.heads_kv, kv_head = blockIdx.x - b * problem.heads_kv;
  const int32_t first_column = blockIdx.y * kMeanColumns;
  const int32_t lane = threadIdx.x % kLanes, column = first_column + lane * kVector;
  const int32_t columns = x.dim - column;
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  const char* const in =
      tensor_row(x.in, sizeof(T), b, kv_head, sequence.offset_kv) + column * sizeof(T);
  double total[kVector] = {};
  constexpr int kStep = kMeanThreads / kLanes * kMeanKeys;
  for (int64_t first = threadIdx.x / kLanes * kMeanKeys; first < sequence.len.kv; first += kStep) {
    const int32_t keys = static_cast<int32_t>(min(int64_t{kMeanKeys}, sequence.len.kv - first));
    float sum[kVector] = {};
    const char* row = in + first * x.in.stride_seq * sizeof(T);
#pragma unroll 8
    for (int32_t j = 0; j < keys; ++j, row += x.in.stride_seq * sizeof(T)) {
      float y[kVector];
      if (x.vectors && columns > 0) {
        load_columns<T, true>(reinterpret_cast<const T*>(row), kVector, y);
      } else {
        load_columns<T, false>(reinterpret_cast<const T*>(row), columns, y);
      }
#pragma unroll
      for (int n = 0; n < kVector; ++n) sum[n] += y[n];
    }
#pragma unroll
    for (int n = 0; n < kVector; ++n) total[n] += sum[n];
  }
#pragma unroll
  for (int n = 0; n < kVector; ++n) {
    for (int step = kLanes; step < 32; step *= 2) total[n] += shuffle_xor(total[n], step);
    if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][lane * kVector + n] = total[n];
  }
  __syncthreads();
  const int32_t own = first_column + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x >= kMeanColumns || own >= x.dim) return;
  double sum = 0;
  for (int n = 0; n < kWarps; ++n) sum += sums[n][threadIdx.x];
  float* const mean = reinterpret_cast<float*>(tensor_row(args.k_mean, 4, b, kv_head, 0));
  mean[own] = sequence.len.kv > 0 ? static_cast<float>(sum / sequence.len.kv) : 0.0f;
}

template <class T>
struct QuantizeKernels {
  static constexpr auto kQuantize = &quantize_kernel<T, false>;
  static constexpr auto kPlain = &quantize_kernel<T, true>;
  static constexpr auto kMean = &k_mean_kernel<T>;
};

// Calls use(QuantizeKernels<T>()) with the type of the input.
template <class Use>
auto with_quantize_kernels(int32_t dtype, Use use) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return use(QuantizeKernels<__half>());
    case FLASHATTN_DTYPE_BF16: return use(QuantizeKernels<__nv_bfloat16>());
    default: return use(QuantizeKernels<float>());
  }
}

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
    with_quantize_kernels(dtype, [&](auto of) {
      then(preload(of.kMean));
      const void* const kernels[] = {reinterpret_cast<const void*>(of.kQuantize),
                                     reinterpret_cast<const void*>(of.kPlain)};
      for (const void* const kernel : kernels) {
        cudaFuncAttributes attributes{};
        then(cudaFuncGetAttributes(&attributes, kernel));
        then(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  limits->shared_bytes));
        // Code compiled from older PTX cannot run in clusters.
        if (error != cudaSuccess || attributes.ptxVersion < 90) {
          limits->max_ctas = 1;
          return;
        }
        then(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        // Every device with clusters has those of 8.
        const int clusters = active_clusters(kernel, kMaxCtas, kMaxThreads, limits->shared_bytes);
        if (4 * kMaxCtas * clusters < 3 * limits->multiprocessors) {
          limits->max_ctas = std::min(limits->max_ctas, 8);
        }
      }
    });
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

  // Bytes of a block in shared memory, and of the largest part of one that a CTA has.
  const auto block_bytes = [size](const QuantizeOperand& of) {
    return int64_t{of.tokens} * of.heads * size * kVector << of.log2_lanes;
  };
  const int64_t heads = int64_t{shape.batch} * problem.heads_kv;
  int64_t ctas = 0, part_bytes = 0, grid = 0;
  for (const QuantizeOperand& each : x) ctas += heads * each.blocks;
  if (ctas == 0 && !args.k_mean.data) return cudaSuccess;
  constexpr int64_t kLeastPart = 8192;
  const bool fills = ctas >= limits.multiprocessors;
  int32_t log2_cluster = 0;
  for (QuantizeOperand& each : x) {
    if (each.blocks > 0 && each.dtype_out == FLASHATTN_DTYPE_F8E4M3) {
      const int64_t bytes = block_bytes(each);
      const auto part = [&] { return bytes >> each.log2_ctas; };
      while (2 << each.log2_ctas <= limits.max_ctas &&
             (part() > shared_of_two(limits) - kControlBytes - 2 * kMaxThreads * 16 ||
              (!fills && part() > kLeastPart && ctas << each.log2_ctas < limits.multiprocessors))) {
        ++each.log2_ctas;
      }
    }
    log2_cluster = std::max(log2_cluster, each.log2_ctas);
    part_bytes = std::max(part_bytes, block_bytes(each) >> each.log2_ctas);
  }
  // Threads for the largest part, and its slots: those of two CTAs, or of one that has all memory.
  const int32_t most = kMaxThreads * 2 / std::max(size, 2);
  const int64_t wanted = part_bytes / (kVector * size * kAhead);
  const int32_t threads =
      static_cast<int32_t>(std::max<int64_t>(std::min<int64_t>(wanted, most), kMinThreads)) / 32 *
      32;
  const int64_t slot_bytes = int64_t{threads} * kVector * size;
  const int64_t passes = ceil_div(part_bytes, slot_bytes) + 1;
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
  return with_quantize_kernels(args.dtype, [&](auto of) {
    if (args.k_mean.data) {
      const dim3 columns(static_cast<unsigned>(heads),
                         static_cast<unsigned>(ceil_div(problem.dim_qk, kMeanColumns)));
      const cudaError_t error = launch_kernel(of.kMean, columns, kMeanThreads, 0, p, stream);
      if (error != cudaSuccess) return error;
    }
    if (grid == 0) return cudaSuccess;
    const int shared_bytes = static_cast<int>(kControlBytes + p.slots * slot_bytes);
    const auto kernel = is_plain ? of.kPlain : of.kQuantize;
    return limits.max_ctas > 1 ? launch_pdl(kernel, dim3(static_cast<unsigned>(grid)), threads,
                                            shared_bytes, p, stream, 1 << log2_cluster)
                               : launch_kernel(kernel, dim3(static_cast<unsigned>(grid)), threads,
                                               shared_bytes, p, stream);
  });
}

}  // namespace flashattn::cuda
