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

  // The blocks that a tile touches, and the numbers of those at its corners. There are others only
  // where a tile is longer than a block.
  struct TileBlocks {
    int32_t y, y_last, x, x_last;
    uint32_t corners[4];
  };
  // The tile is not empty.
  __device__ __forceinline__ TileBlocks blocks_of(Interval queries, Interval keys) const {
    TileBlocks tile{queries.begin / block_q,
                    (queries.end - 1) / block_q,
                    keys.begin / block_kv,
                    (keys.end - 1) / block_kv,
                    {}};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      tile.corners[n] = on[(n / 2 ? tile.y_last : tile.y) * row + (n % 2 ? tile.x_last : tile.x)];
    }
    return tile;
  }

  // Whether the mask shows all, some or none of a tile.
  __device__ __forceinline__ TileKind kind(const TileBlocks& tile) const {
    bool any = false, all = true;
    const auto add = [&](uint32_t byte) {
      any |= byte != 0;
      all &= byte > has_lens;
    };
#pragma unroll
    for (const uint32_t byte : tile.corners) add(byte);
    if (tile.y_last - tile.y > 1 || tile.x_last - tile.x > 1) {
#pragma unroll 1
      for (int32_t y = tile.y; y <= tile.y_last; ++y) {
#pragma unroll 1
        for (int32_t x = tile.x; x <= tile.x_last; ++x) add(on[y * row + x]);
      }
    }
    return all ? TileKind::kFull : any ? TileKind::kPartial : TileKind::kEmpty;
  }
  __device__ __forceinline__ TileKind kind(Interval queries, Interval keys) const {
    return on ? kind(blocks_of(queries, keys)) : TileKind::kFull;
  }

  // Bit 2 n + e says whether the lane's column 8 n + 2 (lane % 4) + e is shown. Columns are the
  // keys from `first` on for one query, or the queries for one key; from `limit` on they count as
  // hidden. All lanes of a warp call it, those of a quad with the same query or key.
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_keys(int32_t query, int32_t first, int32_t limit,
                                                int32_t lane) const {
    const uint8_t* const from = on + query / block_q * row;
    if (has_lens && block_kv % 8 == 0) return {counted_octets<kMmaN>(from, first, limit, lane)};
    uint32_t bits = shown<kMmaN>(from, 1, block_kv, first, limit, lane);
    if (has_lens) bits &= counted<kMmaN>(first, limit, lane);
    return {bits};
  }
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_queries(int32_t key, int32_t first, int32_t limit,
                                                   int32_t lane) const {
    const uint32_t bits = shown<kMmaN>(on + key / block_kv, row, block_q, first, limit, lane);
    return {counts(key) ? bits : 0};
  }
  // shown_queries() of keys `key` and key + 8, the second in the upper half of the word, where both
  // lie in one block and all queries in one: see pairs_keys(). Keys from `keys` on do not exist.
  template <int kMmaN>
  __device__ __forceinline__ uint32_t shown_to_pair(int32_t key, int32_t keys, int32_t first,
                                                    int32_t limit) const {
    static_assert(kMmaN <= 8, "the bits of a word");
    const int32_t x = min(key, keys - 1) / block_kv;
    const int32_t end = min(x * block_kv + (has_lens ? block_lens_of(on, row)[x] : block_kv), keys);
    const uint32_t octets = min((limit - first + 7) / 8, kMmaN);
    const uint32_t bits = on[first / block_q * row + x] ? (1u << 2 * octets) - 1 : 0;
    return (key < end ? bits : 0) | (key + 8 < end ? bits << 16 : 0);
  }
  // Whether each 16 keys, and each kQueries queries, lie in one block.
  template <int kQueries>
  __device__ __forceinline__ bool pairs_keys() const {
    return block_kv % 16 == 0 && block_q % kQueries == 0;
  }

 private:
  // shown_keys() by a mask's row `from` and the lengths of blocks, where no block border cuts an
  // octet, 8 keys: of each its first keys count, up to 8. Unless all keys lie in one block, each
  // lane of a quad finds that number for every fourth octet, and hands it to the others in 4 bits
  // of a word.
  template <int kMmaN>
  __device__ __forceinline__ uint32_t counted_octets(const uint8_t* from, int32_t first,
                                                     int32_t limit, int32_t lane) const {
    const int32_t* const lens = block_lens_of(on, row);
    const int32_t column = lane % 4 * 2;  // the lane's first of an octet
    if (block_kv % (8 * kMmaN) == 0) {
      const int32_t x = first / block_kv, left = lens[x] - (first - x * block_kv);
      const int32_t count = from[x] ? min(max(left, 0), 8 * kMmaN) : 0;
      const uint32_t last = (count % 8 > column) | (count % 8 > column + 1) << 1;
      // Shifts by 32 bits give 0.
      return ~__funnelshift_lc(0, ~0u, count / 8 * 2) | __funnelshift_lc(0, last, count / 8 * 2);
    }
    constexpr int kWords = (kMmaN + 7) / 8;
    uint32_t words[kWords] = {}, bits = 0;
#pragma unroll
    for (int n = 0; n < kMmaN; n += 4) {
      const int32_t octet = n + lane % 4, j = first + octet * 8;
      if (octet >= kMmaN || j >= limit) continue;
      const int32_t x = j / block_kv, left = lens[x] - (j - x * block_kv);
      if (from[x]) words[n / 8] |= static_cast<uint32_t>(min(max(left, 0), 8)) << octet % 8 * 4;
    }
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      uint32_t counts = words[n];
      counts |= __shfl_xor_sync(~0u, counts, 1);
      counts |= __shfl_xor_sync(~0u, counts, 2);
      // Bit 3 of count + 7 - column: whether the column counts.
      constexpr uint32_t kEach = 0x11111111;
      const uint32_t own = counts + kEach * (7 - column);
      uint32_t pairs = (own >> 3 & kEach) | (own - kEach) >> 2 & 2 * kEach;
      // Two bits of each four, side by side.
      pairs = (pairs | pairs >> 2) & 0x0f0f0f0f;
      pairs = (pairs | pairs >> 4) & 0x00ff00ff;
      bits |= ((pairs | pairs >> 8) & 0xffff) << 16 * n;
    }
    return bits;
  }

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
  template <class Item>
  __device__ __forceinline__ int32_t first_visible(const Item&, int32_t n, int32_t) const {
    return n;
  }
  __device__ __forceinline__ bool full(int32_t) const { return true; }
};

