// dQ postprocess kernel of the Hopper backward pass: converts the fp32 accumulators of dQ, which
// lie in tiles in accumulator order, to rows of the problem's type, except tiles that
// dq_inline_postprocess.cuh has converted.
#pragma once

#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/bwd_q_tiles.cuh"
#include "cuda/kernels/sm90/dq_convert.cuh"

namespace flashattn::cuda::sm90 {

// Threads per CTA: 128 for each subtile of a dQ tile.
template <class Config>
constexpr int kPostprocessThreads = 128 * Config::kDqSubtiles;

template <class Config>
constexpr int kPostprocessPitch = Config::kPanelsQk * 64 + 8;  // rows four banks apart

// A Q tile of dq.
struct QTile {
  int32_t b, h, tile;
  SeqlenInfo sequence;
  int64_t workspace_tile;  // in dq, lse2 and delta
  int32_t count;           // queries; 0 or less: there is no such tile
};

template <class Config>
__device__ __forceinline__ QTile q_tile_at(const cuda::BackwardParams& params, int32_t n,
                                           int32_t tiles) {
  const Problem& problem = params.problem;
  QTile at;
  at.tile = n % tiles;
  at.b = n / tiles / problem.heads_q;
  at.h = n / tiles % problem.heads_q;
  at.sequence = seqlen_info(problem, params.args.shape, params.args.inputs, at.b);
  at.workspace_tile = params.query_tile(at.sequence, at.b, at.h, at.tile, Config::kTileQ);
  at.count = min(at.sequence.len.q - at.tile * Config::kTileQ, Config::kTileQ);
  return at;
}

// Converts a tile. rows: the CTA's shared memory, kTileQ rows of kPitch elements.
template <class Config>
__device__ __forceinline__ void postprocess_tile(const cuda::BackwardParams& params,
                                                 const QTile& at, typename Config::T* rows) {
  using T = typename Config::T;
  constexpr int kDim = Config::kPanelsQk * 64, kTileQ = Config::kTileQ;
  constexpr int kThreads = kPostprocessThreads<Config>, kQuads = kTileQ * kDim / (4 * kThreads);
  constexpr int kPitch = kPostprocessPitch<Config>;
  const Problem& problem = params.problem;
  const int32_t thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
  const int32_t row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  const float4* from =
      reinterpret_cast<const float4*>(params.dq + at.workspace_tile * (kTileQ * kDim)) +
      warpgroup * (kQuads * 128) + thread;
  // No CTA has written dq where no query saw a key.
  const int32_t subtile_cta = warpgroup / Config::kCtaDqSubtiles;
  const bool claimed =
      params.dq_states[at.workspace_tile * kClusterSize<Config> + subtile_cta] & kDqClaimed;
  float4 quads[kQuads];
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    quads[n] = claimed ? from[n * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    const DqQuad<T> quad(quads[n], problem.scale);
    const uint32_t upper = quad.upper.word, lower = quad.lower.word;
    if constexpr (Config::kSplitsKPanel) {  // 64 columns of panel 0 or 2, 32 of panel 1
      const int first = n < 8 ? warpgroup * 128 : 64 + warpgroup * 32;
      T* to = rows + row * kPitch + first + n % 8 * 8 + column;
      *reinterpret_cast<uint32_t*>(to) = upper;
      *reinterpret_cast<uint32_t*>(to + 8 * kPitch) = lower;
    } else if constexpr (Config::kConsumersComputeDq) {  // dQ^T: columns 8 apart, of two queries
      uint16_t* to =
          reinterpret_cast<uint16_t*>(rows + (8 * n + column) * kPitch) + warpgroup * 64 + row;
      to[0] = static_cast<uint16_t>(upper);
      to[kPitch] = static_cast<uint16_t>(upper >> 16);
      to[8] = static_cast<uint16_t>(lower);
      to[kPitch + 8] = static_cast<uint16_t>(lower >> 16);
    } else {
      T* to = rows + (row + (kTileQ == 64 ? 0 : warpgroup * 64)) * kPitch +
              (kTileQ == 64 ? warpgroup * 64 : 0) + 8 * n + column;
      *reinterpret_cast<uint32_t*>(to) = upper;
      *reinterpret_cast<uint32_t*>(to + 8 * kPitch) = lower;
    }
  }
  __syncthreads();
  for (int32_t x = threadIdx.x; x < at.count * (kDim / 8); x += kThreads) {
    const int32_t r = x / (kDim / 8), c = x % (kDim / 8) * 8;
    if (c >= problem.dim_qk) continue;
    char* to =
        tensor_row(params.args.dq, 2, at.b, at.h, at.sequence.offset_q + at.tile * kTileQ + r);
    *reinterpret_cast<int4*>(to + c * 2) = *reinterpret_cast<const int4*>(rows + r * kPitch + c);
  }
  __syncthreads();  // the rows have been read
}

// CTAs are persistent, as many as run at once.
template <class Config>
__global__ void __launch_bounds__(kPostprocessThreads<Config>,
                                  kPostprocessThreadsPerSm / kPostprocessThreads<Config>)
    bwd_postprocess_kernel(const __grid_constant__ cuda::BackwardParams params) {
  __shared__ __align__(16) typename Config::T rows[Config::kTileQ * kPostprocessPitch<Config>];
  const auto tiles = static_cast<int32_t>(ceil_div(params.args.shape.seqlen_q, Config::kTileQ));
  const int32_t end = params.args.shape.batch * params.problem.heads_q * tiles;
  const int32_t stride = gridDim.x;
  ptx::griddep_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.large_lse = 0;
  if (params.stamp && blockIdx.x == 0 && threadIdx.x == 0) *params.stamp = 0;
  for (int32_t first = blockIdx.x; first < end; first += 32 * stride) {
    // Each lane checks one tile; all warps check the same tiles.
    const int32_t own = first + threadIdx.x % 32 * stride;
    bool valid = false;
    if (own < end) {
      const QTile at = q_tile_at<Config>(params, own, tiles);
      valid = at.count > 0;
      if (Config::kInlinePostprocess && valid)
        valid = params.dq_states[at.workspace_tile] != kDqConverted;
    }
    for (uint32_t left = __ballot_sync(~0u, valid); left != 0; left &= left - 1) {
      const int32_t next = first + (__ffs(left) - 1) * stride;
      postprocess_tile<Config>(params, q_tile_at<Config>(params, next, tiles), rows);
    }
  }
}

}  // namespace flashattn::cuda::sm90
