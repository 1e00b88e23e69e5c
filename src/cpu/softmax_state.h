// Online softmax of a Q block (Dao 2023, algorithm 1): the state of each row between KV tiles, and
// the step that turns a tile of scores into P. All ways to compute Q K^T and P V share it.
#pragma once

#include "cpu/dropout.h"
#include "cpu/mask.h"
#include "cpu/q_block.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// A tile of scores: rows [row, end_row) of a Q block against some keys of a KV tile. Column c
// stands for key keys.begin + c.
template <Compute kCompute>
struct ScoreTile {
  // The columns that the rows of a micro-tile need.
  struct RowColumns {
    Interval columns;  // columns that are computed
    Interval k;        // P V reads these words of P: those that are not all 0
  };

  int32_t row, end_row;
  int32_t skip;      // keys of the KV tile before keys.begin
  Interval keys;     // keys whose scores are held at once
  Interval active;   // keys of `keys` whose mask blocks are on for some row
  Interval visible;  // keys of `active` that some row sees
  Interval columns;  // `visible` as columns, rounded out to kColumnStep
  bool full;         // every row sees every column
  RowColumns row_columns[kDirectRows / kMicroKernelRows + 1];

  FLASHATTN_INLINE int32_t rows() const { return end_row - row; }
  FLASHATTN_INLINE const RowColumns& at(int32_t tile_row) const {
    return row_columns[tile_row / kMicroTileRows<kCompute>];
  }
  // The columns that Q K^T writes for a row of the tile.
  FLASHATTN_INLINE Interval scored_columns(int32_t tile_row) const {
    constexpr int32_t kU = kWordElements<kCompute>;
    const Interval k = at(tile_row).k;
    return {k.begin * kU / kWidth * kWidth, round_up(k.end * kU, kWidth)};
  }
};

// The state of the rows of a Q block, which lies in ForwardScratch: m, l, rest and O.
template <Compute kCompute>
class SoftmaxState {
 public:
  using Tile = ScoreTile<kCompute>;

  FLASHATTN_INLINE SoftmaxState(const QBlock& block, ForwardScratch<kCompute>& scratch)
      : block_(block), scratch_(scratch) {}

  // Rows keep the softmax base of the first keys that they see, instead of a running maximum.
  bool fixed_base = kFixedBase<kCompute>;
  // The rows to read next, which are prefetched between rows of scores.
  RowPrefetch prefetch[3] = {};

  void reset() {
    const auto rows = static_cast<size_t>(block_.rows);
    __builtin_memset(scratch_.o, 0, sizeof(float) * rows * static_cast<size_t>(scratch_.v_columns));
    fill(scratch_.m, 0, block_.rows, -kInfinity);
    for (float* sums : {scratch_.l, scratch_.rest}) fill(sums, 0, block_.rows, 0.0f);
  }

  // Turns the products Q K^T of a tile into P, adds to the row sums, and brings O to the scale of
  // the new maxima.
  void update(const Tile& tile) {
    for (int32_t r = tile.row, end; r < tile.end_row; r = end) {
      end = tile.end_row;
      if (block_.problem.dropout > 0) {
        const HeadRows head_rows = block_.head_rows_at(r, tile.end_row);
        draw_dropout(head_rows, r - tile.row, tile);
        end = r + head_rows.queries.end - head_rows.queries.begin;
      }
      update_rows({r, end}, tile);
    }
  }

  // O += P V of some rows where V holds infinities or NaN. o: O of the first row; tile_row: the
  // number of that row in the tile.
  void add_pv_nonzero_rows(const Tile& tile, float* o, int32_t tile_row, int32_t rows,
                           const TokenRows& values, int32_t dtype, Interval visible) const {
    for (int32_t r = tile_row; r < tile_row + rows; ++r, o += scratch_.v_columns) {
      const Interval columns = tile.at(r).columns;
      add_pv_nonzero<kCompute>(
          values, dtype, block_.problem.dim_v,
          scratch_.p + int64_t{r} * scratch_.score_columns / kWordElements<kCompute>,
          tile.keys.begin,
          intersect({tile.keys.begin + columns.begin, tile.keys.begin + columns.end}, visible), o);
    }
  }

