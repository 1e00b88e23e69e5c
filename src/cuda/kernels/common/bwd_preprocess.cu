#include "cuda/kernels/common/bwd_preprocess.h"

#include <algorithm>
#include <type_traits>

#include "cuda/kernels/common/lse_recompute.cuh"
#include "cuda/host/row_grid.h"
#include "cuda/host/preload.h"
#include "cuda/host/launch.h"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kThreads = 128;
// Rows that a thread has on their way at once.
constexpr int kConvertSteps = 4;
template <class O, int kLanes>
constexpr int kPrepareSteps = sizeof(O) == 2 ? 64 / kLanes : 2;
// Blocks that run at once on a multiprocessor: no more are started, as what precedes the first row
// of one costs as much as some rows.
template <class O, int kLanes>
constexpr unsigned kPrepareBlocks = kPrepareSteps<O, kLanes> > 4 ? 4 : 5;

struct Eight {
  float x[8];
};

template <class T>
__device__ __forceinline__ Eight load_eight(const char* row, int32_t c) {
  const int4 words = ptx::load_once(row + c * 2);
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

// Whether sequences may overlap, of which on Hopper tiles of keys take turns. They would share
// tiles of dq, and wait for turns that never come. Portable kernels wait for a turn or a later one.
// A whole block calls it.
__device__ __forceinline__ bool starts_decrease(const BackwardParams& params) {
  const int32_t* const starts = params.args.inputs.cu_seqlens_q;
  if (!params.tile_q || !params.ordered || !starts) return false;
  __shared__ int32_t decrease;
  if (threadIdx.x == 0) decrease = 0;
  __syncthreads();
  for (int32_t b = threadIdx.x; b < params.args.shape.batch; b += kThreads) {
    if (starts[b + 1] < starts[b]) decrease = 1;
  }
  __syncthreads();
  return decrease;
}

template <class T>
__device__ __forceinline__ void round_eight(Eight& e) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float2 pair = ptx::unpack<T>(ptx::pack<T>(e.x[n], e.x[n + 1]));
    e.x[n] = pair.x;
    e.x[n + 1] = pair.y;
  }
}

// Of the rows that a warp has prepared, kRows at a time. Behind all of them, and from what is found
// anew: preparing has no registers to spare.
template <class T, int32_t kRows>
__device__ __forceinline__ void find_bases(const BackwardParams& params) {
  const BackwardArgs& args = params.args;
  const int32_t unit = no_hoist(blockIdx.x), warps = kThreads / 32;
  const int32_t b = unit / params.problem.heads_q, h = unit % params.problem.heads_q;
  const SeqlenInfo sequence = seqlen_info(params.problem, args.shape, args.inputs, b);
  const int32_t lane = no_hoist(threadIdx.x) % 32;
#pragma unroll 1
  for (int32_t first = (no_hoist(blockIdx.y) * warps + no_hoist(threadIdx.x) / 32) * kRows;
       first < sequence.len.q; first += gridDim.y * warps * kRows) {
    float lse = -INFINITY;
    if (lane < kRows && first + lane < sequence.len.q) {
      lse = args.lse[params.row(b, h, sequence.offset_q) + first + lane];
    }
    LseRecompute<T>(params, sequence, b, h).run(first, __ballot_sync(~0u, is_large_lse(lse)), lse);
  }
}

