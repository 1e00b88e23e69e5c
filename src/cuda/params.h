// The parameters of the portable kernels and of those that both backends use, passed by value.
#pragma once

#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"

namespace flashattn::cuda {

// exp(lse) of one split of the keys is sum * e^base.
struct alignas(8) PartialSum {
  float base, sum;
};
static_assert(sizeof(PartialSum) == 2 * sizeof(float), "behind a row of even length");

// Softcap of x = q k: softcap * tanh(x * input_scale), in units of log2(e). Small |x| use odd
// minimax polynomials, which include both scales: x * (poly5[0] + poly5[1] x^2 + poly5[2] x^4)
// where |x| < poly5_limit, and x * (poly3[0] + poly3[1] x^2) where |x| < poly3_limit.
struct SoftcapPolynomials {
  float input_scale, poly5_limit, poly5[3], poly3_limit, poly3[2];
};

// The caller's masks and the bits of TREE. With TREE the kernel's problem has the hull of these
// masks, see tree_hull().
struct TreeParams {
  MaskRule rule;
  const uint32_t* bits;
  int64_t stride_batch, stride_row;
};

struct ForwardParams {
  Problem problem;
  ForwardArrays args;
  SplitRule split;
  // A CTA works on cta_queries queries of cta_heads query heads: row r is query r % cta_queries of
  // head r / cta_queries. If queries are few, several query heads of a KV head share a CTA.
  int32_t cta_queries, cta_heads;
  int32_t head_tiles, q_tiles;  // CTAs for the query heads of a KV head; for the queries
  int32_t max_splits;           // the most splits of any sequence
  // Heads: (batch, KV head, head tile). Tiles: (Q tile, split).
  L2Swizzle swizzle;
  FastDivmod by_splits, by_head_tiles, by_heads_kv;
  int32_t q_heads_per_kv_head;
  // Partial results of sequences with several splits, (split, batch, head, query), fp32. A sum is
  // kept apart from its base: in one LSE, large scores would leave no digits for it.
  int32_t partial_queries;
  float* partial_o;
  PartialSum* partial_sums;
  uint32_t dropout_threshold;
  TreeParams tree;
  // log2 of the CTAs of a cluster, which have all splits of a row tile and merge them. 0: the
  // combine kernel merges.
  int32_t log2_cluster;

  FLASHATTN_HD int64_t work_heads() const {
    return static_cast<int64_t>(args.shape.batch) * problem.heads_kv * head_tiles;
  }

  FLASHATTN_HD int64_t ctas() const { return work_heads() * q_tiles * max_splits; }

