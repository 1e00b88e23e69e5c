// The forward pass of one block of queries (Dao 2023, algorithm 1): keys and values are packed a
// tile at a time and shared by all rows of the block, which are worked on in tiles of tile_q rows.
#pragma once

#include "cpu/direct_gemm.h"
#include "cpu/q_block.h"
#include "cpu/forward_scratch.h"
#include "cpu/softmax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
class ForwardBlock : private QBlock {
 public:
  // kv_heads: those of the place whose keys the block reads; more than one only as they lie.
  FLASHATTN_INLINE ForwardBlock(const ForwardJob& job, const ForwardWorkTile& place,
                                Interval kv_heads, char* scratch)
      : QBlock(job, place, kv_heads),
        direct_(is_direct(problem_, sequence_.len)),
        tiling_(direct_ ? kDirectTiling : job.tiling),
        scratch_(problem_, tiling_, scratch),
        own_tile_(reinterpret_cast<char*>(scratch_.k)) {}

  // next: what this thread will probably work on then, or NULL.
  void run(const ForwardBlock* next) {
    if (rows_ <= 0 || split_ >= splits_) return;
    work(next);
    if (finish()) return;
    fixed_base_ = false;  // for rows for which it does not do
    work(nullptr);
    finish();
  }

 private:
  void work(const ForwardBlock* next) {
    start();
    int32_t first = keys_.begin / scratch_.tile_kv * scratch_.tile_kv;
    for (int32_t after; first < keys_.end; first = after) {
      after = first + scratch_.tile_kv;
      if (after < keys_.end && !direct_) plan_prefetch({0, 0}, after, scratch_.tile_kv, prefetch_);
      if (after >= keys_.end && next) {
        next->plan_prefetch(next->queries_, next->keys_.begin, next->scratch_.tile_kv, prefetch_);
      }
      key_tile(intersect({first, after}, {part_begin_, keys_.end}));
    }
  }

  void start() {
    const int32_t count = queries_.end - queries_.begin;
    for (int32_t h = 0; h < heads_; ++h) {
      pack_a<kCompute>(
          rows_of(in_.q, dtype_size(problem_.dtype), b_, first_head_ + h, sequence_.first_q),
          queries_, problem_.dim_qk, problem_.dtype,
          scratch_.q + static_cast<int64_t>(h) * count * scratch_.q_words, scratch_.q_words);
    }
    __builtin_memset(
        scratch_.o, 0,
        sizeof(float) * static_cast<size_t>(rows_) * static_cast<size_t>(scratch_.v_columns));
    fill(scratch_.m, 0, rows_, -kInfinity);
    for (float* sums : {scratch_.l, scratch_.rest}) fill(sums, 0, rows_, 0.0f);
  }

  void key_tile(Interval keys) {
    bool packed = false;
    for (int32_t row = 0; row < rows_;) {
      int32_t end_row = row + tiling_.tile_q < rows_ ? row + tiling_.tile_q : rows_;
      // With a block mask a block of queries has one head.
      const ScoreRules rules = score_rules(problem_, in_, b_, first_head_, sequence_.len);
      const Interval same =
          same_block_rows(rules, queries_.begin + row, tiling_.tile_q, sequence_.len);
      if (rules.blocks && same.end - queries_.begin < end_row) end_row = same.end - queries_.begin;
      for_each_active_range(rules, same, keys, [&](Interval run, bool full) {
        row_range(row, end_row, keys, run, full, &packed);
      });
      row = end_row;
    }
  }

  // Rows [row, end_row) against the keys `run` of a tile, chunk by chunk; full: no block of them is
  // off.
  void row_range(int32_t row, int32_t end_row, Interval tile, Interval run, bool full,
                 bool* packed) {
    const int32_t size = scratch_.score_columns;
    for (int32_t at = run.begin; at < run.end;) {
      const int32_t into = (at - tile.begin) % size;
      if (into == 0 && full) at += run_mainloop(row, end_row, tile, {at, run.end}, packed) * size;
      if (at >= run.end) return;
      const Interval chunk = intersect({at - into, at - into + size}, tile);
      row_tile(row, end_row, tile, chunk, intersect(chunk, {at, run.end}), full, packed);
      at = chunk.end;
    }
  }