// T: the problem's type. O: that of o and dout. kLanes share a row; the numbers of a row are one
// lane's.
template <class T, class O, int kLanes>
__global__ void __launch_bounds__(kThreads, kPrepareBlocks<O, kLanes>)
    prepare_kernel(const __grid_constant__ BackwardParams params) {
  constexpr bool kCopies = !std::is_same<T, O>::value;
  constexpr int kSteps = kPrepareSteps<O, kLanes>, kGroups = 32 / kLanes;
  constexpr int kRows = kSteps * kGroups, kWarps = kThreads / 32;
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  const Problem& problem = params.problem;
  const BackwardArgs& args = params.args;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % 32, in_row = lane % kLanes, group = lane / kLanes;
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    clear_counters(params, kThreads, starts_decrease(params) ? kNoWork : 0);
  }
  const int64_t lse_delta_offset = params.lse_delta_offset(sequence, b, h);
  const int64_t first_row = params.row(b, h, sequence.offset_q);
  const Rows o = head_rows<sizeof(O)>(args.o, b, h, sequence.offset_q);
  const Rows dout = head_rows<sizeof(O)>(args.dout, b, h, sequence.offset_q);
  // Whole tiles are read.
  const int32_t end = params.tile_q
                          ? (sequence.len.q + params.tile_q - 1) / params.tile_q * params.tile_q
                          : sequence.len.q;
  const int32_t at = blockIdx.y * kWarps + threadIdx.x / 32, stride = gridDim.y * kWarps;
  for (int32_t first = at * kRows; first < end; first += stride * kRows) {
    const int32_t own = first + lane;
    float lse = -INFINITY, dlse = 0.0f;
    if (lane < kRows && own < sequence.len.q) {
      lse = args.lse[first_row + own];
      if (args.dlse) dlse = args.dlse[first_row + own];
    }
    float sum[kSteps] = {};
    for (int32_t c = in_row * 8; c < problem.dim_v; c += kLanes * 8) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Past the last one: the last one, without a branch.
        const int32_t i = first + step * kGroups + group, row = min(i, sequence.len.q - 1);
        const Eight x = load_eight<O>(o.base + row * o.row_bytes, c);
        Eight y = load_eight<O>(dout.base + row * dout.row_bytes, c);
        if constexpr (kCopies) round_eight<T>(y);  // as dP will have it: or they do not cancel
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[step] = fmaf(x.x[n], y.x[n], sum[step]);
        if (kCopies && i < sequence.len.q) {
          store_eight<T>(tensor_row(params.dout, sizeof(T), b, h, sequence.offset_q + i), c, y);
        }
      }
    }
    // From the lanes of a row to its own: row n of the warp is of step n / kGroups.
    float mine = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 1; n < kLanes; n *= 2) sum[step] += __shfl_xor_sync(~0u, sum[step], n);
      if (in_row == step) mine = sum[step];
    }
    mine = __shfl_sync(~0u, mine, lane % kGroups * kLanes + lane / kGroups % kSteps);
    if (params.tile_q == 0) {
      float4* const dq =
          reinterpret_cast<float4*>(params.dq + (lse_delta_offset + first) * problem.dim_qk);
      const int32_t count = min(kRows, end - first) * (problem.dim_qk / 4);
      for (int32_t n = lane; n < count; n += 32) dq[n] = make_float4(0, 0, 0, 0);
    }
    if (lane >= kRows || own >= end) continue;
    if (params.dq_order && own % params.dq_order_tile_q == 0) {
      params.dq_order[params.query_tile(sequence, b, h, own / params.dq_order_tile_q,
                                        params.dq_order_tile_q)] = 0;
    }
    // Found anew: registers are scarce.
    const int64_t first_tile =
        params.tile_q ? params.query_tile(sequence, b, no_hoist(h), 0, params.tile_q) : 0;
    store_lse_delta(params, sequence, lse_delta_offset, first_tile, own, lse, dlse, mine);
  }
  find_bases<T, kRows>(params);
}

// T: the problem's type. Lanes and rows as above.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    convert_dq_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kStepRows = kThreads / kLanes, kBlockRows = kConvertSteps * kStepRows;
  const Problem& problem = params.problem;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *params.large_lse = 0;
  const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, params.args.inputs, b);
  const float* const dq = params.dq + params.row(b, h, sequence.offset_q) * problem.dim_qk;
  for (int32_t first = blockIdx.y * kBlockRows; first < sequence.len.q;
       first += gridDim.y * kBlockRows) {
    for (int32_t c = lane * 8; c < problem.dim_qk; c += kLanes * 8) {
      float4 x[kConvertSteps][2];
#pragma unroll
      for (int step = 0; step < kConvertSteps; ++step) {
        const int32_t i = min(first + step * kStepRows + group, sequence.len.q - 1);
        const float4* from =
            reinterpret_cast<const float4*>(dq + static_cast<int64_t>(i) * problem.dim_qk + c);
        x[step][0] = from[0];
        x[step][1] = from[1];
      }
#pragma unroll
      for (int step = 0; step < kConvertSteps; ++step) {
        const int32_t i = first + step * kStepRows + group;
        if (i >= sequence.len.q) continue;
        const float4 y = x[step][0], z = x[step][1];
        Eight sums{{y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w}};
#pragma unroll
        for (int n = 0; n < 8; ++n) sums.x[n] *= problem.scale;
        store_eight<T>(tensor_row(params.args.dq, sizeof(T), b, h, sequence.offset_q + i), c, sums);
      }
    }
  }
}

// The sink's share of a row's weights.
__device__ __forceinline__ float sink_share(const BackwardParams& params, float sink,
                                            int64_t number, float lse) {
  if (lse == -INFINITY) return 0.0f;  // as is the sink
  const float base = params.softmax_base[number], lse2 = params.lse2[number];
  if (base != base && lse2 < INFINITY) return ptx::exp2((sink - lse) * kLog2E);
  // Where keys add nothing to a sink, lse2 is infinite, see LseRecompute.
  if (lse2 == INFINITY) return 1.0f;
  const float unit = params.wide_scores ? 1.0f : params.problem.scale * (kLog2E / kWideUnit);
  return ptx::exp2((sink * (kLog2E / kWideUnit) - base * unit) * kWideUnit - lse2);
}

