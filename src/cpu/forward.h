// The forward pass of one block of queries (Dao 2023, algorithm 1): keys and values are packed a
// tile at a time and shared by all rows of the block, which are worked on in tiles of tile_q rows.
//
// Row r of a block is query first_query + r % queries of head first_head + r / queries: several
// heads of a group share a block when queries are few.
#pragma once

#include "cpu/direct.h"
#include "cpu/forward_scratch.h"
#include "cpu/weights.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
class ForwardBlock {
 public:
  // kv_heads: those of the place whose keys the block reads; more than one only as they lie.
  FLASHATTN_INLINE ForwardBlock(const ForwardJob& job, const ForwardPlace& place, Interval kv_heads,
                                char* scratch)
      : job_(job),
        problem_(*job.problem),
        in_(job.args->inputs),
        mask_(problem_.mask_rule()),
        sequence_(sequence_of(problem_, job.args->shape, in_, place.b)),
        direct_(is_direct(problem_, sequence_.len)),
        tiling_(direct_ ? kDirectTiling : job.tiling),
        scratch_(problem_, tiling_, scratch),
        b_(place.b),
        kv_head_(kv_heads.begin),
        kv_heads_(kv_heads.end - kv_heads.begin),
        part_(place.part),
        parts_(part_count(job.split, sequence_.len)) {
    const Lengths len = sequence_.len;
    queries_.begin = clamp_index(static_cast<int64_t>(place.query_block) * job.queries, len.q);
    queries_.end = clamp_index(queries_.begin + static_cast<int64_t>(job.queries), len.q);
    const int32_t group = problem_.group();
    first_head_ = kv_head_ * group + place.head_block * job.heads;
    const int32_t left = group - place.head_block * job.heads;
    heads_ = kv_heads_ * (left < job.heads ? left : job.heads);
    rows_ = heads_ * (queries_.end - queries_.begin);
    const Interval part = part_range(job_.split, sequence_.len, part_);
    part_begin_ = part.begin;
    if (rows_ > 0) keys_ = intersect(key_span(mask_, queries_, len).any, part);
  }

  // next: what this thread will probably work on then, or NULL.
  void run(const ForwardBlock* next) {
    if (rows_ <= 0 || part_ >= parts_) return;
    start();
    int32_t first = keys_.begin / scratch_.tile_kv * scratch_.tile_kv;
    for (int32_t after; first < keys_.end; first = after) {
      after = first + scratch_.tile_kv;
      if (after < keys_.end && !direct_) look_ahead({0, 0}, after, ahead_);
      if (after >= keys_.end && next) next->look_ahead(next->queries_, next->keys_.begin, ahead_);
      key_tile(intersect({first, after}, {part_begin_, keys_.end}));
    }
    finish();
  }

 private:
  // Rows of one head inside a tile of rows.
  struct Segment {
    int32_t head;
    Interval queries;
    int32_t row;  // of the block
  };

  FLASHATTN_INLINE Segment segment_at(int32_t row, int32_t end_row) const {
    const int32_t count = queries_.end - queries_.begin;
    const int32_t query = queries_.begin + row % count;
    const int32_t left = queries_.end - query;
    return {first_head_ + row / count,
            {query, query + (left < end_row - row ? left : end_row - row)},
            row};
  }

  // What is packed for queries, and for a tile of keys.
  void look_ahead(Interval queries, int32_t first_key, Ahead (&ahead)[3]) const {
    const int32_t size = dtype_size(problem_.dtype);
    const Rows q = rows_of(in_.q, size, b_, first_head_, sequence_.first_q);
    const int32_t tile = first_key / scratch_.tile_kv * scratch_.tile_kv;
    const Interval keys = intersect({tile, tile + scratch_.tile_kv}, keys_);
    ahead[0] = {q, problem_.dim_qk * size, queries};
    ahead[1] = {kv(in_.k), problem_.dim_qk * size, keys};
    ahead[2] = {kv(in_.v), problem_.dim_v * size, keys};
  }

