// The Q tiles of a work tile of the Hopper backward kernels, in the order that all warps follow.
#pragma once

#include "cuda/kernels/sm90/bwd_config.cuh"

namespace flashattn::cuda::sm90 {

// Consumers iterate over q_coord: a Q tile or, with kCoordHasHead, (head of the GQA group) *
// kCoordHead + Q tile.
template <class Config>
constexpr int32_t kCoordHead = Config::kHasBlockMask ? kMaxListedTiles : kMaxDropoutTiles;

// A Q tile of a list: its q_coord and, for the halves of the work tile's keys, what a block mask
// shows of them. shows_any: some key to some query. shows_all: all keys to all queries.
struct QTileEntry {
  static constexpr int kFlags = 28;  // the lowest bit of these
  static_assert(int64_t{kMaxListedTiles} * kMaxListedHeads <= 1 << kFlags, "the bits of q_coord");
  uint32_t word;

  static __device__ __forceinline__ QTileEntry of(int32_t q_coord, const QTileBits& bits, int bit) {
    uint32_t flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      flags |= (bits.any[half] >> bit & 1) << half;
      flags |= (bits.all[half] >> bit & 1) << (2 + half);
    }
    return {flags << kFlags | static_cast<uint32_t>(q_coord)};
  }

  __device__ __forceinline__ int32_t q_coord() const {
    return static_cast<int32_t>(word & ((1u << kFlags) - 1));
  }
  __device__ __forceinline__ int32_t head() const { return q_coord() / kMaxListedTiles; }
  __device__ __forceinline__ int32_t tile() const { return q_coord() % kMaxListedTiles; }
  __device__ __forceinline__ bool shows_any(int32_t half) const {
    return word >> (kFlags + half) & 1;
  }
  __device__ __forceinline__ bool shows_all(int32_t half) const {
    return word >> (kFlags + 2 + half) & 1;
  }
};

// Without a list: the Q tile after `tile`; q_tiles.begin follows the last.
template <class Config>
__device__ __forceinline__ int32_t next_q_tile(const volatile BwdWorkTile<Config>& work_tile,
                                               int32_t tile) {
  return tile == work_tile.q_tiles.end - 1 ? work_tile.q_tiles.begin : tile + 1;
}

// Calls step(heads left with this one, tile, workspace_tile, entry) for each Q tile of a work tile.
// workspace_tile: its index in dq, lse2 and delta. entry: its QTileEntry, if there is a list.
template <class Config, class Step>
__device__ __forceinline__ void for_each_tile(const volatile BwdWorkTile<Config>& work_tile,
                                              const BackwardParams& params, Step step) {
  if constexpr (Config::kHasBlockMask) {
    // Loaded a step ahead.
    const uint32_t* list = work_tile.q_tile_list;
    uint32_t left = work_tile.iter_end - work_tile.iter_begin;
    uint32_t next = left > 0 ? *list : 0;
#pragma unroll 1
    for (; left > 0; --left) {
      const QTileEntry entry{next};
      if (left > 1) next = *++list;
      step(params.common.q_heads_per_kv_head - entry.head(), entry.tile(),
           work_tile.workspace_tile + entry.head() * params.head_q_tiles + entry.tile(), entry);
    }
  } else {
    int32_t workspace_tile = work_tile.workspace_tile;
#pragma unroll 1
    for (int32_t heads = params.common.q_heads_per_kv_head; heads > 0; --heads) {
      int32_t tile = work_tile.first_q_tile;
#pragma unroll 1
      for (int32_t left = work_tile.q_tiles.end - work_tile.q_tiles.begin; left > 0; --left) {
        step(heads, tile, workspace_tile + tile, QTileEntry{});
        tile = next_q_tile(work_tile, tile);
      }
      workspace_tile += params.head_q_tiles;
    }
  }
}

}  // namespace flashattn::cuda::sm90
