// What the launcher hands to the kernels: plain data, shared by all instruction sets.
#pragma once

#include "core/score_rules.h"
#include "core/sections.h"
#include "core/sequence.h"

namespace flashattn::cpu {

// Sequences with more queries fill the threads without splitting their keys.
constexpr int32_t kSplitQueries = 16;
constexpr int32_t kSplitKeys = 1024;

// Whether a sequence reads a cache with too few rows (queries of all heads that share a KV head) to
// pack for. Not where the plan computes gradients, too: scores of its forward and its backward pass
// round alike.
FLASHATTN_HD bool is_direct(const Problem& problem, Lengths len) {
  constexpr int64_t kMost = 32;
  return !problem.has_op(FLASHATTN_OP_BACKWARD) && len.q < len.kv &&
         int64_t{len.q} * problem.group() <= kMost;
}
constexpr int32_t kDirectRows = 64;  // of all heads of a block
constexpr int32_t kDirectKeys = 384;

// Sizes of the tiles, fixed at plan creation.
struct Tiling {
  int32_t q_block_rows;  // of a block of queries that shares packed keys and values
  int32_t tile_q;        // rows whose scores are held at once
  int32_t tile_kv;       // keys packed at once
  // Backward: the same where a sequence makes few tiles, which are what threads share; 0: all tiles
  // of all sequences have tile_kv.
  int32_t tile_kv_short = 0;
};

// Keys of a tile of the backward pass: as many in all tiles, or threads wait for each other in the
// end. By the sequence alone: so are its bits.
constexpr int32_t kFewTiles = 32, kTileKvStep = 64;
FLASHATTN_HD int32_t backward_tile_kv(const Tiling& tiling, const Problem& problem, int32_t keys) {
  if (tiling.tile_kv_short == 0 || keys == 0) return tiling.tile_kv;
  const bool few = ceil_div(keys, tiling.tile_kv) * problem.heads_kv < kFewTiles;
  const int64_t tiles = ceil_div(keys, few ? tiling.tile_kv_short : tiling.tile_kv);
  return static_cast<int32_t>(ceil_div(ceil_div(keys, tiles), kTileKvStep) * kTileKvStep);
}

// Tiles of the sequence of up to so many keys that makes the most.
FLASHATTN_HD int32_t backward_kv_tiles(const Tiling& tiling, const Problem& problem, int32_t keys) {
  const int64_t all = ceil_div(keys, tiling.tile_kv);
  if (tiling.tile_kv_short == 0) return static_cast<int32_t>(all);
  const int64_t most = (kFewTiles - 1) / problem.heads_kv * int64_t{tiling.tile_kv};
  const int64_t few = ceil_div(keys < most ? keys : most, tiling.tile_kv_short);
  return static_cast<int32_t>(all > few ? all : few);
}

// What a task of a forward pass works on.
struct ForwardWorkTile {
  int32_t q_block, split, b, head_block;
  Interval kv_heads;
};

// Packed keys and values that several blocks of queries read: the first that needs a tile packs it.
struct SharedKvTiles {
  int32_t* states;  // of each, see below
  char* tiles;      // NULL: every block packs for itself
  int64_t tile_bytes;
  int64_t count;  // of the tiles beyond, every block packs its own
};
// A tile is not packed, is being packed, is packed, and then its values are all finite or not.
enum TileState : int32_t { kTileEmpty, kTilePacking, kTileFinite, kTileNonFinite };

struct ForwardJob {
  const Problem* problem;
  const ForwardArgs* args;
  const Sequence* sequences;  // of the batch: kernels do not read the caller's starts and lengths
  Tiling tiling;
  int32_t block_queries;  // of a block
  int32_t block_heads;    // query heads of a KV head in a block: > 1 for short queries
  int32_t head_blocks;    // of a KV head's group
  int32_t kv_heads;       // KV heads of a task: > 1 where their keys are read together
  int32_t q_blocks;
  SplitRule split_rule;
  int32_t splits;  // the most of any sequence
  int32_t threads;
  // Partial results, (part, batch, head, query): fp32 o (dim_v), the highest score and the sum of
  // the weights relative to it, which one lse would round to nothing where scores are large.
  int32_t partial_queries;  // of the longest sequence that is split
  float* partial_o;
  float *partial_m, *partial_l;
  SharedKvTiles shared;
  uint64_t rng_seed, rng_offset;

  // Which of all tiles of keys is that of a key.
  FLASHATTN_HD int64_t kv_tile_index(const Sequence& sequence, int32_t b, int32_t kv_head,
                                     int32_t key) const {
    const HeadTiles tiles = HeadTiles::of_keys(*problem, args->shape, tiling.tile_kv);
    return kv_head * tiles.count() + tiles.first(sequence.first_kv, b) + key / tiling.tile_kv;
  }

