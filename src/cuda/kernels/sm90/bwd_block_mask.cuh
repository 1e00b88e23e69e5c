// Block mask of the Hopper backward pass: the Q tiles of a work tile in which it leaves a visible
// key.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tiles.cuh"

namespace flashattn::cuda::sm90 {

// The keys of a work tile; in a cluster those of both CTAs.
template <class Config>
__device__ __forceinline__ Interval cluster_keys(const volatile BwdWorkTile<Config>& work_tile) {
  const int32_t first = work_tile.key / Config::kClusterTileKv * Config::kClusterTileKv;
  return {first, min(first + Config::kClusterTileKv, work_tile.len.kv)};
}

// Finds the Q tiles of a work tile that the block mask leaves visible, one tile per lane. Loops are
// rolled, and little is kept from tile to tile: this warp has few registers.
template <class Config>
__device__ __forceinline__ void find_visible_tiles(const BackwardParams& params,
                                                   volatile BwdWorkTile<Config>& work_tile) {
  constexpr int kSpans = kBlockMaskSpans<Config>, kSpanKeys = Config::kClusterTileKv / kSpans;
  const Problem& problem = params.common.problem;
  const Inputs& in = params.common.args.inputs;
  const int32_t lane = threadIdx.x % 32;
  __syncwarp();  // one lane wrote the work tile
  const int32_t tiles = max(work_tile.q_tiles.end - work_tile.q_tiles.begin, 0);
  const int32_t words = (tiles * params.common.q_heads_per_kv_head + 31) / 32;
#pragma unroll 1
  for (int32_t n = 0; n < kSpans * words; ++n) {
    const int32_t span = kSpans == 1 ? 0 : n / words, word = n - span * words;
    const Interval keys = cluster_keys<Config>(work_tile);
    const int32_t begin = keys.begin + span * kSpanKeys, end = min(begin + kSpanKeys, keys.end);
    const int32_t head = (word * 32 + lane) / tiles;
    bool visible = false, full = head < params.common.q_heads_per_kv_head && begin < end;
    if (full) {
      const int32_t query =
          (word * 32 + lane - head * tiles + work_tile.q_tiles.begin) * Config::kTileQ;
      const int32_t y_end =
          (min(query + Config::kTileQ, work_tile.len.q) - 1) / problem.block_q + 1;
      const bool has_lens = problem.mask & FLASHATTN_MASK_BLOCK_LENS;
      int32_t y = query / problem.block_q;
      const uint8_t* on = in.block_mask + work_tile.b * in.block_mask_stride_batch +
                          (work_tile.kv_head * params.common.q_heads_per_kv_head + head) *
                              in.block_mask_stride_head +
                          y * in.block_mask_stride_row;
      // Stops once the tile is known to be visible in part: neither flag can change any more.
#pragma unroll 1
      for (; y < y_end && !(visible && !full); ++y, on += in.block_mask_stride_row) {
#pragma unroll 1
        for (int32_t x = begin / problem.block_kv;
             x <= (end - 1) / problem.block_kv && !(visible && !full); ++x) {
          const int32_t byte = on[x];  // as in BlockMask::kind()
          visible |= byte != 0;
          full &= byte > has_lens && Config::kSplitsBlockMask;
        }
      }
    }
    const uint32_t some = __ballot_sync(~0u, visible), all = __ballot_sync(~0u, full);
    if (lane == 0) {
      work_tile.visible_tiles[span][word] = some;
      if (Config::kSplitsBlockMask) work_tile.full_tiles[span][word] = all;
    }
  }
  if (lane != 0) return;
  int32_t hidden = tiles * params.common.q_heads_per_kv_head;
#pragma unroll 1
  for (int32_t word = 0; word < words; ++word) {
    uint32_t some = 0;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) some |= work_tile.visible_tiles[span][word];
    hidden -= __popc(some);
  }
  work_tile.iter_end = work_tile.iter_end - hidden;
}

}  // namespace flashattn::cuda::sm90
