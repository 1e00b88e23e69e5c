// Which tiles of keys a block mask leaves of an item.
#pragma once

#include <type_traits>

#include "cuda/sm90/work.cuh"
#include "cuda/tile/scores.cuh"

namespace flashattn::cuda::sm90 {

// All of them.
struct AllTiles {
  __device__ __forceinline__ explicit AllTiles(const ForwardParams&) {}
  __device__ __forceinline__ void start() {}
  template <class Item>
  __device__ __forceinline__ int32_t down(const Item&, int32_t n, int32_t) const {
    return n;
  }
};

// Looks at 32 tiles at a time, one a lane: all lanes of a warp call its functions. The planner, the
// loader and the consumers each ask for themselves, and read the same.
template <int kTileQ, int kTileKv>
class BlockTiles {
 public:
  __device__ __forceinline__ explicit BlockTiles(const ForwardParams& params) : params_(params) {}

  __device__ __forceinline__ void start() { window_ = -1; }

  // The first tile from n down to begin in which a query of the item sees a key; begin - 1 or
  // less: there is none.
  template <class Item>
  __device__ __forceinline__ int32_t down(const Item& item, int32_t n, int32_t begin) {
    if (!masked()) return n;
    while (n >= begin) {
      look(item, n);
      const uint32_t left = some_ & ((2u << n % 32) - 1);
      if (left) return n / 32 * 32 + 31 - __clz(left);
      n = n / 32 * 32 - 1;
    }
    return n;
  }

  // The same from n up to end.
  template <class Item>
  __device__ __forceinline__ int32_t up(const Item& item, int32_t n, int32_t end) {
    if (!masked()) return n;
    while (n < end) {
      look(item, n);
      const uint32_t left = some_ & ~((1u << n % 32) - 1);
      if (left) return n / 32 * 32 + __ffs(left) - 1;
      n = n / 32 * 32 + 32;
    }
    return n;
  }

  // Of tile n, the last that was found: whether the block mask hides nothing.
  __device__ __forceinline__ bool full(int32_t n) const {
    return !masked() || (all_ >> n % 32 & 1);
  }

 private:
  __device__ __forceinline__ bool masked() const {
    return params_.problem.mask & FLASHATTN_MASK_BLOCKS;
  }

  template <class Item>
  __device__ __forceinline__ void look(const Item& item, int32_t n) {
    if (n / 32 == window_) return;
    window_ = n / 32;
    const Problem& problem = params_.problem;
    const flashattn_inputs& in = params_.args.inputs;
    ScoreRules rules{};
    rules.blocks =
        in.block_mask + item.b * in.block_mask_stride_batch + item.h * in.block_mask_stride_head;
    rules.blocks_row = in.block_mask_stride_row;
    rules.block_q = problem.block_q;
    rules.block_kv = problem.block_kv;
    const int32_t key = (window_ * 32 + static_cast<int32_t>(threadIdx.x) % 32) * kTileKv;
    const int32_t query = item.query, queries = item.len.q, keys = item.len.kv;
    TileKind kind = TileKind::kEmpty;
    if (key < keys) {
      kind =
          block_kind(rules, {query, min(query + kTileQ, queries)}, {key, min(key + kTileKv, keys)});
    }
    some_ = __ballot_sync(~0u, kind != TileKind::kEmpty);
    all_ = __ballot_sync(~0u, kind == TileKind::kFull);
  }

  const ForwardParams& params_;
  int32_t window_ = -1;
  uint32_t some_ = 0, all_ = 0;  // of the window's tiles
};

template <class Config>
using Tiles =
    typename std::conditional<Config::kScores == Scores::kAny,
                              BlockTiles<Config::kTileQ, Config::kTileKv>, AllTiles>::type;

}  // namespace flashattn::cuda::sm90
