#include "cuda/gradient/kernels.h"

#include <type_traits>

#include "cuda/grid.h"
#include "cuda/start.h"
#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSteps = 4;  // rows that a thread has on their way at once

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

// T: the problem's type. O: that of o and dout. kLanes share a row; the numbers of a row are one
// thread's.
template <class T, class O, int kLanes>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ BackwardParams params) {
  constexpr bool kCopies = !std::is_same<T, O>::value;
  constexpr int kStepRows = kThreads / kLanes, kBlockRows = kSteps * kStepRows;
  __shared__ float sums[kBlockRows];
  ptx::let_next_start();
  const Problem& problem = params.problem;
  const flashattn_backward_args& args = params.args;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const Sequence sequence = sequence_of(problem, args.shape, args.inputs, b);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    if (threadIdx.x == 0 && params.ticket) *params.ticket = 0;
    if (threadIdx.x == 0 && params.dq_ticket) *params.dq_ticket = 0;
    for (int32_t n = threadIdx.x; n < params.arrived_count; n += kThreads) params.arrived[n] = 0;
  }
  const int64_t first_number = params.first_number(sequence, b, h);
  const int64_t first_row = params.row(b, h, sequence.first_q);
  // Whole tiles are read.
  const int32_t end = params.tile_q
                          ? (sequence.len.q + params.tile_q - 1) / params.tile_q * params.tile_q
                          : sequence.len.q;
  for (int32_t first = blockIdx.y * kBlockRows; first < end; first += gridDim.y * kBlockRows) {
    const int32_t own = first + static_cast<int32_t>(threadIdx.x);
    float lse = -INFINITY, dlse = 0.0f;
    if (threadIdx.x < kBlockRows && own < sequence.len.q) {
      lse = args.lse[first_row + own];
      if (args.dlse) dlse = args.dlse[first_row + own];
    }
    float sum[kSteps] = {};
    for (int32_t c = lane * 8; c < problem.dim_v; c += kLanes * 8) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Past the last one: the last one, without a branch.
        const int32_t i = first + step * kStepRows + group;
        const int64_t token = sequence.first_q + min(i, sequence.len.q - 1);
        const Eight x = load_eight<O>(tensor_row(args.o, sizeof(O), b, h, token), c);
        const Eight y = load_eight<O>(tensor_row(args.dout, sizeof(O), b, h, token), c);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[step] = fmaf(x.x[n], y.x[n], sum[step]);
        if (kCopies && i < sequence.len.q) {
          store_eight<T>(tensor_row(params.dout, sizeof(T), b, h, token), c, y);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 1; n < kLanes; n *= 2) sum[step] += __shfl_xor_sync(~0u, sum[step], n);
      if (lane == 0) sums[step * kStepRows + group] = sum[step];
    }
    if (params.tile_q == 0) {
      float4* const dq =
          reinterpret_cast<float4*>(params.dq + (first_number + first) * problem.dim_qk);
      const int32_t count = min(kBlockRows, end - first) * (problem.dim_qk / 4);
      for (int32_t n = threadIdx.x; n < count; n += kThreads) dq[n] = make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    if (threadIdx.x < kBlockRows && own < end) {
      const int64_t number = first_number + own;
      params.lse2[number] = lse == -INFINITY ? INFINITY : lse * kLog2E;
      params.delta[number] = own < sequence.len.q ? sums[threadIdx.x] - dlse : 0.0f;
      if (params.turns && own % params.turn_q == 0) {
        params.turns[params.query_tile(sequence, b, h, own / params.turn_q, params.turn_q)] = 0;
      }
      if (params.tile_q != 0 && own % params.tile_q == 0) {
        const Interval rows{own, min(own + params.tile_q, sequence.len.q)};
        const Interval tiles = key_tiles(problem.mask_rule(), rows, sequence.len, params.tile_kv);
        const int64_t tile = number / params.tile_q;
        const int32_t state = kDqTurn * max(tiles.end - tiles.begin, 0);
        params.dq_states[tile * params.dq_parts] = state;
        if (params.dq_parts > 1) params.dq_states[tile * 2 + 1] = state;  // a loop would spill
        if (params.ordered) params.dq_first[tile] = tiles.begin;
      }
    }
    __syncthreads();  // the sums have been read
  }
}

// T: the problem's type. Lanes and rows as above.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    convert_dq_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kStepRows = kThreads / kLanes, kBlockRows = kSteps * kStepRows;
  const Problem& problem = params.problem;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const Sequence sequence = sequence_of(problem, params.args.shape, params.args.inputs, b);
  const float* const dq = params.dq + params.row(b, h, sequence.first_q) * problem.dim_qk;
  for (int32_t first = blockIdx.y * kBlockRows; first < sequence.len.q;
       first += gridDim.y * kBlockRows) {
    for (int32_t c = lane * 8; c < problem.dim_qk; c += kLanes * 8) {
      float4 x[kSteps][2];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int32_t i = min(first + step * kStepRows + group, sequence.len.q - 1);
        const float4* from =
            reinterpret_cast<const float4*>(dq + static_cast<int64_t>(i) * problem.dim_qk + c);
        x[step][0] = from[0];
        x[step][1] = from[1];
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int32_t i = first + step * kStepRows + group;
        if (i >= sequence.len.q) continue;
        const float4 y = x[step][0], z = x[step][1];
        Eight sums{{y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w}};
#pragma unroll
        for (int n = 0; n < 8; ++n) sums.x[n] *= problem.scale;
        store_eight<T>(tensor_row(params.args.dq, sizeof(T), b, h, sequence.first_q + i), c, sums);
      }
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

// Calls launch(grid, lanes) for rows of `dim` elements, 8 a lane.
template <class Launch>
cudaError_t with_lanes(const BackwardParams& params, int32_t dim, Launch launch) {
  const flashattn_shape& shape = params.args.shape;
  const auto grid = [&](int32_t lanes) {
    return grid_of(shape.batch, params.problem.heads_q, shape.seqlen_q, kSteps * kThreads / lanes);
  };
  if (dim <= 64) return launch(grid(8), std::integral_constant<int, 8>());
  return launch(grid(16), std::integral_constant<int, 16>());
}

template <class T, class O>
cudaError_t prepare_as(const BackwardParams& params, cudaStream_t stream) {
  return with_lanes(params, params.problem.dim_v, [&](dim3 grid, auto lanes) {
    return start(&prepare_kernel<T, O, lanes()>, grid, kThreads, 0, params, stream);
  });
}

template <class T>
cudaError_t prepare(const BackwardParams& params, cudaStream_t stream) {
  return params.problem.dtype_o == FLASHATTN_DTYPE_F32 ? prepare_as<T, float>(params, stream)
                                                       : prepare_as<T, T>(params, stream);
}

template <class T>
cudaError_t convert_dq(const BackwardParams& params, cudaStream_t stream) {
  return with_lanes(params, params.problem.dim_qk, [&](dim3 grid, auto lanes) {
    return start(&convert_dq_kernel<T, lanes()>, grid, kThreads, 0, params, stream);
  });
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
