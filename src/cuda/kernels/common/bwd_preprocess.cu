// The kernel before the backward pass: row statistics, rounded dO, cleared workspace.
#include <type_traits>

#include "cuda/kernels/common/bwd_rows.cuh"
#include "cuda/kernels/common/lse_recompute.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {
namespace {

// Rows that a thread loads before it uses the first.
template <class O, int kLanes>
constexpr int kPreprocessSteps = sizeof(O) == 2 ? 64 / kLanes : 2;
// CTAs that run at once on a multiprocessor. No more are launched, as the code before a CTA's first
// row costs as much as some rows.
template <class O, int kLanes>
constexpr int kPreprocessCtasPerSm = kPreprocessSteps<O, kLanes> > 4 ? 4 : 5;
// Whether sequences may overlap where Hopper kernels add to dq in order. Overlapping sequences
// would share tiles of dq, and CTAs would wait forever for a KV tile of the other sequence.
// Portable kernels wait for at least a count, which does arrive. All threads of the CTA call this.
__device__ __forceinline__ bool starts_decrease(const BackwardParams& params) {
  const int32_t* const starts = params.args.inputs.cu_seqlens_q;
  if (!params.tile_q || !params.ordered || !starts) return false;
  __shared__ int32_t decreases;
  if (threadIdx.x == 0) decreases = 0;
  __syncthreads();
  for (int32_t b = threadIdx.x; b < params.args.shape.batch; b += kRowThreads) {
    if (starts[b + 1] < starts[b]) decreases = 1;
  }
  __syncthreads();
  return decreases;
}

template <class T>
__device__ __forceinline__ void round_vec8(Vec8& e) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float2 pair = ptx::unpack<T>(ptx::pack<T>(e.x[n], e.x[n + 1]));
    e.x[n] = pair.x;
    e.x[n + 1] = pair.y;
  }
}