  // Writes o and lse, or the partial result of a split. Returns whether every row is done: a fixed
  // base may not serve a row, which is then to be redone with fixed_base = false.
  bool finish() {
    bool all = true;
    const Problem& problem = block_.problem;
    const ForwardJob& job = block_.job;
    const int32_t count = block_.queries.end - block_.queries.begin;
    const RowLayout layout = row_layout(problem, job.args->shape);
    const float kept = dropout_keep_scale(problem.dropout_threshold());
    for (int32_t r = 0; r < block_.rows; ++r) {
      const int32_t head = block_.first_head + r / count, i = block_.queries.begin + r % count;
      const float m = scratch_.m[r];
      float l = scratch_.l[r] + scratch_.rest[r];
      const float* o = scratch_.o + static_cast<int64_t>(r) * scratch_.v_columns;
      const ScoreUnit unit = block_.mods(head).unit();
      if constexpr (kFixedBase<kCompute>) {
        if (fixed_base) {
          scratch_.redo[r] = !all_finite(o, scratch_.v_columns) || !base_serves(m, unit.log2, &l);
          all &= !scratch_.redo[r];
        }
        if (scratch_.redo[r] == fixed_base) continue;
      }
      if (block_.splits > 1) {
        const int64_t row = job.partial_row(block_.split, block_.b, head, i);
        store_row(reinterpret_cast<char*>(job.partial_o + row * problem.dim_v), FLASHATTN_DTYPE_F32,
                  o, normalize_row(m, l, unit.nats, -kInfinity).factor * kept, problem.dim_v);
        job.partial_m[row] = m;
        job.partial_l[row] = l;
        continue;
      }
      const RowResult end = normalize_row(m, l, unit.nats, sink_of(problem, block_.in, head));
      const TokenRows out = rows_of(job.args->o, dtype_size(problem.dtype_o), block_.b, head,
                                    block_.sequence.offset_q);
      prefetch_row(out, i, block_.queries, problem.dim_v * dtype_size(problem.dtype_o));
      const float factor = end.factor * kept;
      const flashattn_tensor &scale = job.args->scale_o, &amax = job.args->amax_o;
      if (amax.data) {
        raise(head_entry(amax, block_.b, head),
              max_magnitude(o, problem.dim_v) * __builtin_fabsf(factor));
      }
      store_row(out.row(i), problem.dtype_o, o,
                scale.data ? factor * *head_entry(scale, block_.b, head) : factor, problem.dim_v);
      const int64_t at =
          block_.b * layout.batch_stride + head * layout.head_stride + block_.sequence.offset_q;
      if (job.args->lse) job.args->lse[at + i] = rounded_lse(end.lse);
    }
    return all;
  }

 private:
  FLASHATTN_INLINE float* scores_of(int32_t tile_row) const {
    return scratch_.s + int64_t{tile_row} * scratch_.score_columns;
  }

  // Draws the keep bytes of rows of one head: row tile_row + keep_shift_ of the buffer holds the
  // first.
  void draw_dropout(const HeadRows& head_rows, int32_t tile_row, const Tile& tile) {
    const int32_t begin = tile.columns.begin;
    keep_shift_ = head_rows.queries.begin % 16;
    dropout_rows(
        block_.problem, block_.job.rng_seed, block_.job.rng_offset, block_.b, head_rows.head,
        head_rows.queries, tile.keys.begin + begin, tile.columns.end - begin,
        scratch_.keep + begin + int64_t{tile_row} * scratch_.score_columns, scratch_.score_columns);
  }