  void start() {
    const int32_t count = queries_.end - queries_.begin;
    for (int32_t h = 0; h < heads_; ++h) {
      pack_a<kCompute>(
          rows_of(in_.q, dtype_size(problem_.dtype), b_, first_head_ + h, sequence_.first_q),
          queries_, problem_.dim_qk, problem_.dtype,
          scratch_.q + static_cast<int64_t>(h) * count * scratch_.q_units, scratch_.q_units);
    }
    __builtin_memset(
        scratch_.o, 0,
        sizeof(float) * static_cast<size_t>(rows_) * static_cast<size_t>(scratch_.v_columns));
    for (int32_t r = 0; r < rows_; ++r) {
      const float sink = (problem_.features & FLASHATTN_FEATURE_SINK) && part_ == 0
                             ? in_.sink[first_head_ + r / count] * kLog2E
                             : -kInfinity;
      scratch_.m[r] = sink;
      scratch_.l[r] = sink == -kInfinity ? 0.0f : 1.0f;
    }
  }

  void key_tile(Interval keys) {
    bool packed = false;
    for (int32_t row = 0; row < rows_;) {
      int32_t end_row = row + tiling_.tile_q < rows_ ? row + tiling_.tile_q : rows_;
      // With a block mask a block of queries has one head.
      const ScoreRules rules = score_rules(problem_, in_, b_, first_head_, sequence_.len);
      const Interval cell = block_cell(rules, queries_.begin + row, tiling_.tile_q, sequence_.len);
      if (rules.blocks && cell.end - queries_.begin < end_row) end_row = cell.end - queries_.begin;
      for_each_block_run(rules, cell, keys, [&](Interval run, bool full) {
        row_tile(row, end_row, keys, run, full, &packed);
      });
      row = end_row;
    }
  }

  FLASHATTN_INLINE Rows kv(const flashattn_tensor& t, int32_t head = 0) const {
    return kv_rows(problem_, in_, t, b_, kv_head_ + head, sequence_.first_kv);
  }

  FLASHATTN_INLINE Cache cache(const flashattn_tensor& t, int32_t dim) const {
    const int32_t size = dtype_size(problem_.dtype);
    return {kv(t), t.stride_head * size, kv_heads_, dim * size, keys_.end};
  }

  void pack(Interval keys) {
    pack_b_transposed<kCompute>(kv(in_.k), keys, problem_.dim_qk, problem_.dtype, scratch_.k);
    finite_ = pack_b<kCompute>(kv(in_.v), keys, problem_.dim_v, problem_.dtype, scratch_.v,
                               scratch_.v_panel);
  }

  // The keys of `run` that some of the rows see; full: whether all do, too.
  Interval seen_by(int32_t row, int32_t end_row, Interval run, bool* full) const {
    Interval seen{run.end, run.begin};
    for (int32_t r = row; r < end_row;) {
      const Segment segment = segment_at(r, end_row);
      r += segment.queries.end - segment.queries.begin;
      const KeySpan span = key_span(mask_, segment.queries, sequence_.len);
      *full &= classify(span, run) == TileKind::kFull;
      if (span.any.begin < seen.begin) seen.begin = span.any.begin;
      if (span.any.end > seen.end) seen.end = span.any.end;
    }
    return intersect(seen, run);
  }

  // What few rows of a tile need of it; all: no less than the whole tile.
  void set_bands(int32_t row, int32_t end_row, Interval keys, Interval run, Interval columns,
                 bool all) {
    constexpr int32_t kStep = kBandRows<kCompute>, kU = kUnit<kCompute>;
    for (int32_t r = row, n = 0; r < end_row; r += kStep, ++n) {
      const int32_t end = end_row - r < kStep ? end_row : r + kStep;
      Interval seen = intersect({keys.begin + columns.begin, keys.begin + columns.end}, keys);
      bool unused = true;
      if (!all) seen = seen_by(r, end, run, &unused);
      seen = {seen.begin - keys.begin, seen.end - keys.begin};
      if (seen.begin >= seen.end) seen = {0, 0};
      bands_[n] = {all ? columns : round_out(seen),
                   {seen.begin / kU, static_cast<int32_t>(ceil_div(seen.end, kU))}};
    }
  }

