// Jobs: the data that the launcher hands to the kernels, shared by all instruction sets.
#pragma once

#include "core/score_mod.h"
#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"

namespace flashattn::cpu {

constexpr int32_t kMaxDim = 1024;  // elements of a head

// Split-KV: sequences with more than kSplitQueries queries fill the threads without it. A split has
// kSplitKeys keys.
constexpr int32_t kSplitQueries = 16;
constexpr int32_t kSplitKeys = 1024;

// Whether a sequence reads K and V where they lie, having too few rows (queries of all heads that
// share a KV head) for packing to pay. Not with LATENT_KV, which is widened first, and not if the
// plan also computes gradients: scores must round alike in both passes.
FLASHATTN_HD bool is_direct(const Problem& problem, Lengths len) {
  constexpr int64_t kMaxRows = 32;
  return !problem.has_op(FLASHATTN_OP_BACKWARD) && !problem.is_latent() && len.q < len.kv &&
         int64_t{len.q} * problem.q_heads_per_kv_head() <= kMaxRows;
}
constexpr int32_t kDirectRows = 64;   // rows of a Q block that reads K and V directly
constexpr int32_t kDirectKeys = 384;  // tile_kv of such a Q block

// Tile sizes, fixed at plan creation.
struct Tiling {
  int32_t q_block_rows;  // rows of a Q block, which share packed keys and values
  int32_t tile_q;        // rows whose scores are held at once
  int32_t tile_kv;       // keys packed at once
  // Backward: tile_kv of sequences with few KV tiles, so that more threads share the work; 0:
  // tile_kv.
  int32_t tile_kv_short = 0;
};

// tile_kv of a sequence in the backward pass. All its tiles are equally long, or threads would wait
// for each other at the end. It depends on the sequence alone, so that the sequence's bits do, too.
constexpr int32_t kFewTiles = 32, kTileKvStep = 64;
FLASHATTN_HD int32_t backward_tile_kv(const Tiling& tiling, const Problem& problem, int32_t keys) {
  if (tiling.tile_kv_short == 0 || keys == 0) return tiling.tile_kv;
  const bool few = ceil_div(keys, tiling.tile_kv) * problem.heads_kv < kFewTiles;
  const int64_t tiles = ceil_div(keys, few ? tiling.tile_kv_short : tiling.tile_kv);
  return static_cast<int32_t>(ceil_div(ceil_div(keys, tiles), kTileKvStep) * kTileKvStep);
}

// The largest number of KV tiles of any sequence of up to `keys` keys.
FLASHATTN_HD int32_t backward_kv_tiles(const Tiling& tiling, const Problem& problem, int32_t keys) {
  const int64_t all = ceil_div(keys, tiling.tile_kv);
  if (tiling.tile_kv_short == 0) return static_cast<int32_t>(all);
  const int64_t longest = (kFewTiles - 1) / problem.heads_kv * int64_t{tiling.tile_kv};
  const int64_t few = ceil_div(keys < longest ? keys : longest, tiling.tile_kv_short);
  return static_cast<int32_t>(all > few ? all : few);
}

// The coordinates of a task of the forward pass.
struct ForwardWorkTile {
  Interval queries;  // queries as in the longest sequence; shorter ones have fewer
  int32_t split, b, head_block;
  Interval kv_heads;
};

// The KV tile that a thread has packed last: the thread's next Q block may read it as well. It lies
// at the start of the thread's scratch memory and is empty when a call begins.
struct KeptKvTile {
  int32_t b, kv_head;
  Interval keys;  // {0, 0}: there is none
  bool finite;    // all values of V are finite
};

// Packed KV tiles that several Q blocks read: the first block that needs a tile packs it.
struct SharedKvTiles {
  int32_t* states;  // a TileState for each
  char* tiles;      // NULL: every block packs for itself
  int64_t tile_bytes;
  int64_t count;  // number of shared tiles; every block packs the others itself
};
// A tile is empty, being packed, or packed, and then all its values are finite or not.
enum TileState : int32_t { kTileEmpty, kTilePacking, kTileFinite, kTileNonFinite };

// The forward pass of the sequences of a batch that read K and V where they lie (`direct`), or of
// the others: prompts and decoding in one call have Q blocks that suit each.
struct ForwardJob {
  const Problem* problem;
  const ForwardArgs* args;
  const SeqlenInfo* sequences;  // (batch): kernels do not read the caller's starts and lengths
  Tiling tiling;
  bool direct;
  int32_t seqlen_q;       // queries of the longest of these sequences; 0: there is no task
  int32_t block_queries;  // queries of a Q block
  int32_t block_heads;    // query heads of a KV head in a Q block: > 1 if queries are few
  int32_t head_blocks;    // Q blocks that the query heads of a KV head need
  int32_t kv_heads;       // KV heads of a task: > 1 only if `direct`, whose keys are read together
  int32_t q_blocks;
  // The last cut_tasks tasks are cut into parts, so that the threads end together: as many tasks as
  // there are threads, or all if there are fewer. 0: none.
  int32_t cut_tasks;
  int32_t parts;         // parts of a cut task
  int32_t part_queries;  // queries of each part but the last
  SplitRule split_rule;
  int32_t splits;  // the largest number of splits of any of these sequences
  int32_t threads;
  // Partial results (split, batch, head, query): fp32 o (dim_v), the maximum m of the scores and
  // the sum l of P. One lse would lose l to rounding if scores are large.
  int32_t partial_queries;  // queries of the longest sequence that is split
  float* partial_o;
  float *partial_m, *partial_l;
  SharedKvTiles shared;
  uint64_t rng_seed, rng_offset;