  // As many of the chunks that `run` starts with as take the way of amx_chunks.h.
  int32_t run_mainloop(int32_t row, int32_t end_row, Interval tile, Interval run, bool* packed) {
    if constexpr (kFixedBase<kCompute>) {
      if (!scratch_.amx_mainloop || !fixed_base_ || end_row - row != kMainloopRows) return 0;
      int32_t keys = 0, chunks = 0;
      for (; chunks < kMaxSubtiles && keys == chunks * kSubtileKeys; ++chunks) {
        const int32_t first = run.begin + keys;
        const Interval all = intersect({first, first + kSubtileKeys}, run);
        bool full = true;
        const Interval seen = visible_to(row, end_row, all, &full);
        if (seen.begin >= seen.end) break;
        if (!*packed) pack(tile);
        *packed = true;
        const int32_t count = round_up(seen.end - first, kStepKeys);
        // Values past the tile's end are zeros, but keys of another run are not.
        masked_[chunks] = !full || count != seen.end - first;
        if (masked_[chunks] && !finite_) break;
        if (masked_[chunks]) rows_visible(row, first, all, seen_[chunks]);
        keys += count;
      }
      if (keys == 0) return 0;
      int32_t left = static_cast<int32_t>(ceil_div(rows_ - row, kMainloopRows)) * chunks;
      const AmxMainloopOperands operands = scratch_.mainloop_operands(row, run.begin - tile.begin);
      return amx_mainloop(
          operands, keys, problem_.scale * kLog2E, scratch_.m + row, scratch_.l + row,
          scratch_.rest + row, [&](int32_t n) { return masked_[n] ? seen_[n] : nullptr; },
          [&] {
            for (RowPrefetch& ahead : prefetch_) ahead.prefetch(left);
            --left;
          });
    }
    return 0;
  }

  FLASHATTN_INLINE KvCacheHeads cache(const flashattn_tensor& t, int32_t dim) const {
    const int32_t size = dtype_size(problem_.dtype);
    return {kv(t), t.stride_head * size, kv_heads_, dim * size, keys_.end};
  }

  void pack(Interval keys) {
    const int64_t shared = shared_tile(keys.begin);
    scratch_.use_tile(shared < 0 ? own_tile_ : packed_tile(shared));
    if (shared < 0) {
      finite_ = pack_tile(keys);
      return;
    }
    const Interval all{keys.begin, keys.begin + scratch_.tile_kv};
    finite_ = pack_once(job_.shared.states + shared,
                        [&] { return pack_tile(intersect(all, {0, sequence_.len.kv})); });
  }

  // Returns whether all values are finite.
  bool pack_tile(Interval keys) const {
    pack_b_transposed<kCompute>(kv(in_.k), keys, problem_.dim_qk, problem_.dtype, scratch_.k);
    const bool finite = pack_b<kCompute>(kv(in_.v), keys, problem_.dim_v, problem_.dtype,
                                         scratch_.v, scratch_.v_panel);
    if (scratch_.amx_mainloop) scratch_.clear_values(keys.end - keys.begin);
    return finite;
  }

