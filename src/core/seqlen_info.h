// One sequence of a batch: where its rows start, how long it is, how its keys are split. Used by
// the CPU backend, the GPU launchers and the kernels.
#pragma once

#include <algorithm>

#include "core/fast_divmod.h"
#include "core/problem.h"

namespace flashattn {

struct SeqlenInfo {
  int64_t offset_q, offset_kv;  // first row: after earlier sequences (VARLEN) and left padding
  Lengths len;
};

// The rows of sequence b among `total`. Entries are clamped to [0, total]; a sequence that ends
// before it begins is empty.
FLASHATTN_HD Interval packed_rows(const int32_t* cu_seqlens, int32_t b, int64_t total) {
  const int32_t rows = total < INT32_MAX ? static_cast<int32_t>(total) : INT32_MAX;
  const int32_t begin = clamp_index(cu_seqlens[b], rows), end = cu_seqlens[b + 1];
  return {begin, end < begin ? begin : end > rows ? rows : end};
}

// The rows of sequence b. Whatever values lie in device memory, the rows lie inside the arrays, and
// there are at most as many as the shape says. On a GPU nothing else checks these values.
FLASHATTN_HD SeqlenInfo seqlen_info(const Problem& problem, const Shape& shape, const Inputs& in,
                                    int32_t b) {
  SeqlenInfo s{0, 0, {shape.seqlen_q, shape.seqlen_kv}};
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) {
    const Interval rows = packed_rows(in.cu_seqlens_q, b, shape.total_q);
    s.offset_q = rows.begin;
    s.len.q = clamp_index(rows.end - rows.begin, s.len.q);
  }
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_KV) {
    const Interval rows = packed_rows(in.cu_seqlens_kv, b, shape.total_kv);
    s.offset_kv = rows.begin;
    s.len.kv = clamp_index(rows.end - rows.begin, s.len.kv);
  }
  if (in.lens_q) s.len.q = clamp_index(in.lens_q[b], s.len.q);
  if (in.lens_kv) s.len.kv = clamp_index(in.lens_kv[b], s.len.kv);
  if (in.starts_kv) {
    const int32_t start = clamp_index(in.starts_kv[b], s.len.kv);
    s.offset_kv += start;
    s.len.kv -= start;
  }
  return s;
}

// Whether seqlen_info() reads lengths from memory, which on a GPU an earlier kernel may write.
FLASHATTN_HD bool reads_lengths(const Problem& problem, const Inputs& in) {
  return problem.layout & (FLASHATTN_LAYOUT_VARLEN_Q | FLASHATTN_LAYOUT_VARLEN_KV) || in.lens_q ||
         in.lens_kv || in.starts_kv;
}

// Reads all sequences of a batch once, each as seqlen_info() does. Besides, with VARLEN no sequence
// begins before the previous one ends.
inline void resolve_seqlens(const Problem& problem, const Shape& shape, const Inputs& in,
                            SeqlenInfo* sequences) {
  int64_t end_q = 0, end_kv = 0;
  const auto move_behind = [](int64_t* end, int64_t* first, int32_t* len) {
    const int64_t late = std::max<int64_t>(*end - *first, 0);
    *first += late;
    *len = clamp_index(*len - late, *len);
    *end = *first + *len;
  };
  for (int32_t b = 0; b < shape.batch; ++b) {
    SeqlenInfo s = seqlen_info(problem, shape, in, b);
    if (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)) move_behind(&end_q, &s.offset_q, &s.len.q);
    if (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV)) {
      move_behind(&end_kv, &s.offset_kv, &s.len.kv);
    }
    sequences[b] = s;
  }
}

// Numbers the tiles of `rows` queries or keys of one head through all sequences of a batch. VARLEN:
// sequence b starts at tile rows_before / rows + b. Sequences that do not overlap share no tile,
// and no tile number reaches count().
struct HeadTiles {
  bool packed;
  int64_t total;  // rows of all sequences, if packed
  int32_t longest, batch, rows;

  FLASHATTN_HD static HeadTiles of_queries(const Problem& problem, const Shape& shape,
                                           int32_t rows) {
    return {(problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) != 0, shape.total_q, shape.seqlen_q,
            shape.batch, rows};
  }