  // Rows [row, end_row) against the keys `run` of a tile; full: no block of them is off.
  void row_tile(int32_t row, int32_t end_row, Interval keys, Interval run, bool full,
                bool* packed) {
    Interval seen = seen_by(row, end_row, run, &full);
    if (seen.begin >= seen.end) return;
    if (!direct_ && !*packed) pack(keys);
    *packed = true;

    const Interval columns = round_out({seen.begin - keys.begin, seen.end - keys.begin});
    full &= keys.begin + columns.begin == run.begin && keys.begin + columns.end == run.end;
    set_bands(row, end_row, keys, run, columns, full || direct_);
    const int32_t rows = end_row - row;
    const uint32_t* q = scratch_.q + static_cast<int64_t>(row) * scratch_.q_units;
    if (direct_) {
      // Whole blocks of keys, so that a row's scores end before the next row's begin.
      seen.begin -= (seen.begin - keys.begin) % kWidth;
      direct_scores<kCompute>(cache(in_.k, problem_.dim_qk), seen, problem_.dim_qk, problem_.dtype,
                              q, scratch_.q_units, rows / kv_heads_,
                              scratch_.s + (seen.begin - keys.begin), scratch_.tile_kv);
    } else {
      gemm<kCompute>(
          rows, columns, static_cast<int32_t>(scratch_.k_panel / kPanel), {q, scratch_.q_units, 1},
          {scratch_.k, scratch_.k_panel}, {scratch_.s, scratch_.tile_kv}, false, [&](int32_t r) {
            constexpr int32_t kU = kUnit<kCompute>;
            const Interval k = bands_[r / kBandRows<kCompute>].k;
            return Interval{k.begin * kU / kWidth * kWidth, round_up(k.end * kU, kWidth)};
          });
    }
    for (int32_t r = row, end; r < end_row; r = end) {
      end = end_row;
      if (problem_.dropout > 0) {
        const Segment segment = segment_at(r, end_row);
        draw(segment, r - row, keys, columns);
        end = r + segment.queries.end - segment.queries.begin;
      }
      softmax({r, end}, row, keys, run, full);
    }
    float* o = scratch_.o + static_cast<int64_t>(row) * scratch_.v_columns;
    if (direct_) return weigh_directly(o, rows, keys, seen, full);
    if (!finite_ && !full) return weigh_exactly(o, 0, rows, 0, keys.begin, seen);
    constexpr int kU = kUnit<kCompute>;
    const int32_t step = full ? rows : kBandRows<kCompute>;
    for (int32_t r = 0; r < rows; r += step) {
      const Interval k = bands_[r / kBandRows<kCompute>].k;
      if (k.begin >= k.end) continue;
      gemm<kCompute>(
          rows - r < step ? rows - r : step, {0, scratch_.v_columns}, k.end - k.begin,
          {scratch_.p + int64_t{r} * scratch_.tile_kv / kU + k.begin, scratch_.tile_kv / kU, 1},
          {scratch_.v + int64_t{k.begin} * kPanel, scratch_.v_panel},
          {o + int64_t{r} * scratch_.v_columns, scratch_.v_columns}, true);
    }
  }

  // O += P V for the keys `seen` of a tile, as they lie in memory.
  void weigh_directly(float* o, int32_t rows, Interval keys, Interval seen, bool full) {
    constexpr int kU = kUnit<kCompute>;
    const int64_t count = static_cast<int64_t>(rows) * scratch_.v_columns;
    // Where weights may be 0, infinities and NaN must not meet them: seen by the result.
    float* saved = reinterpret_cast<float*>(scratch_.v);
    if (!full) __builtin_memcpy(saved, o, sizeof(float) * static_cast<size_t>(count));
    direct_values<kCompute>(cache(in_.v, problem_.dim_v), seen, problem_.dim_v, problem_.dtype,
                            scratch_.p + (seen.begin - keys.begin) / kU, scratch_.tile_kv / kU,
                            rows / kv_heads_, o, scratch_.v_columns);
    if (full) return;
    const int64_t each = count / kv_heads_;
    for (int32_t head = 0; head < kv_heads_; ++head, o += each, saved += each) {
      if (all_finite(o, each)) continue;
      __builtin_memcpy(o, saved, sizeof(float) * static_cast<size_t>(each));
      weigh_exactly(o, head * (rows / kv_heads_), rows / kv_heads_, head, keys.begin, seen);
    }
  }