// 32 consecutive KV tiles, a bit each. The queries of a Q tile are divided into kSpans equal spans.
template <int kSpans>
struct KvTileWindow {
  int32_t idx;  // the window's tiles are 32 idx to 32 idx + 31
  // some: tiles in which a query of the span sees a key. all: tiles in which every query sees every
  // key.
  uint32_t some[kSpans], all[kSpans];

  // The tiles in which a query of the Q tile sees a key.
  __device__ __forceinline__ uint32_t visible() const {
    uint32_t tiles = some[0];
#pragma unroll
    for (int span = 1; span < kSpans; ++span) tiles |= some[span];
    return tiles;
  }
};

// The KV tiles of an item that a block mask does not hide. A look reads the mask of 32 tiles, one
// per lane: all lanes of a warp call these functions. kSpans: the queries are divided into this
// many equal spans, and the tiles of each are known.
template <class Params, int kTileQ, int kTileKv, int kSpans = 1>
class BlockSparseTiles {
 public:
  __device__ __forceinline__ explicit BlockSparseTiles(const Params& params) : params_(params) {}

  // The first tile from n up to end in which a query of the item sees a key; end or more: there is
  // none.
  template <class Item>
  __device__ __forceinline__ int32_t first_visible(const Item& item, int32_t n, int32_t end) {
    if (!masked()) return n;
    while (n < end) {
      const uint32_t left = look(item, n / 32) & ~((1u << n % 32) - 1);
      if (left) return n / 32 * 32 + __ffs(left) - 1;
      n = n / 32 * 32 + 32;
    }
    return n;
  }

  // The last one from n down to begin; begin - 1 or less: there is none.
  template <class Item>
  __device__ __forceinline__ int32_t last_visible(const Item& item, int32_t n, int32_t begin) {
    if (!masked()) return n;
    while (n >= begin) {
      const uint32_t left = look(item, n / 32) & ((2u << n % 32) - 1);
      if (left) return n / 32 * 32 + 31 - __clz(left);
      n = n / 32 * 32 - 1;
    }
    return n;
  }