  // The number of the KV tile that holds a key, among those of all sequences and KV heads.
  FLASHATTN_HD int64_t kv_tile_index(const SeqlenInfo& sequence, int32_t b, int32_t kv_head,
                                     int32_t key) const {
    const HeadTiles tiles = HeadTiles::of_keys(*problem, args->shape, tiling.tile_kv);
    return kv_head * tiles.count() + tiles.first(sequence.offset_kv, b) + key / tiling.tile_kv;
  }

  FLASHATTN_HD int64_t head_tasks() const {
    return ceil_div(problem->heads_kv, kv_heads) * head_blocks;
  }
  // The number of tasks of one Q block: they read different keys.
  FLASHATTN_HD int64_t tasks_per_q_block() const {
    return static_cast<int64_t>(splits) * args->shape.batch * head_tasks();
  }
  // The number of tasks if no two of them read the same keys.
  FLASHATTN_HD int64_t key_ranges() const {
    return int64_t{splits} * args->shape.batch * problem->heads_kv;
  }
  // The number of tasks before some are cut.
  FLASHATTN_HD int64_t whole_tasks() const {
    return seqlen_q > 0 ? q_blocks * tasks_per_q_block() : 0;
  }
  FLASHATTN_HD int64_t tasks() const { return whole_tasks() + int64_t{cut_tasks} * (parts - 1); }
  FLASHATTN_HD ForwardWorkTile work_tile(int64_t task) const {
    // Late queries first: under a causal mask they take longest. Among cut tasks the last part of
    // every task comes first, then the part before it, so that the parts of a task stay with one
    // thread.
    const int64_t cut = task - (whole_tasks() - cut_tasks);
    int32_t part = 0;
    if (cut >= 0) {
      part = parts - 1 - static_cast<int32_t>(cut / cut_tasks);
      task += cut % cut_tasks - cut;
    }
    const int64_t each = head_tasks(), batch = args->shape.batch;
    const int64_t q_block = q_blocks - 1 - task / (each * batch * splits);
    const int64_t begin = q_block * block_queries + int64_t{part} * part_queries;
    const int64_t end = (q_block + 1) * block_queries;
    const int64_t part_end = begin + part_queries;
    const int32_t head = static_cast<int32_t>(task % each);
    const int32_t first = head / head_blocks * kv_heads;
    return {{clamp_index(begin, seqlen_q),
             clamp_index(cut >= 0 && part_end < end ? part_end : end, seqlen_q)},
            static_cast<int32_t>(task / (each * batch) % splits),
            static_cast<int32_t>(task / each % batch),
            head % head_blocks,
            Interval{first, clamp_index(first + kv_heads, problem->heads_kv)}};
  }
  FLASHATTN_HD int64_t partial_row(int32_t split_idx, int32_t b, int32_t h, int32_t i) const {
    return ((static_cast<int64_t>(split_idx) * args->shape.batch + b) * problem->heads_q + h) *
               partial_queries +
           i;
  }
};

struct BackwardJob {
  const Problem* problem;
  const BackwardArgs* args;
  const SeqlenInfo* sequences;
  Tiling tiling;    // q_block_rows equals tile_q
  int32_t q_tiles;  // Q tiles of the longest sequence
  int32_t kv_tiles;
  // The order of KV tiles: as many KV heads at a time as there are threads, so that their queries
  // stay in the caches; and one KV tile of each of these heads before the next, so that threads do
  // not wait for each other to add to dq.
  L2Swizzle order;
  int32_t threads;
  uint64_t rng_seed, rng_offset;
  bool dbias_is_reduced;  // a pass of its own: several scores, or none, add to one element
  // Arrays (Q tile, row of the tile): lse * log2(e), D = dout . o - dlse, fp32 dq. For rows whose
  // lse is too large to hold the sum of P (backward_base.h), softmax_base is the maximum of the
  // scores and lse_log2 is lse less that maximum, in units of log2(e); for other rows softmax_base
  // is infinite.
  float* lse_log2;
  float* softmax_base;
  float* delta;
  float* dq;
  // (Q tile): the number of KV tiles that have added to dq so far.
  int32_t* dq_semaphore;

