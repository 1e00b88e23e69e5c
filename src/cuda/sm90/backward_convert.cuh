// The sums of dQ of the Hopper backward pass, which lie in tiles in the order of accumulators, to
// rows of the problem's type: those that backward_scout.cuh has not had the time for.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda::sm90 {

// As many as have left their accumulators there.
template <class Config>
constexpr int kConvertThreads = 128 * Config::kShares;

// One block a tile of queries.
template <class Config>
__global__ void __launch_bounds__(kConvertThreads<Config>)
    convert_dq_kernel(const __grid_constant__ cuda::BackwardParams params) {
  using T = typename Config::T;
  constexpr int kDim = Config::kPanelsQk * 64, kTileQ = Config::kTileQ;
  constexpr int kThreads = kConvertThreads<Config>, kPieces = kTileQ * kDim / (4 * kThreads);
  constexpr int kPitch = kDim + 8;  // elements: rows four banks apart
  __shared__ __align__(16) T rows[kTileQ * kPitch];
  const Problem& problem = params.problem;
  const int32_t tiles = static_cast<int32_t>(ceil_div(params.args.shape.seqlen_q, kTileQ));
  const int32_t unit = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int32_t b = unit / problem.heads_q, h = unit % problem.heads_q;
  const Sequence sequence = sequence_of(problem, params.args.shape, params.args.inputs, b);
  const int32_t first = tile * kTileQ, count = min(sequence.len.q - first, kTileQ);
  ptx::wait_for_previous();
  if (count <= 0) return;

  const int32_t thread = threadIdx.x % 128, group = threadIdx.x / 128;
  const int32_t row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  const int64_t place = params.query_tile(sequence, b, h, tile, kTileQ);
  const float4* from = reinterpret_cast<const float4*>(params.dq + place * (kTileQ * kDim)) +
                       group * (kPieces * 128) + thread;
  // Nothing lies where no key was seen.
  const int32_t part = group / Config::kOwnShares;
  const int32_t state = params.dq_states[place * kBlocks<Config> + part];
  if (state == kDqConverted) return;
  const bool some = state & kDqClaimed;
  float4 pieces[kPieces];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    pieces[n] = some ? from[n * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const uint32_t upper = ptx::pack<T>(pieces[n].x * problem.scale, pieces[n].y * problem.scale);
    const uint32_t lower = ptx::pack<T>(pieces[n].z * problem.scale, pieces[n].w * problem.scale);
    if constexpr (Config::kLong) {  // dQ^T: columns 8 apart, of two queries
      uint16_t* to =
          reinterpret_cast<uint16_t*>(rows + (8 * n + column) * kPitch) + group * 64 + row;
      to[0] = static_cast<uint16_t>(upper);
      to[kPitch] = static_cast<uint16_t>(upper >> 16);
      to[8] = static_cast<uint16_t>(lower);
      to[kPitch + 8] = static_cast<uint16_t>(lower >> 16);
    } else {
      T* to = rows + (row + (kTileQ == 64 ? 0 : group * 64)) * kPitch +
              (kTileQ == 64 ? group * 64 : 0) + 8 * n + column;
      *reinterpret_cast<uint32_t*>(to) = upper;
      *reinterpret_cast<uint32_t*>(to + 8 * kPitch) = lower;
    }
  }
  __syncthreads();
  for (int32_t x = threadIdx.x; x < count * (kDim / 8); x += kThreads) {
    const int32_t r = x / (kDim / 8), c = x % (kDim / 8) * 8;
    if (c >= problem.dim_qk) continue;
    char* to = tensor_row(params.args.dq, 2, b, h, sequence.first_q + first + r);
    *reinterpret_cast<int4*>(to + c * 2) = *reinterpret_cast<const int4*>(rows + r * kPitch + c);
  }
}

}  // namespace flashattn::cuda::sm90
