// What the host hands to the kernels, by value.
#pragma once

#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"

namespace flashattn::cuda {

// exp(lse) of a part of the keys is `sum` e^base.
struct alignas(8) PartialSum {
  float base, sum;
};
static_assert(sizeof(PartialSum) == 2 * sizeof(float), "behind a row of even length");

struct ForwardParams {
  Problem problem;
  ForwardArgs args;
  SplitRule split;
  // A block of the grid works on `queries` queries of `heads` query heads: row r is query r %
  // queries of head r / queries. Several heads of a group share a block when queries are few.
  int32_t queries, heads, head_blocks, query_blocks;
  int32_t parts;  // of the sequence with the most
  // Of units that share keys: (batch, KV head, head block), a turn each query block and part.
  L2Swizzle swizzle;
  FastDivmod by_parts, by_head_blocks, by_heads_kv;
  int32_t q_heads_per_kv_head;
  // Partial results, (part, batch, head, query), of sequences with several parts: fp32. The sums of
  // weights stand beside their base: in an LSE, large scores would leave no digits for them.
  int32_t partial_queries;
  float* partial_o;
  PartialSum* partial_sums;
  uint32_t dropout_threshold;

  FLASHATTN_HD int64_t units() const {
    return static_cast<int64_t>(args.shape.batch) * problem.heads_kv * head_blocks;
  }

  FLASHATTN_HD int64_t blocks() const { return units() * query_blocks * parts; }

  FLASHATTN_HD int64_t partial_row(int32_t part, int32_t b, int32_t h, int32_t i) const {
    return ((static_cast<int64_t>(part) * args.shape.batch + b) * problem.heads_q + h) *
               partial_queries +
           i;
  }
};

// Past all tickets, also when each block has asked for some more, and twice that in 32 bits.
constexpr int32_t kNoWork = INT32_MAX / 2 - 0xfffff;

// Of dq_states.
constexpr int32_t kDqClaimed = 1, kDqOpen = 2, kDqPendingTile = 4, kDqConverted = -1;

// The kernels of a backward pass share what one of them leaves to the next in the workspace.
// Portable: rows there stand as in lse. Hopper: in whole tiles of queries, see tile_q.
struct BackwardParams {
  Problem problem;
  BackwardArgs args;
  flashattn_tensor dout;  // of the problem's dtype: args.dout, or a rounded copy of it
  int32_t key_blocks;
  uint32_t dropout_threshold;
  float* lse2;  // in log2 units; +inf for rows that see nothing: 2^(-inf - inf) = 0
  // Of rows with |lse| above kFarLse the largest score, which lse2 is then relative to; elsewhere
  // NaN. ScoreModKind are products, or with wide_scores in units of kWideUnit log2(e). Where there
  // are such rows, *far is far_stamp, which no other launch has; whoever converts dq takes it away.
  float* base;
  uint64_t* far;
  uint64_t far_stamp;
  int32_t wide_scores;
  float* delta;  // D
  float* dq;     // fp32 sums, dim_qk wide, without the scale
  // Portable: for each tile of dq_order_tile_q queries of each head, how much has been added to dq:
  // sums in a fixed order. NULL: in any.
  int32_t* dq_order;
  int32_t dq_order_tile_q;
  int32_t* work_counter;  // numbers the blocks as they start, or the tiles of keys that they take
  // Not 0: lse2, delta and dq are arrays of tiles of tile_q queries, every sequence of a head from
  // a new tile on. Of dq a tile is tile_q * tile_dim numbers in the order of accumulators.
  int32_t tile_q, tile_dim, tile_kv;
  // Hopper: for each of the dq_parts of a tile of dq, of so many columns, kDqClaimed: something
  // lies there, or is on its way; kDqOpen: it may be added to; above, in units of kDqPendingTile:
  // how many tiles of keys have yet to add, in order (ordered) or where the kernel converts. In
  // order the last of them is first, down to dq_first[tile of dq]. Or kDqConverted: nothing is left
  // to do.
  int32_t* dq_states;
  int32_t* dq_first;         // NULL without order
  int32_t* dq_work_counter;  // numbers the tiles of dq as blocks take them to convert
  int32_t dq_parts, ordered;
  // Hopper: counters of those who have left their piece of a tile of keys that is cut.
  int32_t* arrived;
  int32_t arrived_count;
  int32_t q_heads_per_kv_head;
  // Portable: of units that share queries, (batch, KV head), a turn each key block.
  L2Swizzle swizzle;
  FastDivmod by_heads_kv;
  uint64_t* stamp;  // Hopper: to be removed when the backward kernel has ended, or NULL

  FLASHATTN_HD int64_t units() const {
    return static_cast<int64_t>(args.shape.batch) * problem.heads_kv;
  }

  FLASHATTN_HD int64_t row(int32_t b, int32_t h, int64_t i) const {
    const RowLayout layout = row_layout(problem, args.shape);
    return b * layout.batch_stride + h * layout.head_stride + i;
  }

  // Tiles of queries of one head, and where one of them stands.
  FLASHATTN_HD int64_t head_tiles(int32_t rows) const {
    return HeadTiles::of_queries(problem, args.shape, rows).count();
  }

  FLASHATTN_HD int64_t query_tile(const SeqlenInfo& sequence, int32_t b, int32_t h, int32_t tile,
                                  int32_t rows) const {
    const HeadTiles tiles = HeadTiles::of_queries(problem, args.shape, rows);
    return h * tiles.count() + tiles.first(sequence.offset_q, b) + tile;
  }

  // Where lse2 and delta of a sequence's first query stand.
  FLASHATTN_HD int64_t lse_delta_offset(const SeqlenInfo& sequence, int32_t b, int32_t h) const {
    return tile_q == 0 ? row(b, h, sequence.offset_q)
                       : query_tile(sequence, b, h, 0, tile_q) * tile_q;
  }
};

// Merges the parts of a split forward, or the caller's.
template <int kCapacity>
struct MergeParams {
  flashattn_tensor o;
  float* lse;  // may be NULL
  RowLayout lse_layout;
  int32_t dtype, dtype_part, dim, heads, batch;
  int64_t tokens;
  int32_t parts;
  bool vectors;  // whether four numbers of a row can be moved at once, of all arrays
  flashattn_tensor part_o[kCapacity];
  const float* part_lse[kCapacity];
};

}  // namespace flashattn::cuda
