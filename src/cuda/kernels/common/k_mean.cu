// The mean of the keys of a head, for flashattn_quantize: a cluster of CTAs shares the keys.
#include "core/seqlen_info.h"
#include "cuda/kernels/common/quantize_rows.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

using namespace quantize;

// Adds up a thread's columns of some keys; kAtOnce rows are loaded at once.
template <class T, bool kWhole, int kAtOnce>
__device__ __forceinline__ void sum_keys(const char* row, int64_t row_bytes, int32_t keys,
                                         int32_t columns, float (&sum)[kVector]) {
#pragma unroll kAtOnce
  for (int32_t j = 0; j < keys; ++j, row += row_bytes) {
    float y[kVector];
    load_columns<T, kWhole>(reinterpret_cast<const T*>(row), columns, y);
#pragma unroll
    for (int n = 0; n < kVector; ++n) sum[n] += y[n];
  }
}

// 0 if there are no keys.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    mean_kernel(const __grid_constant__ QuantizeParams params) {
  MeanStorage& storage = *reinterpret_cast<MeanStorage*>(ptx::dynamic_shared());
  ptx::griddep_launch_dependents();  // the next kernel waits until this one has ended
  const int32_t ctas = params.mean_ctas, head = static_cast<int32_t>(blockIdx.x) / ctas;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) - head * ctas;
  const uint32_t barrier = ptx::shared_address(&storage.barrier);
  if (kHasClusters && ctas > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  const QuantizeOperand& x = params.operands[1];
  const QuantizeArgs& args = params.args;
  const int32_t heads = params.problem.heads_kv, b = head / heads, kv_head = head - b * heads;
  const SeqlenInfo sequence = seqlen_info(params.problem, args.shape, args.inputs, b);
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lanes = 1 << x.log2_lanes;
  const int32_t column = (thread & (lanes - 1)) * kVector;
  const int32_t rows_at_once = static_cast<int32_t>(blockDim.x) >> x.log2_lanes;
  const int64_t row_bytes = x.in.stride_seq * sizeof(T);
  const char* const in =
      tensor_row(x.in, sizeof(T), b, kv_head, sequence.offset_kv) + column * sizeof(T);
  double total[kVector] = {};
  const int64_t step = int64_t{ctas} * rows_at_once * kMeanKeys;
  int64_t first = (int64_t{rank} * rows_at_once + (thread >> x.log2_lanes)) * kMeanKeys;
  for (; first < sequence.len.kv; first += step) {
    const int32_t keys = static_cast<int32_t>(min(int64_t{kMeanKeys}, sequence.len.kv - first));
    float sum[kVector] = {};
    const char* const row = in + first * row_bytes;
    if (x.vectors && column < x.dim) {
      sum_keys<T, true, 32 / sizeof(T)>(row, row_bytes, keys, kVector, sum);
    } else {
      sum_keys<T, false, 1>(row, row_bytes, keys, x.dim - column, sum);
    }
#pragma unroll
    for (int n = 0; n < kVector; ++n) total[n] += sum[n];
  }
#pragma unroll
  for (int n = 0; n < kVector; ++n) {
    for (int32_t lane = lanes; lane < 32; lane *= 2) total[n] += shuffle_xor(total[n], lane);
    if (thread % 32 < lanes) storage.warp_sums[thread / 32][column + n] = total[n];
  }
  __syncthreads();
  if (kHasClusters && ctas > 1) {
    ptx::cluster_wait();
    if (rank == 0 && thread == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, (ctas - 1) * x.dim * sizeof(double));
    }
  }
  float* const mean = reinterpret_cast<float*>(tensor_row(args.k_mean, 4, b, kv_head, 0));
  for (int32_t own = thread; own < x.dim; own += static_cast<int32_t>(blockDim.x)) {
    double sum = 0;
    for (uint32_t n = 0; n < blockDim.x / 32; ++n) sum += storage.warp_sums[n][own];
    if (kHasClusters && rank > 0) {
      uint32_t words[2];
      memcpy(words, &sum, sizeof sum);
      ptx::st_async_8(ptx::mapa(ptx::shared_address(&storage.cta_sums[rank][own]), 0), words[0],
                      words[1], ptx::mapa(barrier, 0));
      continue;
    }
    if (kHasClusters && ctas > 1) ptx::mbarrier_wait_cluster(barrier, 0);
    for (int32_t n = 1; n < ctas; ++n) sum += storage.cta_sums[n][own];
    mean[own] = sequence.len.kv > 0 ? static_cast<float>(sum / sequence.len.kv) : 0.0f;
  }
}

}  // namespace

QuantizeKernel k_mean_kernel(int32_t dtype) {
  return with_type(dtype,
                   [](auto number) -> QuantizeKernel { return &mean_kernel<decltype(number)>; });
}

}  // namespace flashattn::cuda