  FLASHATTN_HD static HeadTiles of_keys(const Problem& problem, const Shape& shape, int32_t rows) {
    return {(problem.layout & FLASHATTN_LAYOUT_VARLEN_KV) != 0, shape.total_kv, shape.seqlen_kv,
            shape.batch, rows};
  }

  FLASHATTN_HD constexpr int64_t count() const {
    return packed ? total / rows + batch : ceil_div(longest, rows) * batch;
  }

  // The first tile of sequence b, before which there are rows_before rows.
  FLASHATTN_HD constexpr int64_t first(int64_t rows_before, int32_t b) const {
    return packed ? rows_before / rows + b : ceil_div(longest, rows) * b;
  }
};

// Strides of arrays with one number per row, as lse and delta: (batch, head, seq) or (head, total).
struct RowLayout {
  int64_t batch_stride, head_stride;
};

FLASHATTN_HD RowLayout row_layout(const Problem& problem, const Shape& shape) {
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) return {0, shape.total_q};
  return {static_cast<int64_t>(problem.heads_q) * shape.seqlen_q, shape.seqlen_q};
}

// Split-KV: how a sequence's keys are split over CTAs or tasks, whose results are merged. The split
// of a sequence depends only on the rule and on the sequence's own lengths.
struct SplitRule {
  int32_t splits;       // number of splits; 0: `keys` decides
  int32_t keys;         // keys of a split, if splits is 0
  int32_t max_queries;  // sequences with more queries are not split
  int32_t step;         // splits start at multiples of `step` keys
  FastDivmod round;     // splits * step

  static constexpr SplitRule of(int32_t splits, int32_t keys, int32_t max_queries, int32_t step) {
    const int64_t round = static_cast<int64_t>(std::max(splits, 1)) * step;
    return {splits, keys, max_queries, step,
            FastDivmod::of(static_cast<int32_t>(std::min<int64_t>(round, INT32_MAX)))};
  }
};

// Whether splitting pays for its merge. ctas: CTAs without splitting. The time unit is what a CTA
// takes for a key, some 20 ns. Splitting saves less if there are CTAs enough to use the memory
// bandwidth. The merge takes 9 us and 9 ns a row (fitted to decoding on an H200; decode kernels
// take half as long for a key, and for the merge, which starts early).
FLASHATTN_HD constexpr bool pays_to_split(int64_t rows, int32_t keys, int64_t splits, int64_t ctas,
                                          int32_t multiprocessors) {
  if (splits <= 1) return false;
  return (keys - keys / splits) * multiprocessors >
         (450 + rows * 9 / 20) * (multiprocessors + ctas);
}

// The largest number of splits, at most `most`, whose CTAs (`ctas` each) run in at most `waves`
// waves of `resident` CTAs with less than a tenth of the slots empty. 0: there is none.
constexpr int64_t splits_of_full_waves(int64_t ctas, int64_t resident, int64_t waves,
                                       int64_t most) {
  for (; waves > 0; --waves) {
    const int64_t full = waves * resident / ctas, splits = full < most ? full : most;
    if (10 * splits * ctas >= 9 * waves * resident) return splits;
  }
  return 0;
}

// Keys of each split except the last.
FLASHATTN_HD constexpr int32_t split_keys(const SplitRule& rule, Lengths len) {
  if (len.q > rule.max_queries || len.kv == 0) return len.kv;
  if (rule.splits == 0) return rule.keys < len.kv ? rule.keys : len.kv;
  const int64_t steps = rule.round.quotient(len.kv - 1) + 1;
  return clamp_index(steps * rule.step, len.kv);
}

FLASHATTN_HD constexpr int32_t split_count(const SplitRule& rule, Lengths len) {
  return len.kv == 0 ? 1 : (len.kv - 1) / split_keys(rule, len) + 1;
}

// The largest number of splits of any sequence within these lengths. The longest sequence may have
// fewer: those with more than max_queries queries are not split.
FLASHATTN_HD constexpr int32_t max_split_count(const SplitRule& rule, Lengths longest) {
  return rule.splits > 0
             ? rule.splits
             : split_count(
                   rule, {longest.q < rule.max_queries ? longest.q : rule.max_queries, longest.kv});
}

FLASHATTN_HD constexpr Interval split_range(const SplitRule& rule, Lengths len, int32_t split) {
  const int64_t keys = split_keys(rule, len);
  return {clamp_index(split * keys, len.kv), clamp_index((split + 1) * keys, len.kv)};
}

}  // namespace flashattn
