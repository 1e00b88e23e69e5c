// Which queries of which heads a block of the forward pass works on, and which keys they see.
//
// Row r of a block is query queries_.begin + r % queries of head first_head_ + r / queries: several
// heads of a group share a block when queries are few.
#pragma once

#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

class QBlock {
 protected:
  // kv_heads: those of the place whose keys the block reads.
  FLASHATTN_INLINE QBlock(const ForwardJob& job, const ForwardWorkTile& place, Interval kv_heads)
      : job_(job),
        problem_(*job.problem),
        in_(job.args->inputs),
        mask_(problem_.mask_rule()),
        sequence_(job.sequences[place.b]),
        b_(place.b),
        kv_head_(kv_heads.begin),
        kv_heads_(kv_heads.end - kv_heads.begin),
        split_(place.split),
        splits_(part_count(job.split_rule, sequence_.len)) {
    const Lengths len = sequence_.len;
    queries_.begin = clamp_index(static_cast<int64_t>(place.q_block) * job.block_queries, len.q);
    queries_.end = clamp_index(queries_.begin + static_cast<int64_t>(job.block_queries), len.q);
    const int32_t group = problem_.group();
    first_head_ = kv_head_ * group + place.head_block * job.block_heads;
    const int32_t left = group - place.head_block * job.block_heads;
    heads_ = kv_heads_ * (left < job.block_heads ? left : job.block_heads);
    rows_ = heads_ * (queries_.end - queries_.begin);
    const Interval split = part_range(job_.split_rule, sequence_.len, split_);
    part_begin_ = split.begin;
    if (rows_ > 0) keys_ = intersect(key_span(mask_, queries_, len).any, split);
  }

  // Rows of one head inside a tile of rows.
  struct HeadRows {
    int32_t head;
    Interval queries;
    int32_t row;  // of the block
  };

  FLASHATTN_INLINE HeadRows head_rows_at(int32_t row, int32_t end_row) const {
    const int32_t count = queries_.end - queries_.begin;
    const int32_t query = queries_.begin + row % count;
    const int32_t left = queries_.end - query;
    return {first_head_ + row / count,
            {query, query + (left < end_row - row ? left : end_row - row)},
            row};
  }

  // The keys of `run` that some of the rows see; full: whether all do, too.
  Interval visible_to(int32_t row, int32_t end_row, Interval run, bool* full) const {
    Interval visible{run.end, run.begin};
    for (int32_t r = row; r < end_row;) {
      const HeadRows head_rows = head_rows_at(r, end_row);
      r += head_rows.queries.end - head_rows.queries.begin;
      const KeySpan span = key_span(mask_, head_rows.queries, sequence_.len);
      *full &= classify(span, run) == TileKind::kFull;
      if (span.any.begin < visible.begin) visible.begin = span.any.begin;
      if (span.any.end > visible.end) visible.end = span.any.end;
    }
    return intersect(visible, run);
  }

  // What each of kCount rows sees of the keys, as seen from the key `first`.
  template <int32_t kCount>
  void rows_visible(int32_t row, int32_t first, Interval keys, Interval (&visible)[kCount]) const {
    for (int32_t r = row; r < row + kCount;) {
      const HeadRows head_rows = head_rows_at(r, row + kCount);
      for (int32_t i = head_rows.queries.begin; i < head_rows.queries.end; ++i, ++r) {
        const Interval all = intersect(visible_keys(mask_, i, sequence_.len), keys);
        visible[r - row] = {all.begin - first, all.end - first};
      }
    }
  }

  FLASHATTN_INLINE TokenRows kv(const flashattn_tensor& t, int32_t head = 0) const {
    return kv_rows(problem_, in_, t, b_, kv_head_ + head, sequence_.first_kv);
  }

  // The tile of all blocks that begins with a key; -1: every block packs its own, as it does where
  // a part of the keys begins within a tile.
  FLASHATTN_INLINE int64_t shared_tile(int32_t key) const {
    if (!job_.shared.tiles || is_direct(problem_, sequence_.len)) return -1;
    if (key % job_.tiling.tile_kv != 0) return -1;
    const int64_t tile = job_.kv_tile_index(sequence_, b_, kv_head_, key);
    return tile < job_.shared.count ? tile : -1;
  }

  FLASHATTN_INLINE char* packed_tile(int64_t shared) const {
    return job_.shared.tiles + shared * job_.shared.tile_bytes;
  }

  // What is read for queries, and for a tile of keys.
  void plan_prefetch(Interval queries, int32_t first_key, int32_t tile_kv,
                     RowPrefetch (&prefetch)[3]) const {
    const int32_t size = dtype_size(problem_.dtype);
    const TokenRows q = rows_of(in_.q, size, b_, first_head_, sequence_.first_q);
    const int32_t tile = first_key / tile_kv * tile_kv;
    const int64_t shared = shared_tile(tile);
    prefetch[0] = {q, problem_.dim_qk * size, queries};
    if (shared >= 0 && is_packed(job_.shared.states + shared)) {
      constexpr int32_t kBytes = 1024;
      const auto count = static_cast<int32_t>(job_.shared.tile_bytes / kBytes);
      prefetch[1] = {{packed_tile(shared), kBytes, nullptr, 1, 0}, kBytes, {0, count}};
      prefetch[2] = {};
      return;
    }
    const Interval keys = intersect({tile, tile + tile_kv}, keys_);
    prefetch[1] = {kv(in_.k), problem_.dim_qk * size, keys};
    prefetch[2] = {kv(in_.v), problem_.dim_v * size, keys};
  }

  const ForwardJob& job_;
  const Problem& problem_;
  const Inputs& in_;
  const MaskRule mask_;
  const Sequence sequence_;
  const int32_t b_, kv_head_, kv_heads_, split_, splits_;
  Interval queries_;
  int32_t first_head_, heads_, rows_;
  int32_t part_begin_;
  Interval keys_{0, 0};  // of this part that some query sees
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