// One block a head, which adds in a fixed order.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ double sums[kThreads];
  const int32_t h = blockIdx.x;
  const float sink = params.args.inputs.sink[h];
  double total = 0;
  for (int32_t b = 0; b < params.args.shape.batch; ++b) {
    const SeqlenInfo sequence =
        seqlen_info(params.problem, params.args.shape, params.args.inputs, b);
    const int64_t first = params.lse_delta_offset(sequence, b, h);
    const int64_t row = params.row(b, h, sequence.offset_q);
    for (int32_t i = threadIdx.x; i < sequence.len.q; i += kThreads) {
      const float share = sink_share(params, sink, first + i, params.args.lse[row + i]);
      total -= static_cast<double>(share * params.delta[first + i]);
    }
  }
  sums[threadIdx.x] = total;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.args.dsink[h] = static_cast<float>(sums[0]);
}

// Calls launch(lanes) for rows of `dim` elements, 8 a lane.
template <class Launch>
cudaError_t with_lanes(int32_t dim, Launch launch) {
  if (dim <= 64) return launch(std::integral_constant<int, 8>());
  return launch(std::integral_constant<int, 16>());
}

// For so many steps of a block's threads.
dim3 grid_for(const BackwardParams& params, int steps, int lanes) {
  const Shape& shape = params.args.shape;
  return row_grid(shape.batch, params.problem.heads_q, shape.seqlen_q, steps * kThreads / lanes);
}

template <class T, class O>
cudaError_t prepare_as(const BackwardParams& params, int32_t units, cudaStream_t stream) {
  return with_lanes(params.problem.dim_v, [&](auto lanes) {
    dim3 grid = grid_for(params, kPrepareSteps<O, lanes()>, lanes());
    const unsigned most =
        static_cast<unsigned>(units) * kPrepareBlocks<O, lanes()> / std::max(grid.x, 1u);
    grid.y = std::min(grid.y, std::max(most, 1u));
    const auto kernel = &prepare_kernel<T, O, lanes()>;
    // Tiles: on Hopper, where it may start under the end of the kernel before.
    return params.tile_q ? launch_pdl(kernel, grid, kThreads, 0, params, stream)
                         : launch_kernel(kernel, grid, kThreads, 0, params, stream);
  });
}

template <class T>
cudaError_t prepare(const BackwardParams& params, int32_t units, cudaStream_t stream) {
  return params.problem.dtype_o == FLASHATTN_DTYPE_F32 ? prepare_as<T, float>(params, units, stream)
                                                       : prepare_as<T, T>(params, units, stream);
}

template <class T>
cudaError_t convert_dq(const BackwardParams& params, cudaStream_t stream) {
  return with_lanes(params.problem.dim_qk, [&](auto lanes) {
    return launch_kernel(&convert_dq_kernel<T, lanes()>, grid_for(params, kConvertSteps, lanes()),
                         kThreads, 0, params, stream);
  });
}

template <class T>
cudaError_t load_as(const Problem& problem) {
  const cudaError_t error = with_lanes(problem.dim_v, [&problem](auto lanes) {
    return problem.dtype_o == FLASHATTN_DTYPE_F32 ? preload(&prepare_kernel<T, float, lanes()>)
                                                  : preload(&prepare_kernel<T, T, lanes()>);
  });
  if (error != cudaSuccess) return error;
  return with_lanes(problem.dim_qk,
                    [](auto lanes) { return preload(&convert_dq_kernel<T, lanes()>); });
}

}  // namespace

cudaError_t load_gradient_kernels(const Problem& problem) {
  const cudaError_t error = problem.dtype == FLASHATTN_DTYPE_F16 ? load_as<__half>(problem)
                            : problem.dtype == FLASHATTN_DTYPE_BF16
                                ? load_as<__nv_bfloat16>(problem)
                                : load_as<float>(problem);
  const bool sink = problem.has_feature(FLASHATTN_FEATURE_DSINK);
  return error == cudaSuccess && sink ? preload(&dsink_kernel) : error;
}

cudaError_t launch_prepare_backward(const BackwardParams& params, int32_t units,
                                    cudaStream_t stream) {
  switch (params.problem.dtype) {
    case FLASHATTN_DTYPE_F16: return prepare<__half>(params, units, stream);
    case FLASHATTN_DTYPE_BF16: return prepare<__nv_bfloat16>(params, units, stream);
    default: return prepare<float>(params, units, stream);
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
  return launch_kernel(&dsink_kernel, dim3(static_cast<unsigned>(params.problem.heads_q)), kThreads,
                       0, params, stream);
}

}  // namespace flashattn::cuda