  // Whether the block mask shows all keys of tile n, found last, to all queries.
  __device__ __forceinline__ bool full(int32_t n) const {
    return !masked() || (window_.all[0] >> n % 32 & 1);
  }

  // The window of the last look.
  __device__ __forceinline__ const KvTileWindow<kSpans>& window() const { return window_; }

  // Looks at the window below that of the last look, and fetches the next ahead.
  template <class Item>
  __device__ __forceinline__ void look_below(const Item& item) {
    look(item, window_.idx - 1);
    if (window_.idx > 0) fetch_ahead(item, window_.idx - 1);
  }

  // Reads the mask of a window, which the next look at it then need not wait for. Only where each
  // span and each tile lies in one block.
  template <class Item>
  __device__ __forceinline__ void fetch_ahead(const Item& item, int32_t idx) {
    if (!kFetchesAhead) return;
    const BlockMask mask = blocks(item);
    if (mask.block_q % kSpanRows != 0 || mask.block_kv % kTileKv != 0) return;
    ahead_idx_ = idx;
    const int32_t x = min(first_key(idx), item.len.kv - 1) / mask.block_kv;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const int32_t y = min(item.query + span * kSpanRows, item.len.q - 1) / mask.block_q;
      ahead_[span] = mask.on[y * mask.row + x];
    }
  }

 private:
  // Looks at a window, and returns the tiles in which a query of the item sees a key.
  template <class Item>
  __device__ __forceinline__ uint32_t look(const Item& item, int32_t idx) {
    if (idx == window_.idx) return window_.visible();
    window_.idx = idx;
    const int32_t key = first_key(idx), queries = item.len.q, keys = item.len.kv;
    const auto first_query = [&](int span) { return item.query + span * kSpanRows; };
    if (kFetchesAhead && idx == ahead_idx_) {
      const uint32_t whole = params_.problem.mask & FLASHATTN_MASK_BLOCK_LENS ? 2 : 1;
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        const bool exists = key < keys && first_query(span) < queries;
        window_.some[span] = __ballot_sync(~0u, exists && ahead_[span] != 0);
        window_.all[span] = __ballot_sync(~0u, exists && ahead_[span] >= whole);
      }
      return window_.visible();
    }
    const BlockMask mask = blocks(item);
    // The mask is read for all spans, then used: the latencies overlap.
    BlockMask::TileBlocks tiles[kSpans];
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const int32_t query = min(first_query(span), queries - 1);
      tiles[span] = mask.blocks_of({query, min(query + kSpanRows, queries)},
                                   {min(key, keys - 1), min(key + kTileKv, keys)});
    }
    __syncwarp();
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      TileKind kind = TileKind::kEmpty;
      if (key < keys && first_query(span) < queries) kind = mask.kind(tiles[span]);
      window_.some[span] = __ballot_sync(~0u, kind != TileKind::kEmpty);
      window_.all[span] = __ballot_sync(~0u, kind == TileKind::kFull);
    }
    return window_.visible();
  }

  static constexpr int kSpanRows = kTileQ / kSpans;
  // Kernels with one span lack the registers, and have other CTAs meanwhile.
  static constexpr bool kFetchesAhead = kSpans > 1;

  __device__ __forceinline__ bool masked() const {
    return params_.problem.mask & FLASHATTN_MASK_BLOCKS;
  }

  template <class Item>
  __device__ __forceinline__ BlockMask blocks(const Item& item) const {
    return BlockMask::of(params_.problem, params_.args.inputs, item.b, item.h);
  }

  // The first key of the lane's tile in a window.
  static __device__ __forceinline__ int32_t first_key(int32_t idx) {
    return (idx * 32 + static_cast<int32_t>(threadIdx.x) % 32) * kTileKv;
  }

  const Params& params_;
  KvTileWindow<kSpans> window_{-1, {}, {}};
  // The window that was fetched ahead, and the mask's numbers for the lane's tile and each span.
  int32_t ahead_idx_ = -1;
  uint32_t ahead_[kSpans];
};

}  // namespace flashattn::cuda
