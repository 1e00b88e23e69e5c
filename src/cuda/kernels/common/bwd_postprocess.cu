// The kernels after the backward pass: dQ in its output type, and the gradient of the sinks.
#include "cuda/kernels/common/bwd_rows.cuh"
#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {
namespace {

// Rows of dQ that a thread loads before it converts the first.
constexpr int kPostprocessSteps = 4;

// T: the problem's type. kLanes lanes convert a row.
template <class T, int kLanes>
__global__ void __launch_bounds__(kRowThreads)
    bwd_postprocess_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kStepRows = kRowThreads / kLanes, kCtaRows = kPostprocessSteps * kStepRows;
  const Problem& problem = params.problem;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % kLanes, step_row = threadIdx.x / kLanes;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *params.large_lse = 0;
  const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, params.args.inputs, b);
  const float* const dq = params.dq + params.row(b, h, sequence.offset_q) * problem.dim_qk;
  for (int32_t first = blockIdx.y * kCtaRows; first < sequence.len.q;
       first += gridDim.y * kCtaRows) {
    for (int32_t c = lane * 8; c < problem.dim_qk; c += kLanes * 8) {
      float4 x[kPostprocessSteps][2];
#pragma unroll
      for (int step = 0; step < kPostprocessSteps; ++step) {
        const int32_t i = min(first + step * kStepRows + step_row, sequence.len.q - 1);
        const float4* from =
            reinterpret_cast<const float4*>(dq + static_cast<int64_t>(i) * problem.dim_qk + c);
        x[step][0] = from[0];
        x[step][1] = from[1];
      }
#pragma unroll
      for (int step = 0; step < kPostprocessSteps; ++step) {
        const int32_t i = first + step * kStepRows + step_row;
        if (i >= sequence.len.q) continue;
        const float4 y = x[step][0], z = x[step][1];
        Vec8 sums{{y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w}};
#pragma unroll
        for (int n = 0; n < 8; ++n) sums.x[n] *= problem.scale;
        store_vec8<T>(tensor_row(params.args.dq, sizeof(T), b, h, sequence.offset_q + i), c, sums);
      }
    }
  }
}

// The softmax probability of the sink in a row. index: the row's index in lse2 and softmax_base.
template <class T>
__device__ __forceinline__ float sink_probability(const BackwardParams& params, float sink,
                                                  int64_t index, float lse) {
  if (lse == -INFINITY) return 0.0f;  // then the sink is -inf, too
  const float base = params.softmax_base[index], lse2 = params.lse2[index] + kPExponent<T>;
  if (base != base && lse2 < INFINITY) return ptx::exp2((sink - lse) * kLog2E);
  // lse2 is infinite if keys add nothing to the sink, see LseRecompute.
  if (lse2 == INFINITY) return 1.0f;
  const float unit = params.wide_scores ? 1.0f : params.problem.scale * (kLog2E / kWideUnit);
  return ptx::exp2((sink * (kLog2E / kWideUnit) - base * unit) * kWideUnit - lse2);
}

// One CTA per head adds in a fixed order.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    dsink_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ double sums[kRowThreads];
  const int32_t h = blockIdx.x;
  const float* const sinks = params.args.inputs.sink;  // an empty call's may be NULL
  const float sink = sinks ? sinks[h] : 0.0f;
  double total = 0;
  for (int32_t b = 0; b < params.args.shape.batch; ++b) {
    const SeqlenInfo sequence =
        seqlen_info(params.problem, params.args.shape, params.args.inputs, b);
    const int64_t first = params.lse_delta_offset(sequence, b, h);
    const int64_t row = params.row(b, h, sequence.offset_q);
    for (int32_t i = threadIdx.x; i < sequence.len.q; i += kRowThreads) {
      const float share = sink_probability<T>(params, sink, first + i, params.args.lse[row + i]);
      total -= static_cast<double>(share * params.delta[first + i]);
    }
  }
  sums[threadIdx.x] = total;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.args.dsink[h] = static_cast<float>(sums[0] / kPUnit<T>);
}

// Clears the gradient of the bias, a row a CTA at a time.
__global__ void __launch_bounds__(kRowThreads)
    clear_dbias_kernel(const __grid_constant__ BackwardParams params) {
  const BackwardArgs& args = params.args;
  const int64_t rows = dbias_rows(params);
  for (int64_t n = blockIdx.x; n < rows; n += gridDim.x) {
    int64_t left = n;
    float* to = args.dbias;
    const auto take = [&](int64_t stride, int32_t count) {
      if (stride == 0) return;
      to += left % count * stride;
      left /= count;
    };
    take(args.dbias_stride_row, args.shape.seqlen_q);
    take(args.dbias_stride_head, params.problem.heads_q);
    take(args.dbias_stride_batch, args.shape.batch);
    for (int32_t j = threadIdx.x; j < args.shape.seqlen_kv; j += kRowThreads) to[j] = 0.0f;
  }
}

template <class T, int kLanes>
constexpr BwdRowKernel instance() {
  return {&bwd_postprocess_kernel<T, kLanes>, kRowThreads / kLanes * kPostprocessSteps, 0};
}

}  // namespace

BwdRowKernel bwd_postprocess_rows(const Problem& problem) {
  return with_type(problem.dtype, [&problem](auto number) {
    using T = decltype(number);
    return problem.dim_qk <= kNarrowRow ? instance<T, 8>() : instance<T, 16>();
  });
}

// bf16 and fp32 share the units of lse2 and delta.
BackwardKernel dsink_kernel_of(const Problem& problem) {
  return problem.dtype == FLASHATTN_DTYPE_F16 ? &dsink_kernel<__half> : &dsink_kernel<float>;
}

BackwardKernel clear_dbias_kernel_of() { return &clear_dbias_kernel; }

}  // namespace flashattn::cuda
