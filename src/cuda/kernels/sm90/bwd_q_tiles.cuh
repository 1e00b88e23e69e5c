// The Q tiles of a work tile of the Hopper backward kernels: their order, and those that a block
// mask hides.
#pragma once

#include "cuda/kernels/sm90/bwd_config.cuh"

namespace flashattn::cuda::sm90 {

// q_coord with kCoordHasHead: (head of the GQA group) * kCoordHead + Q tile.
constexpr int32_t kCoordHead = kMaxRuntimeTiles, kCoordTileMask = kCoordHead - 1;

// Index of the bit of a Q tile in visible_tiles and full_tiles. head: index in the GQA group.
template <class Config>
__device__ __forceinline__ int32_t block_mask_bit(const volatile BwdWorkTile<Config>& work_tile,
                                                  int32_t head, int32_t tile) {
  return head * (work_tile.q_tiles.end - work_tile.q_tiles.begin) + tile - work_tile.q_tiles.begin;
}

// Whether the block mask lets some query of the Q tile see a key of the work tile.
template <class Config>
__device__ __forceinline__ bool is_visible(const volatile BwdWorkTile<Config>& work_tile,
                                           const BackwardParams& params, int32_t head,
                                           int32_t tile) {
  if (!Config::kHasBlockMask || !(params.common.problem.mask & FLASHATTN_MASK_BLOCKS)) return true;
  const int32_t bit = block_mask_bit(work_tile, head, tile);
  uint32_t visible = 0;
#pragma unroll
  for (int span = 0; span < kBlockMaskSpans<Config>; ++span)
    visible |= work_tile.visible_tiles[span][bit / 32];
  return visible >> bit % 32 & 1;
}

// The Q tile after `tile`; q_tiles.begin follows the last.
template <class Config>
__device__ __forceinline__ int32_t next_q_tile(const volatile BwdWorkTile<Config>& work_tile,
                                               int32_t tile) {
  return tile == work_tile.q_tiles.end - 1 ? work_tile.q_tiles.begin : tile + 1;
}

// Calls step(heads left with this one, tile, workspace_tile) for each Q tile of a work tile, in the
// order that all warps follow, or skip(workspace_tile) if the block mask hides the tile.
// workspace_tile: its index in dq, lse2 and delta.
template <class Config, class Step, class Skip>
__device__ __forceinline__ void for_each_tile(const volatile BwdWorkTile<Config>& work_tile,
                                              const BackwardParams& params, Step step, Skip skip) {
  int32_t workspace_tile = work_tile.workspace_tile;
#pragma unroll 1
  for (int32_t heads = params.common.q_heads_per_kv_head; heads > 0; --heads) {
    int32_t tile = work_tile.first_q_tile;
#pragma unroll 1
    for (int32_t left = work_tile.q_tiles.end - work_tile.q_tiles.begin; left > 0; --left) {
      if (is_visible<Config>(work_tile, params, params.common.q_heads_per_kv_head - heads, tile)) {
        step(heads, tile, workspace_tile + tile);
      } else {
        skip(workspace_tile + tile);
      }
      tile = next_q_tile(work_tile, tile);
    }
    workspace_tile += params.head_q_tiles;
  }
}

}  // namespace flashattn::cuda::sm90
