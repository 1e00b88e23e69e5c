// A Q block: the rows that a task of the forward pass computes, and the keys that they see.
//
// Row r is query queries.begin + r % n of head first_head + r / n, n the number of queries: several
// heads of a GQA group share a block if queries are few.
#pragma once

#include "cpu/forward_scratch.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Rows of one head, from row `row` of the block on.
struct HeadRows {
  int32_t head;
  Interval queries;
  int32_t row;
};

struct QBlock {
  const ForwardJob& job;
  const Problem& problem;
  const Inputs& in;
  const MaskRule mask;
  const SeqlenInfo sequence;
  const int32_t b, kv_head, kv_heads;
  const int32_t split, splits;
  const bool direct;  // K and V are read where they lie, not packed
  Interval queries;
  int32_t first_head, rows;
  int32_t split_begin;  // the first key of the split
  Interval keys{0, 0};  // keys of the split that some query sees

  // range: the KV heads of the work tile that this block reads; more than one only if `direct`.
  FLASHATTN_INLINE QBlock(const ForwardJob& its_job, const ForwardWorkTile& tile, Interval range)
      : job(its_job),
        problem(*its_job.problem),
        in(its_job.args->inputs),
        mask(problem.mask_rule()),
        sequence(its_job.sequences[tile.b]),
        b(tile.b),
        kv_head(range.begin),
        kv_heads(range.end - range.begin),
        split(tile.split),
        splits(split_count(its_job.split_rule, sequence.len)),
        direct(is_direct(problem, sequence.len)) {
    const Lengths len = sequence.len;
    queries = {clamp_index(tile.queries.begin, len.q), clamp_index(tile.queries.end, len.q)};
    const int32_t group = problem.q_heads_per_kv_head();
    first_head = kv_head * group + tile.head_block * job.block_heads;
    const int32_t left = group - tile.head_block * job.block_heads;
    const int32_t heads = kv_heads * (left < job.block_heads ? left : job.block_heads);
    rows = heads * (queries.end - queries.begin);
    const Interval range_of_split = split_range(job.split_rule, len, split);
    split_begin = range_of_split.begin;
    if (rows > 0) keys = intersect(tree_span(mask, queries, len).any, range_of_split);
  }

  FLASHATTN_INLINE const Tiling& tiling() const { return direct ? kDirectTiling : job.tiling; }

  FLASHATTN_INLINE ScoreMod mods(int32_t head) const {
    return score_mod(problem, in, b, head, sequence.len);
  }

  FLASHATTN_INLINE TreeRow tree_row(int32_t i) const {
    const flashattn_tensor& bits = job.args->tree_bits;
    const auto* first = static_cast<const uint32_t*>(bits.data);
    return {first + b * bits.stride_batch + i * bits.stride_seq, sequence.len.kv - mask.tree};
  }

  FLASHATTN_INLINE HiddenPages hidden_pages() const {
    const bool hides = problem.mask & FLASHATTN_MASK_PAGES;
    return {hides ? in.page_table + b * in.page_table_stride : nullptr, problem.page_size};
  }

  // Whether keys of a range belong to the tree.
  FLASHATTN_INLINE bool meets_tree(Interval range) const {
    return mask.tree > 0 && range.end > tree_begin(mask, sequence.len);
  }

  // Returns the rows from `row` on, before end_row, that belong to one head.
  FLASHATTN_INLINE HeadRows head_rows_at(int32_t row, int32_t end_row) const {
    const int32_t count = queries.end - queries.begin;
    const int32_t query = queries.begin + row % count;
    const int32_t left = queries.end - query;
    return {first_head + row / count,
            {query, query + (left < end_row - row ? left : end_row - row)},
            row};
  }

  // The keys of `range` that some of the rows [row, end_row) may see. *full stays true only if each
  // row sees all.
  Interval visible_to(int32_t row, int32_t end_row, Interval range, bool* full) const {
    Interval visible{range.end, range.begin};
    const bool tree = meets_tree(range);
    for (int32_t r = row; r < end_row;) {
      const HeadRows head_rows = head_rows_at(r, end_row);
      r += head_rows.queries.end - head_rows.queries.begin;
      const KeySpan span = tree ? tree_span(mask, head_rows.queries, sequence.len)
                                : key_span(mask, head_rows.queries, sequence.len);
      *full &= classify(span, range) == TileKind::kFull;
      if (span.any.begin < visible.begin) visible.begin = span.any.begin;
      if (span.any.end > visible.end) visible.end = span.any.end;
    }
    return intersect(visible, range);
  }

  // Sets visible[r] for kCount rows from `row` on: the keys of `range` that row `row` + r sees,
  // counted from the key `first`.
  template <int32_t kCount>
  void rows_visible(int32_t row, int32_t first, Interval range, Interval (&visible)[kCount]) const {
    for (int32_t r = row; r < row + kCount;) {
      const HeadRows head_rows = head_rows_at(r, row + kCount);
      for (int32_t i = head_rows.queries.begin; i < head_rows.queries.end; ++i, ++r) {
        const Interval all = intersect(visible_keys(mask, i, sequence.len), range);
        visible[r - row] = {all.begin - first, all.end - first};
      }
    }
  }

  FLASHATTN_INLINE TokenRows q(int32_t head) const {
    return q_rows(problem, in, b, head, sequence.offset_q);
  }
  FLASHATTN_INLINE TokenRows k() const {
    return k_rows(problem, in, b, kv_head, sequence.offset_kv);
  }
  FLASHATTN_INLINE TokenRows v(int32_t head = 0) const {
    return v_rows(problem, in, b, kv_head + head, sequence.offset_kv);
  }

  // The number of the packed tile, among those that Q blocks share, that begins with a key. -1: the
  // block packs its own, as it does if a split begins within a tile.
  FLASHATTN_INLINE int64_t shared_tile(int32_t key) const {
    if (!job.shared.tiles || direct || key % job.tiling.tile_kv != 0) return -1;
    const int64_t tile = job.kv_tile_index(sequence, b, kv_head, key);
    return tile < job.shared.count ? tile : -1;
  }

  FLASHATTN_INLINE char* packed_tile(int64_t shared) const {
    return job.shared.tiles + shared * job.shared.tile_bytes;
  }

  // Names the rows to prefetch: q of some queries, and the KV tile that holds a key.
  void plan_prefetch(Interval some, int32_t key, RowPrefetch (&prefetch)[3]) const {
    const int32_t tile_kv = tiling().tile_kv;
    const int32_t first = key / tile_kv * tile_kv;
    const int64_t shared = shared_tile(first);
    prefetch[0] = {q(first_head), problem.dim_qk * dtype_size(problem.dtype), some};
    if (shared >= 0 && is_packed(job.shared.states + shared)) {
      constexpr int32_t kBytes = 1024;
      const auto count = static_cast<int32_t>(job.shared.tile_bytes / kBytes);
      prefetch[1] = {{packed_tile(shared), kBytes, nullptr, 1, 0, 0}, kBytes, {0, count}};
      prefetch[2] = {};
      return;
    }
    const Interval range = intersect({first, first + tile_kv}, keys);
    prefetch[1] = {k(), problem.columns_k() * dtype_size(problem.dtype_k()), range};
    prefetch[2] = {v(), problem.dim_v * dtype_size(problem.dtype_kv), range};
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