  // The number of a Q tile of one head in the arrays above.
  FLASHATTN_HD int64_t q_tile_index(const SeqlenInfo& sequence, int32_t b, int32_t h,
                                    int32_t tile) const {
    const HeadTiles tiles = HeadTiles::of_queries(*problem, args->shape, tiling.tile_q);
    return h * tiles.count() + tiles.first(sequence.offset_q, b) + tile;
  }
};

// The element of a head in an array (batch, heads).
FLASHATTN_HD float* head_entry(const flashattn_tensor& t, int32_t b, int32_t head) {
  return static_cast<float*>(t.data) + b * t.stride_batch + head * t.stride_head;
}

// How rows of partial results are merged: those of a split forward pass, or those that the caller
// of flashattn_merge gives.
struct MergeJob {
  int32_t parts;
  int32_t dim;
  int32_t dtype_part, dtype;
  // The caller's partial results. NULL: the row of part p lies p * o_stride floats, and its m and l
  // p * row_stride floats, after those of part 0.
  const flashattn_tensor* part_o;
  const float* const* part_lse;
  int64_t o_stride, row_stride;
  // Extents of the caller's partial results, for strides of -1.
  int32_t heads;
  int64_t tokens;
};

// One row to merge.
struct MergeRow {
  int32_t b, h;
  int64_t i;    // token; with VARLEN counted over all sequences
  int64_t lse;  // number of the row in the caller's part_lse
  // If the parts are not the caller's: o, m and l of part 0.
  const float *o, *m, *l;
  ScoreUnit unit;  // unit of m, or of the caller's lse
  float sink;      // sink of the head, which no part includes; -infinity: none
  void* out;
  float scale = 1;        // multiplies the output
  float* amax = nullptr;  // raised to the largest magnitude before `scale`; may be NULL
};

// Quantises one of q, k and v. A task has whole blocks of tokens of the heads that share a KV head
// of a sequence.
struct QuantizeJob {
  const Problem* problem;
  const QuantizeArgs* args;
  flashattn_tensor in, out, descale;
  bool is_q, is_k;
  int32_t heads, dim, dtype_out;  // heads: those of this tensor that share a KV head
  int32_t task_tokens;            // tokens of a task: whole blocks
};

// The kernels of one instruction set.
struct Kernels {
  const char* isa;
  Tiling (*forward_tiling)(const Problem&);
  Tiling (*backward_tiling)(const Problem&);
  int32_t (*dq_columns)(const Problem&);
  // Bytes of scratch memory of one thread; the memory is aligned to 64 bytes.
  int64_t (*forward_scratch)(const Problem&, const Tiling&);
  int64_t (*backward_scratch)(const Problem&, const Tiling&);
  // Bytes of a packed tile of the forward pass; 0 if sharing tiles does not pay.
  int64_t (*shared_tile_bytes)(const Problem&, const Tiling&);
  // Each computes one task.
  void (*forward)(const ForwardJob&, int64_t task, char* scratch);
  void (*backward_prepare)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward_dbias)(const BackwardJob&, int64_t task, char* scratch);
  void (*backward_dsink)(const BackwardJob&, int64_t task, char* scratch);
  // Writes one row and returns its lse.
  float (*merge_row)(const MergeJob&, const MergeRow&);
  // Writes the mean of the keys of a head.
  void (*k_mean)(const QuantizeArgs&, const Problem&, int32_t b, int32_t kv_head);
  void (*quantize)(const QuantizeJob&, int32_t b, int32_t kv_head, int32_t first_token);
  // Appends new tokens `tokens` of a sequence, as far as there are.
  void (*append)(const Problem&, const AppendArgs&, int32_t b, Interval tokens);
  // Writes keep[j], j in [0, keys), of one row i.
  void (*dropout_row)(uint64_t seed, uint64_t offset, uint32_t threshold, uint32_t head, int32_t i,
                      int32_t keys, uint8_t* keep);
};

}  // namespace flashattn::cpu