  // What few rows of a tile need of it; all: no less than the whole tile.
  void set_row_columns(int32_t row, int32_t end_row, Interval keys, Interval run, Interval columns,
                       bool all) {
    constexpr int32_t kStep = kMicroTileRows<kCompute>, kU = kWordElements<kCompute>;
    for (int32_t r = row, n = 0; r < end_row; r += kStep, ++n) {
      const int32_t end = end_row - r < kStep ? end_row : r + kStep;
      Interval seen = intersect({keys.begin + columns.begin, keys.begin + columns.end}, keys);
      bool unused = true;
      if (!all) seen = visible_to(r, end, run, &unused);
      seen = {seen.begin - keys.begin, seen.end - keys.begin};
      if (seen.begin >= seen.end) seen = {0, 0};
      const Interval own = all ? columns : round_out(seen);
      // Tile registers add up 16 units before they add them to O: always the same ones.
      row_columns_[n] = {own,
                         {(kFixedBase<kCompute> ? own.begin : seen.begin) / kU,
                          static_cast<int32_t>(ceil_div(seen.end, kU))}};
    }
  }

  // The same against those of a chunk.
  void row_tile(int32_t row, int32_t end_row, Interval tile, Interval keys, Interval run, bool full,
                bool* packed) {
    Interval seen = visible_to(row, end_row, run, &full);
    if (seen.begin >= seen.end) return;
    if (!direct_ && !*packed) pack(tile);
    *packed = true;

    const Interval columns = round_out({seen.begin - keys.begin, seen.end - keys.begin});
    full &= keys.begin + columns.begin == run.begin && keys.begin + columns.end == run.end;
    set_row_columns(row, end_row, keys, run, columns, full || direct_);
    const int32_t rows = end_row - row, skip = keys.begin - tile.begin;
    const uint32_t* q = scratch_.q + static_cast<int64_t>(row) * scratch_.q_words;
    if (direct_) {
      // Whole blocks of keys, so that a row's scores end before the next row's begin.
      seen.begin -= (seen.begin - keys.begin) % kWidth;
      for (int32_t r = 0; r < rows; ++r) {
        fill(scores_of(r), columns.begin, seen.begin - keys.begin, 0.0f);
        fill(scores_of(r), seen.end - keys.begin, columns.end, 0.0f);
      }
      direct_qk<kCompute>(cache(in_.k, problem_.dim_qk), seen, problem_.dim_qk, problem_.dtype, q,
                          scratch_.q_words, rows / kv_heads_,
                          scratch_.s + (seen.begin - keys.begin), scratch_.score_columns);
    } else {
      gemm<kCompute>(rows, columns, scratch_.k_words, {q, scratch_.q_words, 1},
                     {scratch_.k + skip / kPanelOf<kCompute> * scratch_.k_panel, scratch_.k_panel},
                     {scratch_.s, scratch_.score_columns}, false,
                     [&](int32_t r) { return scored_columns(r); });
    }
    for (int32_t r = row, end; r < end_row; r = end) {
      end = end_row;
      if (problem_.dropout > 0) {
        const HeadRows head_rows = head_rows_at(r, end_row);
        draw(head_rows, r - row, keys, columns);
        end = r + head_rows.queries.end - head_rows.queries.begin;
      }
      softmax({r, end}, row, keys, run, full);
    }
    float* o = scratch_.o + static_cast<int64_t>(row) * scratch_.v_columns;
    if (direct_) return add_pv_direct(o, rows, keys, seen, full);
    if (!finite_ && !full) return add_pv_nonzero_rows(o, 0, rows, 0, keys.begin, seen);
    constexpr int kU = kWordElements<kCompute>;
    const int32_t step = full ? rows : kMicroTileRows<kCompute>;
    for (int32_t r = 0; r < rows; r += step) {
      const Interval k = row_columns_[r / kMicroTileRows<kCompute>].k;
      if (k.begin >= k.end) continue;
      gemm<kCompute>(
          rows - r < step ? rows - r : step, {0, scratch_.v_columns}, k.end - k.begin,
          {scratch_.p + int64_t{r} * scratch_.score_columns / kU + k.begin,
           scratch_.score_columns / kU, 1},
          {scratch_.v + int64_t{skip / kU + k.begin} * kPanelOf<kCompute>, scratch_.v_panel},
          {o + int64_t{r} * scratch_.v_columns, scratch_.v_columns}, true);
    }
  }