  // update() for rows whose keep bytes are in the buffer, kWidth rows at a time, one per lane.
  void update_rows(Interval rows, const Tile& tile) {
    for (int32_t row = rows.begin; row < rows.end; row += kWidth) {
      const int32_t count = rows.end - row < kWidth ? rows.end - row : kWidth;
      const int32_t tile_row = row - tile.row;
      float factor[kWidth], shift[kWidth], shrink[kWidth];
      store(factor, splat(1.0f));
      Floats each[kWidth];  // the maximum of each lane of a row, if it is known
      bool known = true;
      for (int32_t n = 0; n < count;) {
        const HeadRows head_rows = block_.head_rows_at(row + n, row + count);
        const ScoreMod mods = block_.mods(head_rows.head);
        for (int32_t i = head_rows.queries.begin; i < head_rows.queries.end; ++i, ++n) {
          each[n] = finish_scores(mods, i, tile_row + n, tile);
          factor[n] = mods.unit().log2;
        }
        known &= mods.modified() && tile.full;  // heads differ in their slopes
      }
      for (int32_t n = count; n < kWidth; ++n) each[n] = splat(-kInfinity);
      float *m = scratch_.m + row, *l = scratch_.l + row, *rest = scratch_.rest + row;
      const Ints here = iota() < splat(static_cast<float>(count));
      const Floats before = load(m);
      const Ints first = here & (before == -kInfinity);
      Floats top = before, sums;
      // Rows whose m becomes their maximum. A row whose sum overflows a fixed base joins them, and
      // P is computed again.
      Ints wants_max = fixed_base ? first : here;
      for (bool redo = true; redo;) {
        if (any(wants_max)) {
          if (!known) find_row_max(tile_row, count, tile, each);
          const Floats highest = max_each(each);
          const Floats higher = select((highest > before) | (highest != highest), highest, before);
          top = select(wants_max, higher, top);
        }
        store(shift, exponent_shift(top, load(factor), fixed_base));
        sums = compute_p_rows(tile_row, count, block_.rows - row, tile, factor, shift);
        const Ints fits = sums <= kMaxRowSum;
        redo = fixed_base && any(here & ~fits & ~wants_max);
        wants_max |= ~fits;
      }
      const Floats scale = select((top == before) | first, splat(1.0f),
                                  rescale_factor(before, top, load(factor), fixed_base));
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

  // Turns the products of query i into scores, -inf for keys that it does not see. Returns the
  // maximum of each lane if scores are modified, taken before keys are masked.
  FLASHATTN_INLINE Floats finish_scores(const ScoreMod& mods, int32_t i, int32_t tile_row,
                                        const Tile& tile) {
    Floats top = splat(-kInfinity);
    const Interval columns = tile.at(tile_row).columns;
    if (columns.begin >= columns.end) return top;
    float* s = scores_of(tile_row);
    if (mods.modified()) {
      const auto [begin, end] = tile.scored_columns(tile_row);
      top = score_mod_row(mods, i, tile.keys.begin, block_.sequence.len.kv, begin, end, s, nullptr);
    }
    if (!tile.full) mask_scores(mods, i, columns, tile, s);
    return top;
  }

  FLASHATTN_INLINE void mask_scores(const ScoreMod& mods, int32_t i, Interval columns,
                                    const Tile& tile, float* s) const {
    const Lengths len = block_.sequence.len;
    const int32_t first = tile.keys.begin;
    const bool tree = block_.meets_tree(tile.active);
    const Interval visible =
        tree ? tree_span(block_.mask, {i, i + 1}, len).any : visible_keys(block_.mask, i, len);
    mask_row(mods, mods.blocks != nullptr, i, first, intersect(visible, tile.active), columns, s);
    if (!tree) return;
    mask_tree(block_.tree_row(i), tree_begin(block_.mask, len),
              keys_before_tree(block_.mask, i, len),
              intersect(tile.active, {first + columns.begin, first + columns.end}), first, s);
  }

  // Finds the maximum of each lane of up to kWidth rows.
  FLASHATTN_INLINE void find_row_max(int32_t tile_row, int32_t count, const Tile& tile,
                                     Floats* each) const {
    for (int32_t n = 0; n < count;) {
      n += for_row_pair(tile_row + n, count - n, [&](auto rows) {
        max_of_rows<decltype(rows)::value>(scores_of(tile_row + n), scratch_.score_columns,
                                           tile.at(tile_row + n).columns, each + n);
      });
    }
  }

  // Writes P of up to kWidth rows and returns their sums. left: rows of the block from these on.
  FLASHATTN_INLINE Floats compute_p_rows(int32_t tile_row, int32_t count, int32_t left,
                                         const Tile& tile, const float* factor,
                                         const float* shift) {
    Floats each[kWidth] = {};
    for (int32_t n = 0; n < count;) {
      n += for_row_pair(tile_row + n, count - n, [&](auto rows) {
        constexpr int32_t kRows = decltype(rows)::value;
        for (RowPrefetch& next : prefetch) next.prefetch((left - n + kRows - 1) / kRows);
        const int32_t r = tile_row + n;
        const int64_t stride = scratch_.score_columns;
        const auto write = [&](auto shifted) FLASHATTN_INLINED {
          compute_p<kCompute, kRows, decltype(shifted)::value>(
              scores_of(r), stride, scratch_.p + r * stride / 2, stride / 2,
              block_.problem.dropout > 0 ? scratch_.keep + (r + keep_shift_) * stride : nullptr,
              tile.at(r).columns, factor + n, shift + n, each + n);
        };
        if constexpr (kFixedBase<kCompute>) {
          if (fixed_base) return write(std::true_type{});
        }
        write(std::false_type{});
      });
    }
    return sum_each(each);
  }

  const QBlock& block_;
  ForwardScratch<kCompute>& scratch_;
  int32_t keep_shift_ = 0;
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
