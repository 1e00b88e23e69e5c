// Block masks: which KV tiles a mask leaves visible, and which scores of a tile it hides.
#pragma once

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/mask.cuh"
#include "cuda/device/score_stage.cuh"

namespace flashattn::cuda {

// The block mask of one head of one sequence.
struct BlockMask {
  static constexpr ScoreStage kStage = ScoreStage::kMask;
  static constexpr bool kBoundsGrowth = false, kReadsMemory = true;

  const uint8_t* on;  // mask of query 0; NULL: there is no mask
  int64_t row;
  int32_t block_q, block_kv;
  bool has_lens;  // only some keys of a block may count: see block_byte()

  static __device__ __forceinline__ BlockMask of(const Problem& problem, const Inputs& in,
                                                 int32_t b, int32_t h) {
    if (!(problem.mask & FLASHATTN_MASK_BLOCKS)) return {nullptr, 0, 1, 1, false};
    return {in.block_mask + b * in.block_mask_stride_batch + h * in.block_mask_stride_head,
            in.block_mask_stride_row, problem.block_q, problem.block_kv,
            (problem.mask & FLASHATTN_MASK_BLOCK_LENS) != 0};
  }

  // Whether key j of its block counts.
  __device__ __forceinline__ bool counts(int32_t j) const {
    const int32_t x = j / block_kv;
    return !has_lens || j - x * block_kv < block_lens_of(on, row)[x];
  }

  __device__ __forceinline__ bool shows(int32_t query, int32_t key) const {
    return !on || (on[query / block_q * row + key / block_kv] && counts(key));
  }

  // Whether the mask shows all, some or none of a tile. The tile is not empty.
  __device__ __forceinline__ TileKind kind(Interval queries, Interval keys) const {
    if (!on) return TileKind::kFull;
    bool any = false, all = true;
    for (int32_t y = queries.begin / block_q; y <= (queries.end - 1) / block_q; ++y) {
      for (int32_t x = keys.begin / block_kv; x <= (keys.end - 1) / block_kv; ++x) {
        const int32_t byte = on[y * row + x];
        any |= byte != 0;
        all &= byte > has_lens;
      }
    }
    return all ? TileKind::kFull : any ? TileKind::kPartial : TileKind::kEmpty;
  }

  // Bit 2 n + e says whether the lane's column 8 n + 2 (lane % 4) + e is shown. Columns are the
  // keys from `first` on for one query, or the queries for one key; from `limit` on they count as
  // hidden. All lanes of a warp call it, those of a quad with the same query or key.
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_keys(int32_t query, int32_t first, int32_t limit,
                                                int32_t lane) const {
    uint32_t bits = shown<kMmaN>(on + query / block_q * row, 1, block_kv, first, limit, lane);
    if (has_lens) bits &= counted<kMmaN>(first, limit, lane);
    return {bits};
  }
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_queries(int32_t key, int32_t first, int32_t limit,
                                                   int32_t lane) const {
    const uint32_t bits = shown<kMmaN>(on + key / block_kv, row, block_q, first, limit, lane);
    return {counts(key) ? bits : 0};
  }

 private:
  // As shown_keys(), by the lengths of blocks alone.
  template <int kMmaN>
  __device__ __forceinline__ uint32_t counted(int32_t first, int32_t limit, int32_t lane) const {
    uint32_t bits = 0;
#pragma unroll 1
    for (int x = 0; x < 2 * kMmaN; ++x) {
      const int32_t j = first + x / 2 * 8 + lane % 4 * 2 + x % 2;
      if (j < limit && counts(j)) bits |= 1u << x;
    }
    return bits;
  }

  template <int kMmaN>
  static __device__ __forceinline__ uint32_t shown(const uint8_t* from, int64_t stride,
                                                   int32_t width, int32_t first, int32_t limit,
                                                   int32_t lane) {
    static_assert(kMmaN <= 16, "the bits of a word");
    uint32_t bits = 0;
    if (width % 8 == 0) {
      // No block border cuts an octet, 8 columns: each lane of a quad reads every fourth octet's
      // bit.
#pragma unroll
      for (int n = 0; n < kMmaN; n += 4) {
        const int32_t octet = n + lane % 4, j = first + octet * 8;
        if (octet < kMmaN && j < limit && from[j / width * stride]) bits |= 3u << 2 * octet;
      }
      bits |= __shfl_xor_sync(~0u, bits, 1);
      return bits | __shfl_xor_sync(~0u, bits, 2);
    }
#pragma unroll 1
    for (int x = 0; x < 2 * kMmaN; ++x) {
      const int32_t j = first + x / 2 * 8 + lane % 4 * 2 + x % 2;
      if (j < limit && from[j / width * stride]) bits |= 1u << x;
    }
    return bits;
  }
};

// All KV tiles: the interface of BlockSparseTiles where there is no block mask.
struct DenseTiles {
  template <class Params>
  __device__ __forceinline__ explicit DenseTiles(const Params&) {}
  __device__ __forceinline__ void reset() {}
  template <class Item>
  __device__ __forceinline__ int32_t last_visible(const Item&, int32_t n, int32_t) const {
    return n;
  }
  template <class Item>
  __device__ __forceinline__ int32_t first_visible(const Item&, int32_t n, int32_t) const {
    return n;
  }
  __device__ __forceinline__ bool full(int32_t) const { return true; }
  __device__ __forceinline__ int32_t after(int32_t n) const { return n - 1; }
  template <class Item>
  __device__ __forceinline__ void look_ahead(const Item&, int32_t, int32_t) const {}
  __device__ __forceinline__ bool few_left(int32_t, int32_t, int32_t) const { return false; }
};

// 32 consecutive KV tiles, a bit each. The queries of a Q tile are divided into kSpans equal spans.
template <int kSpans>
struct KvTileWindow {
  int32_t idx;  // the window's tiles are 32 idx to 32 idx + 31
  // some: tiles in which a query of the span sees a key. all: tiles in which every query sees every
  // key.
  uint32_t some[kSpans], all[kSpans];
};

// The KV tiles that a block mask does not hide. A look reads the mask of 32 tiles, one per lane:
// all lanes of a warp call these functions. Each warp looks for itself. kSpans: the queries are
// divided into this many equal spans, and the tiles of each are known.
template <class Params, int kTileQ, int kTileKv, int kSpans = 1>
class BlockSparseTiles {
 public:
  __device__ __forceinline__ explicit BlockSparseTiles(const Params& params) : params_(params) {}