  // O += P V for the keys `seen` of a tile, as they lie in memory.
  void add_pv_direct(float* o, int32_t rows, Interval keys, Interval seen, bool full) {
    constexpr int kU = kWordElements<kCompute>;
    const int64_t count = static_cast<int64_t>(rows) * scratch_.v_columns;
    // Where weights may be 0, infinities and NaN must not meet them: seen by the result.
    float* saved = reinterpret_cast<float*>(scratch_.v);
    if (!full) __builtin_memcpy(saved, o, sizeof(float) * static_cast<size_t>(count));
    direct_pv<kCompute>(cache(in_.v, problem_.dim_v), seen, problem_.dim_v, problem_.dtype,
                        scratch_.p + (seen.begin - keys.begin) / kU, scratch_.score_columns / kU,
                        rows / kv_heads_, o, scratch_.v_columns);
    if (full) return;
    const int64_t columns = scratch_.v_columns;
    for (int32_t r = 0; r < rows; ++r, o += columns, saved += columns) {
      if (all_finite(o, columns)) continue;
      __builtin_memcpy(o, saved, sizeof(float) * static_cast<size_t>(columns));
      add_pv_nonzero_rows(o, r, 1, r / (rows / kv_heads_), keys.begin, seen);
    }
  }

  // Scores to weights, the sums and O to the scale of m: kWidth rows at a time, a lane each.
  void softmax(Interval rows, int32_t first_row, Interval keys, Interval run, bool full) {
    for (int32_t row = rows.begin; row < rows.end; row += kWidth) {
      const int32_t count = rows.end - row < kWidth ? rows.end - row : kWidth;
      const int32_t tile_row = row - first_row;
      float factor[kWidth], shift[kWidth], shrink[kWidth];
      store(factor, splat(1.0f));
      Floats each[kWidth];  // the highest of each lane, where it is known
      bool known = true;
      for (int32_t n = 0; n < count;) {
        const HeadRows head_rows = head_rows_at(row + n, row + count);
        const ScoreRules rules = score_rules(problem_, in_, b_, head_rows.head, sequence_.len);
        for (int32_t i = head_rows.queries.begin; i < head_rows.queries.end; ++i, ++n) {
          each[n] = finish_scores(rules, i, tile_row + n, keys, run, full);
          factor[n] = rules.unit().log2;
        }
        known &= rules.modified() && full;  // heads differ in their slopes
      }
      for (int32_t n = count; n < kWidth; ++n) each[n] = splat(-kInfinity);
      float *m = scratch_.m + row, *l = scratch_.l + row, *rest = scratch_.rest + row;
      const Ints here = iota() < splat(static_cast<float>(count));
      const Floats before = load(m);
      const Ints first = here & (before == -kInfinity);
      Floats top = before, sums;
      // Rows whose m is to be the maximum: those that outgrow another one are done again.
      Ints highest_wanted = fixed_base_ ? first : here;
      for (bool again = true; again;) {
        if (any(highest_wanted)) {
          if (!known) find_row_max(tile_row, count, each);
          const Floats highest = max_each(each);
          const Floats higher = select((highest > before) | (highest != highest), highest, before);
          top = select(highest_wanted, higher, top);
        }
        store(shift, exponent_shift(top, load(factor), fixed_base_));
        sums = weights(tile_row, count, rows_ - row, factor, shift);
        const Ints fits = sums <= kMaxRowSum;
        again = fixed_base_ && any(here & ~fits & ~highest_wanted);
        highest_wanted |= ~fits;
      }
      const Floats scale = select((top == before) | first, splat(1.0f),
                                  rescale_factor(before, top, load(factor), fixed_base_));
      store(m, select(here, top, before));
      Floats sum = load(l) * scale, left = load(rest) * scale;
      add_compensated(sum, left, sums);
      store(l, sum);
      store(rest, left);
      if (!any(here & (scale != 1.0f))) continue;
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

  // The highest of the scores of each of up to kWidth rows, lane by lane.
  FLASHATTN_INLINE void find_row_max(int32_t tile_row, int32_t count, Floats* each) const {
    for (int32_t n = 0; n < count;) {
      n += for_row_pair(tile_row + n, count - n, [&](auto rows) {
        max_of_rows<decltype(rows)::value>(scores_of(tile_row + n), scratch_.score_columns,
                                           row_columns_of(tile_row + n), each + n);
      });
    }
  }

  // Writes the weights of up to kWidth rows; returns their sums. left: rows of the block from these
  // on.
  FLASHATTN_INLINE Floats weights(int32_t tile_row, int32_t count, int32_t left,
                                  const float* factor, const float* shift) {
    Floats each[kWidth] = {};
    for (int32_t n = 0; n < count;) {
      n += for_row_pair(tile_row + n, count - n, [&](auto rows) {
        constexpr int32_t kRows = decltype(rows)::value;
        for (RowPrefetch& ahead : prefetch_) ahead.prefetch((left - n + kRows - 1) / kRows);
        const int32_t r = tile_row + n;
        const int64_t stride = scratch_.score_columns;
        const auto write = [&](auto shifted) FLASHATTN_INLINED {
          compute_p<kCompute, kRows, decltype(shifted)::value>(
              scores_of(r), stride, scratch_.p + r * stride / 2, stride / 2,
              problem_.dropout > 0 ? scratch_.keep + (r + keep_shift_) * stride : nullptr,
              row_columns_of(r), factor + n, shift + n, each + n);
        };
        if constexpr (kFixedBase<kCompute>) {
          if (fixed_base_) return write(std::true_type{});
        }
        write(std::false_type{});
      });
    }
    return sum_each(each);
  }

  FLASHATTN_INLINE Interval row_columns_of(int32_t tile_row) const {
    return row_columns_[tile_row / kMicroTileRows<kCompute>].columns;
  }
  // Those that the product with the keys writes.
  FLASHATTN_INLINE Interval scored_columns(int32_t tile_row) const {
    const Interval k = row_columns_[tile_row / kMicroTileRows<kCompute>].k;
    return {k.begin * kWordElements<kCompute> / kWidth * kWidth,
            round_up(k.end * kWordElements<kCompute>, kWidth)};
  }
  FLASHATTN_INLINE float* scores_of(int32_t tile_row) const {
    return scratch_.s + int64_t{tile_row} * scratch_.score_columns;
  }

  // Products of query i to scores, hidden ones to -inf. Returns the highest of each lane where
  // scores are modified, before any is hidden.
  FLASHATTN_INLINE Floats finish_scores(const ScoreRules& rules, int32_t i, int32_t tile_row,
                                        Interval keys, Interval run, bool full) {
    Floats top = splat(-kInfinity);
    const Interval columns = row_columns_of(tile_row);
    if (columns.begin >= columns.end) return top;
    float* s = scores_of(tile_row);
    if (rules.modified()) {
      const auto [begin, end] = scored_columns(tile_row);
      top = score_mod_row(rules, i, keys.begin, sequence_.len.kv, begin, end, s, nullptr);
    }
    if (!full) {
      mask_row(rules, rules.blocks != nullptr, i, keys.begin,
               intersect(visible_keys(mask_, i, sequence_.len), run), columns, s);
    }
    return top;
  }

  // The keep bytes of a segment: row tile_row + keep_shift_ of the buffer holds its first query.
  void draw(const HeadRows& head_rows, int32_t tile_row, Interval keys, Interval columns) {
    keep_shift_ = head_rows.queries.begin % 16;
    dropout_rows(problem_, job_.rng_seed, job_.rng_offset, b_, head_rows.head, head_rows.queries,
                 keys.begin + columns.begin, columns.end - columns.begin,
                 scratch_.keep + columns.begin + int64_t{tile_row} * scratch_.score_columns,
                 scratch_.score_columns);
  }

  // O += P V where V holds infinities or NaN. row: the first, of the weights; first: the key of
  // their column 0.
  void add_pv_nonzero_rows(float* o, int32_t row, int32_t rows, int32_t kv_head, int32_t first,
                           Interval seen) {
    const TokenRows values = kv(in_.v, kv_head);
    for (int32_t r = row; r < row + rows; ++r, o += scratch_.v_columns) {
      const Interval columns = row_columns_of(r);
      add_pv_nonzero<kCompute>(
          values, problem_.dtype, problem_.dim_v,
          scratch_.p + int64_t{r} * scratch_.score_columns / kWordElements<kCompute>, first,
          intersect({first + columns.begin, first + columns.end}, seen), o);
    }
  }

  // Writes the results, but for rows that are to be done again; returns whether there are none.
  bool finish() {
    bool all = true;
    const int32_t count = queries_.end - queries_.begin;
    const RowLayout layout = row_layout(problem_, job_.args->shape);
    const float kept = 65536.0f / (65536.0f - static_cast<float>(problem_.dropout_threshold()));
    for (int32_t r = 0; r < rows_; ++r) {
      const int32_t head = first_head_ + r / count, i = queries_.begin + r % count;
      const float m = scratch_.m[r];
      float l = scratch_.l[r] + scratch_.rest[r];
      const float* o = scratch_.o + static_cast<int64_t>(r) * scratch_.v_columns;
      const ScoreUnit unit = score_rules(problem_, in_, b_, head, sequence_.len).unit();
      if constexpr (kFixedBase<kCompute>) {
        if (fixed_base_) {
          scratch_.redo[r] = !all_finite(o, scratch_.v_columns) || !base_serves(m, unit.log2, &l);
          all &= !scratch_.redo[r];
        }
        if (scratch_.redo[r] == fixed_base_) continue;
      }
      if (splits_ > 1) {
        const int64_t row = job_.partial_row(split_, b_, head, i);
        store_row(reinterpret_cast<char*>(job_.partial_o + row * problem_.dim_v),
                  FLASHATTN_DTYPE_F32, o, normalize_row(m, l, unit.nats, -kInfinity).factor * kept,
                  problem_.dim_v);
        job_.partial_m[row] = m;
        job_.partial_l[row] = l;
        continue;
      }
      const RowResult end = normalize_row(m, l, unit.nats, sink_of(problem_, in_, head));
      const TokenRows out =
          rows_of(job_.args->o, dtype_size(problem_.dtype_o), b_, head, sequence_.first_q);
      prefetch_row(out, i, queries_, problem_.dim_v * dtype_size(problem_.dtype_o));
      store_row(out.row(i), problem_.dtype_o, o, end.factor * kept, problem_.dim_v);
      const int64_t at = b_ * layout.batch_stride + head * layout.head_stride + sequence_.first_q;
      if (job_.args->lse) job_.args->lse[at + i] = rounded_lse(end.lse);
    }
    return all;
  }

  const bool direct_;  // keys and values are not packed
  const Tiling tiling_;
  ForwardScratch<kCompute> scratch_;
  char* const own_tile_;  // packed by this block alone
  RowPrefetch prefetch_[3] = {};
  int32_t keep_shift_ = 0;
  bool finite_ = true;  // of the packed values
  bool fixed_base_ = kFixedBase<kCompute>;
  // Of the chunks of a run, whether not every row sees every key, and then what each row sees.
  static constexpr int32_t kMaxSubtiles = kFixedBase<kCompute> ? 8 : 1;
  bool masked_[kMaxSubtiles];
  Interval seen_[kMaxSubtiles][kMainloopRows];
  // Of kMicroTileRows rows of a tile: columns, and keys in units.
  struct RowColumns {
    Interval columns, k;
  };
  RowColumns row_columns_[kDirectRows / kMicroKernelRows + 1];
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
