#include "cuda/gradient/kernels.h"

#include <type_traits>

#include "cuda/grid.h"
#include "cuda/start.h"
#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 4;  // that share a row, 8 elements each at a time
constexpr int kRows = kThreads / kLanes;

struct Eight {
  float x[8];
};

template <class T>
__device__ __forceinline__ Eight load_eight(const char* row, int32_t c) {
  const int4 words = *reinterpret_cast<const int4*>(row + c * 2);
  const int32_t pairs[4] = {words.x, words.y, words.z, words.w};
  Eight r;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = ptx::unpack<T>(pairs[n]);
    r.x[2 * n] = pair.x;
    r.x[2 * n + 1] = pair.y;
  }
  return r;
}

template <>
__device__ __forceinline__ Eight load_eight<float>(const char* row, int32_t c) {
  Eight r;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = reinterpret_cast<const float2*>(row + c * 4)[n];
    r.x[2 * n] = pair.x;
    r.x[2 * n + 1] = pair.y;
  }
  return r;
}

template <class T>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> store_eight(char* row, int32_t c,
                                                                        const Eight& e) {
  int4 words;
  words.x = static_cast<int32_t>(ptx::pack<T>(e.x[0], e.x[1]));
  words.y = static_cast<int32_t>(ptx::pack<T>(e.x[2], e.x[3]));
  words.z = static_cast<int32_t>(ptx::pack<T>(e.x[4], e.x[5]));
  words.w = static_cast<int32_t>(ptx::pack<T>(e.x[6], e.x[7]));
  *reinterpret_cast<int4*>(row + c * 2) = words;
}

template <class T>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4> store_eight(char* row, int32_t c,
                                                                        const Eight& e) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    reinterpret_cast<float2*>(row + c * 4)[n] = make_float2(e.x[2 * n], e.x[2 * n + 1]);
  }
}