  FLASHATTN_HD int64_t head_tasks() const {
    return ceil_div(problem->heads_kv, kv_heads) * head_blocks;
  }
  // Tasks of one block of queries: those that share no keys.
  FLASHATTN_HD int64_t tasks_per_q_block() const {
    return static_cast<int64_t>(splits) * args->shape.batch * head_tasks();
  }
  FLASHATTN_HD int64_t tasks() const { return q_blocks * tasks_per_q_block(); }
  FLASHATTN_HD ForwardWorkTile work_tile(int64_t task) const {
    // Late queries first: under a causal mask they take longest.
    const int64_t each = head_tasks(), batch = args->shape.batch;
    const int32_t head = static_cast<int32_t>(task % each);
    const int32_t first = head / head_blocks * kv_heads;
    return {q_blocks - 1 - static_cast<int32_t>(task / (each * batch * splits)),
            static_cast<int32_t>(task / (each * batch) % splits),
            static_cast<int32_t>(task / each % batch), head % head_blocks,
            Interval{first, clamp_index(first + kv_heads, problem->heads_kv)}};
  }
  FLASHATTN_HD int64_t partial_row(int32_t part, int32_t b, int32_t h, int32_t i) const {
    return ((static_cast<int64_t>(part) * args->shape.batch + b) * problem->heads_q + h) *
               partial_queries +
           i;
  }
};

struct BackwardJob {
  const Problem* problem;
  const BackwardArgs* args;
  const Sequence* sequences;
  Tiling tiling;    // rows: of a tile of queries, as tile_q
  int32_t q_tiles;  // of the longest sequence
  int32_t kv_tiles;
  // KV heads of all sequences, a turn for each tile of keys: as many heads at a time as there are
  // threads, whose queries stay in the caches, and of these all before the next tile, so that
  // neighbours do not wait for one another where there are as many.
  Sections order;
  int32_t threads;
  uint64_t rng_seed, rng_offset;
  bool dbias_is_reduced;  // several scores, or none, add to one element: a pass of its own
  // (query tile, row of the tile): lse * log2(e), D = dout . o - dlse, and fp32 dq. Of rows whose
  // lse is so large that its rounding tells (backward_base.h), `base` is the highest score and
  // lse2, in units of log2(e), what lse is above it; of others base is infinite.
  float* lse_log2;
  float* softmax_base;
  float* delta;
  float* dq;
  // (query tile): key tiles that have added to dq so far.
  int32_t* dq_semaphore;

  // Where a tile of queries of one head stands in the arrays above.
  FLASHATTN_HD int64_t q_tile_index(const Sequence& sequence, int32_t b, int32_t h,
                                    int32_t tile) const {
    const HeadTiles tiles = HeadTiles::of_queries(*problem, args->shape, tiling.tile_q);
    return h * tiles.count() + tiles.first(sequence.first_q, b) + tile;
  }
};

// Merges rows of partial results: those of a split forward, or the caller's.
struct MergeJob {
  int32_t parts;
  int32_t dim;
  int32_t dtype_part, dtype;
  // The caller's. NULL: the row of part p is `o_stride` floats, and its numbers are `row_stride`
  // floats, after those of p - 1.
  const flashattn_tensor* part_o;
  const float* const* part_lse;
  int64_t o_stride, row_stride;
  // Extents of the caller's parts, for the strides that they ask for by -1.
  int32_t heads;
  int64_t tokens;
};

// One row to merge.
struct MergeRow {
  int32_t b, h;
  int64_t i;    // token, VARLEN: of all sequences
  int64_t lse;  // number of the row in the caller's part_lse
  // Of part 0, where the parts are not the caller's: the row, its highest score and the sum of its
  // weights.
  const float *o, *m, *l;
  ScoreUnit unit;  // of m, or of the caller's lse
  float sink;      // that no part has seen; -infinity: none
  void* out;
};

// The kernels of one instruction set.
struct Kernels {
  const char* isa;
  Tiling (*forward_tiling)(const Problem&);
  Tiling (*backward_tiling)(const Problem&);
  int32_t (*dq_columns)(const Problem&);
  // Bytes of scratch of one thread; 64-byte aligned.
  int64_t (*forward_scratch)(const Problem&, const Tiling&);
  int64_t (*backward_scratch)(const Problem&, const Tiling&);
  // Bytes of a packed tile of the forward pass, where sharing it pays, else 0.
  int64_t (*shared_tile_bytes)(const Problem&, const Tiling&);
  // One independent piece of work each.
  void (*forward)(const ForwardJob&, int64_t task, char* scratch);
  void (*backward_prepare)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward_dbias)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward_dsink)(const BackwardJob&, int64_t task, char* scratch);
  // Writes one row and returns its lse.
  float (*merge_row)(const MergeJob&, const MergeRow&);
  // keep[j] for one row i of the weights, j in [0, keys).
  void (*dropout_row)(uint64_t seed, uint64_t offset, uint32_t threshold, uint32_t head, int32_t i,
                      int32_t keys, uint8_t* keep);
};

}  // namespace flashattn::cpu