  // Scores to weights, the running maximum and sum, and O to the new maximum's scale: kWidth rows
  // at a time, a lane each. Without any maximum in the loop it would be 1 to 2 % faster: not worth
  // doing tiles over. first_row: of the tile.
  void softmax(Interval rows, int32_t first_row, Interval keys, Interval run, bool full) {
    for (int32_t row = rows.begin; row < rows.end; row += kWidth) {
      const int32_t count = rows.end - row < kWidth ? rows.end - row : kWidth;
      const int32_t tile_row = row - first_row;
      float factor[kWidth], shift[kWidth], shrink[kWidth];
      store(factor, splat(1.0f));
      Floats each[kWidth];
      for (int32_t n = 0; n < count;) {
        const Segment segment = segment_at(row + n, row + count);
        const ScoreRules rules = score_rules(problem_, in_, b_, segment.head, sequence_.len);
        for (int32_t i = segment.queries.begin; i < segment.queries.end; ++i, ++n) {
          each[n] = finish_scores(rules, i, tile_row + n, keys, run, full);
          if (!rules.modified()) factor[n] = rules.scale * kLog2E;
        }
        if (rules.modified() && full) continue;
        for (int32_t at = n - (segment.queries.end - segment.queries.begin); at < n;) {
          at += with_pair(tile_row + at, n - at, [&](auto rows) {
            highest_of<decltype(rows)::value>(scores_of(tile_row + at), scratch_.tile_kv,
                                              columns_of(tile_row + at), each + at);
          });
        }
      }
      for (int32_t n = count; n < kWidth; ++n) each[n] = splat(-kInfinity);
      float *m = scratch_.m + row, *l = scratch_.l + row;
      const Floats before = load(m), highest = max_each(each) * load(factor);
      const Floats top = select((highest > before) | (highest != highest), highest, before);
      // Where no key was visible so far the weights are zero.
      store(shift, select(top == -kInfinity, Floats{}, top));
      for (int32_t n = 0; n < count;) {
        n += with_pair(tile_row + n, count - n, [&](auto rows) {
          constexpr int32_t kRows = decltype(rows)::value;
          for (Ahead& ahead : ahead_) ahead.fetch((rows_ - row - n + kRows - 1) / kRows);
          const int32_t r = tile_row + n;
          write_weights<kCompute, kRows>(
              scores_of(r), scratch_.p + int64_t{r} * scratch_.tile_kv / 2,
              problem_.dropout > 0 ? scratch_.keep + int64_t{r + keep_shift_} * scratch_.tile_kv
                                   : nullptr,
              scratch_.tile_kv, columns_of(r), factor + n, shift + n, each + n);
        });
      }
      for (int32_t n = count; n < kWidth; ++n) each[n] = Floats{};
      const Floats scale = select(top == before, splat(1.0f), exp2(before - top));
      store(m, top);
      store(l, load(l) * scale + sum_each(each));
      if (!any(scale != 1.0f)) continue;
      store(shrink, scale);
      float* o = scratch_.o + int64_t{row} * scratch_.v_columns;
      for (int32_t n = 0; n < count; ++n, o += scratch_.v_columns) {
        if (shrink[n] == 1) continue;
        for (int32_t c = 0; c < scratch_.v_columns; c += kWidth) {
          store(o + c, load(o + c) * splat(shrink[n]));
        }
      }
    }
  }

  FLASHATTN_INLINE Interval columns_of(int32_t tile_row) const {
    return bands_[tile_row / kBandRows<kCompute>].columns;
  }
  FLASHATTN_INLINE float* scores_of(int32_t tile_row) const {
    return scratch_.s + int64_t{tile_row} * scratch_.tile_kv;
  }

  // Products of query i to scores, hidden ones to -inf. Returns the highest of each lane where
  // scores are modified, before any is hidden.
  FLASHATTN_INLINE Floats finish_scores(const ScoreRules& rules, int32_t i, int32_t tile_row,
                                        Interval keys, Interval run, bool full) {
    Floats top = splat(-kInfinity);
    const Interval columns = columns_of(tile_row);
    if (columns.begin >= columns.end) return top;
    float* s = scores_of(tile_row);
    if (rules.modified()) {
      top = modify_row(rules, i, keys.begin, sequence_.len.kv, columns.begin, columns.end, s,
                       nullptr);
    }
    if (!full) {
      mask_row(rules, rules.blocks != nullptr, i, keys.begin,
               intersect(visible_keys(mask_, i, sequence_.len), run), columns, s);
    }
    return top;
  }

  // The keep bytes of a segment: row tile_row + keep_shift_ of the buffer holds its first query.
  void draw(const Segment& segment, int32_t tile_row, Interval keys, Interval columns) {
    const DropoutStream stream =
        DropoutStream::make(job_.rng_seed, job_.rng_offset,
                            static_cast<uint32_t>(b_) * static_cast<uint32_t>(problem_.heads_q) +
                                static_cast<uint32_t>(segment.head));
    // Strips start at multiples of 16 queries; the segment may start inside one.
    const int32_t first_strip = segment.queries.begin / 16;
    keep_shift_ = segment.queries.begin % 16;
    for (int32_t strip = first_strip; strip * 16 < segment.queries.end; ++strip) {
      dropout_strip(
          stream, problem_.dropout_threshold(), strip, keys.begin + columns.begin,
          columns.end - columns.begin,
          scratch_.keep + columns.begin +
              static_cast<int64_t>(tile_row + (strip - first_strip) * 16) * scratch_.tile_kv,
          scratch_.tile_kv);
    }
  }