// Recomputes base and lse2 of the warp's rows with a large lse, kRows at a time. It runs after the
// main loop and recomputes its operands, because that loop has no registers to spare.
template <class T, int32_t kRows>
__device__ __forceinline__ void recompute_large_lse(const BackwardParams& params) {
  const BackwardArgs& args = params.args;
  const int32_t head_idx = no_hoist(blockIdx.x), warps = kRowThreads / 32;
  const int32_t b = head_idx / params.problem.heads_q, h = head_idx % params.problem.heads_q;
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

// T: the problem's type. O: the type of o and dout. kLanes lanes load a row; one lane stores its
// statistics.
template <class T, class O, int kLanes>
__global__ void __launch_bounds__(kRowThreads, kPreprocessCtasPerSm<O, kLanes>)
    bwd_preprocess_kernel(const __grid_constant__ BackwardParams params) {
  constexpr bool kRoundsDout = !std::is_same<T, O>::value;
  constexpr int kSteps = kPreprocessSteps<O, kLanes>, kRowsPerStep = 32 / kLanes;
  constexpr int kRows = kSteps * kRowsPerStep, kWarps = kRowThreads / 32;
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  const Problem& problem = params.problem;
  const BackwardArgs& args = params.args;
  const int32_t b = blockIdx.x / problem.heads_q, h = blockIdx.x % problem.heads_q;
  const int32_t lane = threadIdx.x % 32, lane_in_row = lane % kLanes, step_row = lane / kLanes;
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    clear_counters(params, kRowThreads, starts_decrease(params) ? kNoWork : 0);
  }
  const int64_t lse_delta_offset = params.lse_delta_offset(sequence, b, h);
  const int64_t first_row = params.row(b, h, sequence.offset_q);
  const RowView o = head_rows<sizeof(O)>(args.o, b, h, sequence.offset_q);
  const RowView dout = head_rows<sizeof(O)>(args.dout, b, h, sequence.offset_q);
  // The backward kernel reads whole tiles.
  const int32_t end = params.tile_q
                          ? (sequence.len.q + params.tile_q - 1) / params.tile_q * params.tile_q
                          : sequence.len.q;
  const int32_t warp = blockIdx.y * kWarps + threadIdx.x / 32, stride = gridDim.y * kWarps;
  bool any_large_lse = false;  // among the rows whose lse this lane loads
  for (int32_t first = warp * kRows; first < end; first += stride * kRows) {
    const int32_t lane_row = first + lane;
    float lse = -INFINITY, dlse = 0.0f;
    if (lane < kRows && lane_row < sequence.len.q) {
      lse = args.lse[first_row + lane_row];
      if (args.dlse) dlse = args.dlse[first_row + lane_row];
    }
    any_large_lse |= is_large_lse(lse);
    float sum[kSteps] = {};
    for (int32_t c = lane_in_row * 8; c < problem.dim_v; c += kLanes * 8) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Rows past the last load the last row, without a branch.
        const int32_t i = first + step * kRowsPerStep + step_row, row = min(i, sequence.len.q - 1);
        const Vec8 x = load_vec8<O>(o.base + row * o.row_bytes, c);
        Vec8 y = load_vec8<O>(dout.base + row * dout.row_bytes, c);
        if constexpr (kRoundsDout)
          round_vec8<T>(y);  // as dP uses it; otherwise dP - delta does not cancel
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[step] = fmaf(x.x[n], y.x[n], sum[step]);
        if (kRoundsDout && i < sequence.len.q) {
          store_vec8<T>(tensor_row(params.dout, sizeof(T), b, h, sequence.offset_q + i), c, y);
        }
      }
    }
    // Reduces over the lanes of a row. Lane r then stores row r, computed in step r / kRowsPerStep.
    float delta = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 1; n < kLanes; n *= 2) sum[step] += __shfl_xor_sync(~0u, sum[step], n);
      if (lane_in_row == step) delta = sum[step];
    }
    delta = __shfl_sync(~0u, delta, lane % kRowsPerStep * kLanes + lane / kRowsPerStep % kSteps);
    if (params.tile_q == 0) {
      float4* const dq =
          reinterpret_cast<float4*>(params.dq + (lse_delta_offset + first) * problem.dim_qk);
      const int32_t count = min(kRows, end - first) * (problem.dim_qk / 4);
      for (int32_t n = lane; n < count; n += 32) dq[n] = make_float4(0, 0, 0, 0);
    }
    if (lane >= kRows || lane_row >= end) continue;
    if (params.dq_order && lane_row % params.dq_order_tile_q == 0) {
      params.dq_order[params.query_tile(sequence, b, h, lane_row / params.dq_order_tile_q,
                                        params.dq_order_tile_q)] = 0;
    }
    // Recomputed, as registers are scarce.
    const int64_t first_tile =
        params.tile_q ? params.query_tile(sequence, b, no_hoist(h), 0, params.tile_q) : 0;
    store_lse_delta<T>(params, sequence, lse_delta_offset, first_tile, lane_row, lse, dlse, delta);
  }
  if (__any_sync(~0u, any_large_lse)) recompute_large_lse<T, kRows>(params);
}

template <class T, class O, int kLanes>
constexpr BwdRowKernel instance() {
  return {&bwd_preprocess_kernel<T, O, kLanes>, kRowThreads / kLanes * kPreprocessSteps<O, kLanes>,
          kPreprocessCtasPerSm<O, kLanes>};
}

template <class T, class O>
BwdRowKernel instance(int32_t dim_v) {
  return dim_v <= kNarrowRow ? instance<T, O, 8>() : instance<T, O, 16>();
}

}  // namespace

BwdRowKernel bwd_preprocess_rows(const Problem& problem) {
  return with_type(problem.dtype, [&problem](auto number) {
    using T = decltype(number);
    return problem.dtype_o == FLASHATTN_DTYPE_F32 ? instance<T, float>(problem.dim_v)
                                                  : instance<T, T>(problem.dim_v);
  });
}

}  // namespace flashattn::cuda