// T: the problem's type. O: that of o and dout.
template <class T, class O>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ BackwardParams params) {
  constexpr bool kCopies = !std::is_same<T, O>::value;
  ptx::let_next_start();
  const Problem& problem = params.problem;
  const flashattn_backward_args& args = params.args;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % kLanes;
  const Sequence sequence = sequence_of(problem, args.shape, args.inputs, b);
  if (params.ticket && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *params.ticket = 0;
  const int64_t first_number = params.first_number(sequence, b, h);
  // Whole tiles are read.
  const int32_t end = params.tile_q
                          ? (sequence.len.q + params.tile_q - 1) / params.tile_q * params.tile_q
                          : sequence.len.q;
  for (int32_t first = blockIdx.y * kRows; first < end; first += gridDim.y * kRows) {
    const int32_t i = first + threadIdx.x / kLanes;
    const bool inside = i < sequence.len.q;
    const int64_t token = sequence.first_q + i, number = first_number + i;
    float sum = 0.0f;
    if (inside && params.tile_q == 0) {
      float4* dq = reinterpret_cast<float4*>(params.dq + number * problem.dim_qk);
      for (int32_t c = lane; c < problem.dim_qk / 4; c += kLanes) dq[c] = make_float4(0, 0, 0, 0);
    }
    if (inside) {
      const char* o = tensor_row(args.o, sizeof(O), b, h, token);
      const char* dout = tensor_row(args.dout, sizeof(O), b, h, token);
      for (int32_t c = lane * 8; c < problem.dim_v; c += kLanes * 8) {
        const Eight x = load_eight<O>(o, c), y = load_eight<O>(dout, c);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum = fmaf(x.x[n], y.x[n], sum);
        if constexpr (kCopies)
          store_eight<T>(tensor_row(params.dout, sizeof(T), b, h, token), c, y);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (i >= end || lane != 0) continue;
    const int64_t row = params.row(b, h, token);
    const float lse = inside ? args.lse[row] : -INFINITY;
    params.lse2[number] = lse == -INFINITY ? INFINITY : lse * kLog2E;
    params.delta[number] = inside ? sum - (args.dlse ? args.dlse[row] : 0.0f) : 0.0f;
    if (params.turns && i % params.turn_q == 0) {
      params.turns[params.query_tile(sequence, b, h, i / params.turn_q, params.turn_q)] = 0;
    }
    if (params.tile_q != 0 && i % params.tile_q == 0) {
      const Interval rows{i, min(i + params.tile_q, sequence.len.q)};
      const int32_t state = params.ordered ? 2 * last_key_tile(problem.mask_rule(), rows,
                                                               sequence.len, params.tile_kv)
                                           : 0;
      int32_t* to = params.dq_states + number / params.tile_q * params.dq_parts;
      to[0] = state;
      if (params.dq_parts > 1) to[1] = state;  // a loop would spill registers
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    convert_dq_kernel(const __grid_constant__ BackwardParams params) {
  const Problem& problem = params.problem;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const Sequence sequence = sequence_of(problem, params.args.shape, params.args.inputs, b);
  for (int32_t i = blockIdx.y * kRows + threadIdx.x / kLanes; i < sequence.len.q;
       i += gridDim.y * kRows) {
    const int64_t token = sequence.first_q + i;
    const char* from =
        reinterpret_cast<const char*>(params.dq + params.row(b, h, token) * problem.dim_qk);
    char* to = tensor_row(params.args.dq, sizeof(T), b, h, token);
    for (int32_t c = threadIdx.x % kLanes * 8; c < problem.dim_qk; c += kLanes * 8) {
      Eight x = load_eight<float>(from, c);
#pragma unroll
      for (int n = 0; n < 8; ++n) x.x[n] *= problem.scale;
      store_eight<T>(to, c, x);
    }
  }
}

// One block a head, which adds in a fixed order.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ double sums[kThreads];
  const int32_t h = blockIdx.x;
  const float sink = params.args.inputs.sink[h] * kLog2E;
  double total = 0;
  for (int32_t b = 0; b < params.args.shape.batch; ++b) {
    const Sequence sequence = sequence_of(params.problem, params.args.shape, params.args.inputs, b);
    const int64_t first = params.first_number(sequence, b, h);
    for (int32_t i = threadIdx.x; i < sequence.len.q; i += kThreads) {
      total -=
          static_cast<double>(ptx::exp2(sink - params.lse2[first + i]) * params.delta[first + i]);
    }
  }
  sums[threadIdx.x] = total;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.args.dsink[h] = static_cast<float>(sums[0]);
}

dim3 rows_grid(const BackwardParams& params) {
  const flashattn_shape& shape = params.args.shape;
  return grid_of(shape.batch, params.problem.heads_q, shape.seqlen_q, kRows);
}

template <class T>
cudaError_t prepare(const BackwardParams& params, cudaStream_t stream) {
  if (params.problem.dtype_o == FLASHATTN_DTYPE_F32) {
    return start(&prepare_kernel<T, float>, rows_grid(params), kThreads, 0, params, stream);
  }
  return start(&prepare_kernel<T, T>, rows_grid(params), kThreads, 0, params, stream);
}

template <class T>
cudaError_t convert_dq(const BackwardParams& params, cudaStream_t stream) {
  return start(&convert_dq_kernel<T>, rows_grid(params), kThreads, 0, params, stream);
}

}  // namespace

cudaError_t launch_prepare_backward(const BackwardParams& params, cudaStream_t stream) {
  switch (params.problem.dtype) {
    case FLASHATTN_DTYPE_F16: return prepare<__half>(params, stream);
    case FLASHATTN_DTYPE_BF16: return prepare<__nv_bfloat16>(params, stream);
    default: return prepare<float>(params, stream);
  }
}

cudaError_t launch_convert_dq(const BackwardParams& params, cudaStream_t stream) {
  switch (params.problem.dtype) {
    case FLASHATTN_DTYPE_F16: return convert_dq<__half>(params, stream);
    case FLASHATTN_DTYPE_BF16: return convert_dq<__nv_bfloat16>(params, stream);
    default: return convert_dq<float>(params, stream);
  }
}

cudaError_t launch_dsink(const BackwardParams& params, cudaStream_t stream) {
  return start(&dsink_kernel, dim3(static_cast<unsigned>(params.problem.heads_q)), kThreads, 0,
               params, stream);
}

}  // namespace flashattn::cuda