  FLASHATTN_HD int64_t partial_row(int32_t split_idx, int32_t b, int32_t h, int32_t i) const {
    return ((static_cast<int64_t>(split_idx) * args.shape.batch + b) * problem.heads_q + h) *
               partial_queries +
           i;
  }
};

// A work index beyond all work items, even after each CTA has asked for some more; twice the number
// fits 32 bits.
constexpr int32_t kNoWork = INT32_MAX / 2 - 0xfffff;

// States of dq_states.
constexpr int32_t kDqClaimed = 1, kDqOpen = 2, kDqPendingTile = 4, kDqConverted = -1;

// The parameters that all kernels of a backward pass share, and the workspace by which they pass on
// results. Portable: rows lie as in lse. Hopper: in whole Q tiles, see tile_q.
struct BackwardParams {
  Problem problem;
  BackwardArgs args;
  flashattn_tensor dout;  // in the problem's dtype: args.dout, or a rounded copy
  int32_t kv_tiles;
  uint32_t dropout_threshold;
  // lse in log2 units, less kPExponent; +inf for rows that see no key: 2^(-inf - inf) = 0
  float* lse2;
  // For rows with |lse| above kLargeLse the largest score, to which lse2 is then relative; NaN for
  // other rows. Unit: products of q and k, or with wide_scores kWideUnit log2(e). If there are such
  // rows, *large_lse is large_lse_stamp, which no other launch has; the kernel that converts dQ
  // clears it.
  float* softmax_base;
  uint64_t* large_lse;
  uint64_t large_lse_stamp;
  int32_t wide_scores;
  float* delta;  // D = sum(dO * O) - dlse, times kPUnit
  float* dq;     // fp32 accumulator, dim_qk wide, before scaling
  // Portable: the number of KV tiles added to dQ, for each Q tile of dq_order_tile_q queries of
  // each head; fixes the order of additions. NULL: any order.
  int32_t* dq_order;
  int32_t dq_order_tile_q;
  int32_t* work_counter;  // numbers CTAs as they start, or the KV tiles that they take
  // Not 0: lse2, delta and dq are arrays of tiles of tile_q queries; every sequence of a head
  // begins a new tile. A tile of dq is tile_q * tile_dim numbers in the order of WGMMA
  // accumulators.
  int32_t tile_q, tile_dim, tile_kv;
  // Hopper: the state of each of the dq_ctas column ranges of a tile of dq. kDqClaimed: a CTA owns
  // the initial store. kDqOpen: that store is visible and reduce-adds may start. Higher bits, in
  // units of kDqPendingTile: KV tiles still to be added, if additions are ordered or the kernel
  // converts. In order the last KV tile comes first, down to dq_first[tile of dq]. kDqConverted:
  // done.
  int32_t* dq_states;
  int32_t* dq_first;         // NULL unless ordered
  int32_t* dq_work_counter;  // numbers the tiles of dq that CTAs take to convert
  int32_t dq_ctas, ordered;
  // Hopper: counters of stream-K partials that have been stored, and behind them those of the dbias
  // kernel.
  int32_t* arrived;
  int32_t arrived_count;
  int32_t q_heads_per_kv_head;
  // Portable. Heads: (batch, KV head). Tiles: KV tiles.
  L2Swizzle swizzle;
  FastDivmod by_heads_kv;
  uint64_t* stamp;  // Hopper: to be cleared after the backward kernel; may be NULL

  FLASHATTN_HD int64_t kv_heads() const {
    return static_cast<int64_t>(args.shape.batch) * problem.heads_kv;
  }

  FLASHATTN_HD int64_t row(int32_t b, int32_t h, int64_t i) const {
    const RowLayout layout = row_layout(problem, args.shape);
    return b * layout.batch_stride + h * layout.head_stride + i;
  }

  // head_tiles(): the number of Q tiles of one head, over all sequences. query_tile(): the index of
  // one.
  FLASHATTN_HD int64_t head_tiles(int32_t rows) const {
    return HeadTiles::of_queries(problem, args.shape, rows).count();
  }

  FLASHATTN_HD int64_t query_tile(const SeqlenInfo& sequence, int32_t b, int32_t h, int32_t tile,
                                  int32_t rows) const {
    const HeadTiles tiles = HeadTiles::of_queries(problem, args.shape, rows);
    return h * tiles.count() + tiles.first(sequence.offset_q, b) + tile;
  }

  // The index of the sequence's first query in lse2 and delta.
  FLASHATTN_HD int64_t lse_delta_offset(const SeqlenInfo& sequence, int32_t b, int32_t h) const {
    return tile_q == 0 ? row(b, h, sequence.offset_q)
                       : query_tile(sequence, b, h, 0, tile_q) * tile_q;
  }
};

// Merges partial results that the caller gives.
template <int kCapacity>
struct MergeParams {
  flashattn_tensor o;
  float* lse;  // may be NULL
  RowLayout lse_layout;
  int32_t dtype, dtype_part, dim, heads, batch;
  int64_t tokens;
  int32_t parts;
  bool vectors;  // whether all arrays can be moved in vectors of four elements
  flashattn_tensor part_o[kCapacity];
  const float* part_lse[kCapacity];
};

}  // namespace flashattn::cuda
