// Block mask of the Hopper forward pass: the KV tiles of a work tile in which it leaves a visible
// key. The scheduler finds the first and the last, the producers those between them, and the
// producer of K tells consumers which tile is in a stage.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/work_tile.cuh"
#include "cuda/device/block_mask.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
constexpr bool kMayHideTiles = Config::ScoreMod::template kHas<BlockMask>;

// How producers and the scheduler find the KV tiles of a work tile.
template <class Config>
using KvTiles = typename std::conditional<
    kMayHideTiles<Config>,
    BlockSparseTiles<ForwardParams, Config::kTileQ, Config::kTileKv, Config::kConsumers>,
    DenseTiles>::type;

// Base class of SharedStorage. It is empty without a block mask, so that the addresses of other
// kernels stay as they are.
template <bool kMayHideTiles, int kStages, int kWorkStages, int kConsumers>
struct VisibleTiles {};
template <int kStages, int kWorkStages, int kConsumers>
struct VisibleTiles<true, kStages, kWorkStages, kConsumers> {
  // The window around the last KV tile of each planned work tile.
  KvTileWindow<kConsumers> last_windows[kWorkStages];
  uint32_t stage_tiles[kStages];  // the StageTile of each stage of K
};

// Index of a KV tile and, for each warpgroup, whether the block mask shows all or some of it, in a
// word.
template <int kConsumers>
struct StageTile {
  static_assert(kConsumers <= 2, "the bits of a word");
  uint32_t word;

  template <class Tiles>
  static __device__ __forceinline__ StageTile of(const Tiles& tiles, int32_t n) {
    uint32_t word = n;
#pragma unroll
    for (int p = 0; p < kConsumers; ++p)
      word = 4 * word + 2 * tiles.full(n, p) + tiles.visible(n, p);
    return {word};
  }
  __device__ __forceinline__ int32_t n() const { return word >> 2 * kConsumers; }
  __device__ __forceinline__ bool full(int32_t warpgroup) const { return bits(warpgroup) & 2; }
  __device__ __forceinline__ bool visible(int32_t warpgroup) const { return bits(warpgroup) & 1; }

 private:
  __device__ __forceinline__ uint32_t bits(int32_t warpgroup) const {
    return word >> 2 * (kConsumers - 1 - warpgroup);
  }
};

}  // namespace flashattn::cuda::sm90