  __device__ __forceinline__ void reset() { window_.idx = -1; }

  // The window of the last look, for another warp with the same item.
  __device__ __forceinline__ KvTileWindow<kSpans> window() const { return window_; }
  __device__ __forceinline__ void restore(const volatile KvTileWindow<kSpans>& window) {
    window_.idx = window.idx;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      window_.some[span] = window.some[span];
      window_.all[span] = window.all[span];
    }
  }

  // The first tile from n down to begin in which a query of the item sees a key; begin - 1 or
  // less: there is none.
  template <class Item>
  __device__ __forceinline__ int32_t last_visible(const Item& item, int32_t n, int32_t begin) {
    if (!masked()) return n;
    while (n >= begin) {
      look(item, n);
      const uint32_t left = some() & ((2u << n % 32) - 1);
      if (left) return n / 32 * 32 + 31 - __clz(left);
      n = n / 32 * 32 - 1;
    }
    return n;
  }

  // The first tile from n up to end in which a query sees a key; end or more: there is none.
  template <class Item>
  __device__ __forceinline__ int32_t first_visible(const Item& item, int32_t n, int32_t end) {
    if (!masked()) return n;
    while (n < end) {
      look(item, n);
      const uint32_t left = some() & ~((1u << n % 32) - 1);
      if (left) return n / 32 * 32 + __ffs(left) - 1;
      n = n / 32 * 32 + 32;
    }
    return n;
  }

  // Finds last_visible() below n in advance, which after() then returns.
  template <class Item>
  __device__ __forceinline__ void look_ahead(const Item& item, int32_t n, int32_t begin) {
    after_ = last_visible(item, n - 1, begin);
  }
  __device__ __forceinline__ int32_t after(int32_t) const { return after_; }

  // full(): whether the block mask shows all keys of tile n to all queries of a span. visible():
  // whether it shows any key to any of them. n: the tile that was found last.
  __device__ __forceinline__ bool full(int32_t n, int span = 0) const {
    return !masked() || (window_.all[span] >> n % 32 & 1);
  }
  __device__ __forceinline__ bool visible(int32_t n, int span) const {
    return !masked() || (window_.some[span] >> n % 32 & 1);
  }

  // Whether the last look has shown that the mask leaves at most `most` tiles below n, from begin
  // on.
  __device__ __forceinline__ bool few_left(int32_t n, int32_t begin, int32_t most) const {
    if (!masked() || begin / 32 != window_.idx) return false;
    const uint32_t below = n / 32 == window_.idx ? (1u << n % 32) - 1 : ~0u;
    return __popc(some() & below & ~((1u << begin % 32) - 1)) <= most;
  }

 private:
  __device__ __forceinline__ bool masked() const {
    return params_.problem.mask & FLASHATTN_MASK_BLOCKS;
  }

  template <class Item>
  __device__ __forceinline__ void look(const Item& item, int32_t n) {
    if (n / 32 == window_.idx) return;
    window_.idx = n / 32;
    const BlockMask blocks = BlockMask::of(params_.problem, params_.args.inputs, item.b, item.h);
    const int32_t key = (window_.idx * 32 + static_cast<int32_t>(threadIdx.x) % 32) * kTileKv;
    const int32_t queries = item.len.q, keys = item.len.kv;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const int32_t query = item.query + span * (kTileQ / kSpans);
      TileKind kind = TileKind::kEmpty;
      if (key < keys && (span == 0 || query < queries)) {
        kind = blocks.kind({query, min(query + kTileQ / kSpans, queries)},
                           {key, min(key + kTileKv, keys)});
      }
      window_.some[span] = __ballot_sync(~0u, kind != TileKind::kEmpty);
      window_.all[span] = __ballot_sync(~0u, kind == TileKind::kFull);
    }
  }

  // The window's tiles in which a query sees a key.
  __device__ __forceinline__ uint32_t some() const {
    uint32_t tiles = window_.some[0];
#pragma unroll
    for (int span = 1; span < kSpans; ++span) tiles |= window_.some[span];
    return tiles;
  }

  const Params& params_;
  KvTileWindow<kSpans> window_{-1, {}, {}};
  int32_t after_ = 0;  // see look_ahead()
};

}  // namespace flashattn::cuda
