// A KV tile of the backward pass, and the Q tiles that see it.
#pragma once

#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

class KvTile {
 protected:
  FLASHATTN_INLINE KvTile(const BackwardJob& job, int32_t b, int32_t kv_head, int32_t key_tile)
      : job_(job),
        problem_(*job.problem),
        in_(job.args->inputs),
        mask_(problem_.mask_rule()),
        sequence_(job.sequences[b]),
        tile_q_(job.tiling.tile_q),
        tile_kv_(backward_tile_kv(job.tiling, problem_, sequence_.len.kv)),
        b_(b),
        kv_head_(kv_head),
        kv_tile_(key_tile) {
    keys_.begin = clamp_index(static_cast<int64_t>(key_tile) * tile_kv_, sequence_.len.kv);
    keys_.end = clamp_index(static_cast<int64_t>(keys_.begin) + tile_kv_, sequence_.len.kv);
    if (keys_.begin >= keys_.end) return;
    const Interval seen = query_span(mask_, keys_, sequence_.len);
    if (seen.begin >= seen.end) return;
    q_tiles_ = {seen.begin / tile_q_, (seen.end - 1) / tile_q_ + 1};
  }

  FLASHATTN_INLINE Interval queries_of(int32_t tile) const {
    const int64_t begin = static_cast<int64_t>(tile) * tile_q_;
    return {clamp_index(begin, sequence_.len.q), clamp_index(begin + tile_q_, sequence_.len.q)};
  }

  template <class Body>
  FLASHATTN_INLINE void for_each_query_tile(Body body) {
    // From the last Q tile, which under a causal mask sees all KV tiles. The tasks of a head then
    // visit Q tiles in the same order, each a step behind the task that it waits for.
    for (int32_t tile = q_tiles_.end - 1; tile >= q_tiles_.begin; --tile) {
      body(queries_of(tile), tile);
    }
  }

  FLASHATTN_INLINE TokenRows k() const {
    return k_rows(problem_, in_, b_, kv_head_, sequence_.offset_kv);
  }
  FLASHATTN_INLINE TokenRows v() const {
    return v_rows(problem_, in_, b_, kv_head_, sequence_.offset_kv);
  }
  FLASHATTN_INLINE TokenRows q(int32_t head) const {
    return q_rows(problem_, in_, b_, head, sequence_.offset_q);
  }
  FLASHATTN_INLINE TokenRows dout(int32_t head) const {
    return rows_of(job_.args->dout, dtype_size(problem_.dtype_o), b_, head, sequence_.offset_q);
  }

  // Names the rows to prefetch: those of K and V, and of Q and dO, that are packed before the work
  // on some keys and queries.
  void plan_prefetch(int32_t head, Interval queries, Interval keys,
                     RowPrefetch (&prefetch)[4]) const {
    const int32_t size = dtype_size(problem_.dtype_kv);
    prefetch[0] = {k(), problem_.dim_qk * size, keys};
    prefetch[1] = {v(), problem_.dim_v * size, keys};
    prefetch[2] = {q(head), problem_.dim_qk * dtype_size(problem_.dtype), queries};
    prefetch[3] = {dout(head), problem_.dim_v * dtype_size(problem_.dtype_o), queries};
  }

  void plan_first_prefetch(RowPrefetch (&prefetch)[4]) const {
    plan_prefetch(kv_head_ * problem_.q_heads_per_kv_head(), queries_of(q_tiles_.end - 1), keys_,
                  prefetch);
  }

  const BackwardJob& job_;
  const Problem& problem_;
  const Inputs& in_;
  const MaskRule mask_;
  const SeqlenInfo sequence_;
  const int32_t tile_q_, tile_kv_;
  const int32_t b_, kv_head_, kv_tile_;
  Interval keys_;
  Interval q_tiles_{0, 0};  // Q tiles whose queries see some key
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