  // O += P V where V holds infinities or NaN that hidden weights of 0 must not touch: key by key.
  // row: the first, of the weights; first: the key of their column 0.
  void weigh_exactly(float* o, int32_t row, int32_t rows, int32_t kv_head, int32_t first,
                     Interval seen) {
    constexpr int kU = kUnit<kCompute>;
    const Rows values = kv(in_.v, kv_head);
    for (int32_t r = row; r < row + rows; ++r, o += scratch_.v_columns) {
      const Interval columns = bands_[r / kBandRows<kCompute>].columns;
      const Interval own = intersect({first + columns.begin, first + columns.end}, seen);
      for (int32_t j = own.begin; j < own.end; ++j) {
        const int32_t c = j - first;
        const uint32_t weight =
            scratch_.p[static_cast<int64_t>(r) * scratch_.tile_kv / kU + c / kU];
        const uint32_t shift = kU == 2 && c % 2 == 0 ? 16 : 0;
        const Floats p = as_floats(splat_word(kU == 2 ? weight << shift & 0xffff0000u : weight));
        if (p[0] == 0) continue;
        with_dtype(problem_.dtype, [&](auto tag) {
          constexpr int32_t kDtype = decltype(tag)::value;
          for (int32_t at = 0; at < problem_.dim_v; at += kWidth) {
            const Floats v =
                load_first<kDtype>(values.row(j) + at * kSize<kDtype>, problem_.dim_v - at);
            store(o + at, load(o + at) + p * v);
          }
        });
      }
    }
  }

  void finish() {
    const int32_t count = queries_.end - queries_.begin;
    const RowLayout layout = row_layout(problem_, job_.args->shape);
    const float kept = 65536.0f / (65536.0f - static_cast<float>(problem_.dropout_threshold()));
    for (int32_t r = 0; r < rows_; ++r) {
      const int32_t head = first_head_ + r / count, i = queries_.begin + r % count;
      const float l = scratch_.l[r], factor = l == 0 ? 0.0f : kept / l;
      const float lse = l == 0 ? -kInfinity : (scratch_.m[r] + __builtin_log2f(l)) * kLn2;
      const float* o = scratch_.o + static_cast<int64_t>(r) * scratch_.v_columns;
      if (parts_ > 1) {
        const int64_t row = job_.partial_row(part_, b_, head, i);
        store_row(reinterpret_cast<char*>(job_.partial_o + row * problem_.dim_v),
                  FLASHATTN_DTYPE_F32, o, factor, problem_.dim_v);
        job_.partial_lse[row] = lse;
        continue;
      }
      const Rows out =
          rows_of(job_.args->o, dtype_size(problem_.dtype_o), b_, head, sequence_.first_q);
      fetch_soon(out, i, queries_, problem_.dim_v * dtype_size(problem_.dtype_o));
      store_row(out.row(i), problem_.dtype_o, o, factor, problem_.dim_v);
      if (job_.args->lse) {
        job_.args
            ->lse[b_ * layout.batch_stride + head * layout.head_stride + sequence_.first_q + i] =
            lse;
      }
    }
  }

  const ForwardJob& job_;
  const Problem& problem_;
  const flashattn_inputs& in_;
  const MaskRule mask_;
  const Sequence sequence_;
  const bool direct_;  // keys and values are not packed
  const Tiling tiling_;
  const ForwardScratch<kCompute> scratch_;
  const int32_t b_, kv_head_, kv_heads_, part_, parts_;
  Interval queries_;
  int32_t first_head_, heads_, rows_;
  int32_t part_begin_;
  Interval keys_{0, 0};  // of this part that some query sees
  Ahead ahead_[3] = {};
  int32_t keep_shift_ = 0;
  bool finite_ = true;  // of the packed values
  // Of kBandRows rows of a tile: columns, and keys in units.
  struct Band {
    Interval columns, k;
  };
  Band bands_[kDirectRows / kMicroRows + 1];
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
