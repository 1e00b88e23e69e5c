// The backward pass (Dao 2023, algorithm 2) of one KV tile of one KV head: dk and dv stay in
// scratch memory while all Q tiles that see the KV tile pass by. dq is summed in fp32 in the
// workspace, KV tile after KV tile. The order of that sum is fixed by a semaphore per Q tile, so
// that the bits never depend on the number of threads: a task waits until all earlier KV tiles have
// added. Tasks begin in the order of their numbers, those of one head KV tile by KV tile, so that
// the task that is waited for is always running.
#pragma once

#include "cpu/backward_base.h"
#include "cpu/kv_tile.h"
#include "cpu/backward_scratch.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Waits until another thread has set *semaphore to `expected`.
FLASHATTN_INLINE void wait_for_semaphore(const int32_t* semaphore, int32_t expected) {
  for (int32_t waited = 0; __atomic_load_n(semaphore, __ATOMIC_ACQUIRE) != expected;) {
    os::back_off(&waited);
  }
}

FLASHATTN_INLINE void clear(float* x, int64_t count) {
  __builtin_memset(x, 0, sizeof(float) * static_cast<size_t>(count));
}

// The gradients of one KV tile of one KV head, over all Q tiles that see it.
template <Compute kCompute>
class BackwardTile : private KvTile {
 public:
  FLASHATTN_INLINE BackwardTile(const BackwardJob& job, int32_t b, int32_t kv_head,
                                int32_t key_tile, char* scratch)
      : KvTile(job, b, kv_head, key_tile), scratch_(problem_, tile_q_, tile_kv_, scratch) {}

  // Writes dk and dv of the KV tile, and adds to dq; the last KV tile of a row writes dq. next: the
  // tile that this thread will probably compute next, or NULL.
  void gradients(const BackwardTile* next) {
    if (keys_.begin >= keys_.end) return;
    pack_keys();
    const int32_t keys = kKeysAsColumns<kCompute> ? scratch_.tile_kv : keys_.end - keys_.begin;
    clear(scratch_.dk, int64_t{keys} * scratch_.qk_columns);
    clear(scratch_.dv, int64_t{keys} * scratch_.v_columns);
    const int32_t first_head = kv_head_ * problem_.q_heads_per_kv_head();
    const int32_t end_head = first_head + problem_.q_heads_per_kv_head();
    for (int32_t head = first_head; head < end_head; ++head) {
      for_each_query_tile([&](Interval queries, int32_t tile) {
        if (tile > q_tiles_.begin) {
          plan_prefetch(head, queries_of(tile - 1), {0, 0}, prefetch_);
        } else if (head + 1 < end_head) {
          plan_prefetch(head + 1, queries_of(q_tiles_.end - 1), {0, 0}, prefetch_);
        } else if (next) {
          next->plan_first_prefetch(prefetch_);
        }
        query_tile(head, queries, tile);
      });
    }
    const int32_t size = dtype_size(problem_.dtype_grad);
    const TokenRows dk = rows_of(job_.args->dk, size, b_, kv_head_, sequence_.offset_kv);
    const TokenRows dv = rows_of(job_.args->dv, size, b_, kv_head_, sequence_.offset_kv);
    store_gradient(dk, scratch_.dk, scratch_.qk_columns, problem_.scale, problem_.dim_qk);
    store_gradient(dv, scratch_.dv, scratch_.v_columns, kept_, problem_.dim_v);
  }

  // Adds to dbias alone, from one query head.
  void bias_gradient(int32_t head) {
    if (keys_.begin >= keys_.end) return;
    pack_keys();
    for_each_query_tile([&](Interval queries, int32_t tile) {
      pack_queries(head, queries);
      for_each_active_columns(head, queries, [&](Interval columns) {
        score_gradients(head, queries, tile, columns, true);
      });
    });
  }

  // Adds the scores of this KV tile to bases[r], r counting queries of a head, where a base is
  // wanted.
  void add_to_bases(int32_t head, Interval queries, RowBase* bases) {
    const ScoreMod mods = score_mod(problem_, in_, b_, head, sequence_.len);
    bool packed = false;
    for_each_active_columns(head, queries, [&](Interval columns) {
      if (!packed) {
        pack_b_transposed<kCompute>(k(), keys_, problem_.dim_qk, problem_.dtype_kv, scratch_.kt);
        pack_both(q(head), queries, problem_.dim_qk, problem_.dtype, scratch_.q_a,
                  scratch_.qk_words, scratch_.q_k);
      }
      packed = true;
      multiply_scores(queries, columns);
      for (int32_t r = 0; r < queries.end - queries.begin; ++r) {
        if (!bases[r].wanted) continue;
        const Interval own = row_columns_[r / kMicroTileRows<kCompute>];
        finish_scores(mods, queries.begin + r, r, own, nullptr);
        bases[r].add(scratch_.s + int64_t{r} * scratch_.tile_kv, own, mods.unit().log2);
      }
    });
  }

 private:
  void pack_keys() {
    pack_b_transposed<kCompute>(k(), keys_, problem_.dim_qk, problem_.dtype_kv, scratch_.kt);
    pack_b_transposed<kCompute>(v(), keys_, problem_.dim_v, problem_.dtype_kv, scratch_.vt);
    pack_b<kCompute>(k(), keys_, problem_.dim_qk, problem_.dtype_kv, scratch_.k, scratch_.kv_panel);
  }

  // Calls body(columns) for each range of columns that some query needs. Where mask blocks differ
  // between the queries of a Q tile, all its rows compute the range.
  template <class Body>
  FLASHATTN_INLINE void for_each_active_columns(int32_t head, Interval queries, Body body) {
    const ScoreMod mods = score_mod(problem_, in_, b_, head, sequence_.len);
    const KeySpan span = key_span(mask_, queries, sequence_.len);
    for_each_active_range(mods, queries, keys_, [&](Interval active, bool full) {
      const Interval seen = intersect(span.any, active);
      if (seen.begin >= seen.end) return;
      active_ = active;
      const Interval columns = round_out({seen.begin - keys_.begin, seen.end - keys_.begin});
      full_ = full && classify(span, active) == TileKind::kFull &&
              keys_.begin + columns.begin == active.begin &&
              keys_.begin + columns.end == active.end;
      set_row_columns(queries, active, columns);
      body(columns);
    });
  }

  // Sets the columns that the rows of each micro-tile need.
  void set_row_columns(Interval queries, Interval active, Interval columns) {
    constexpr int32_t kStep = kMicroTileRows<kCompute>;
    for (int32_t i = queries.begin, n = 0; i < queries.end; i += kStep, ++n) {
      const Interval rows{i, queries.end - i < kStep ? queries.end : i + kStep};
      const Interval seen = intersect(key_span(mask_, rows, sequence_.len).any, active);
      row_columns_[n] = full_ ? columns
                        : seen.begin < seen.end
                            ? round_out({seen.begin - keys_.begin, seen.end - keys_.begin})
                            : Interval{columns.begin, columns.begin};
    }
  }

  void query_tile(int32_t head, Interval queries, int32_t tile) {
    // The KV tiles that add to this Q tile.
    const Interval any = key_span(mask_, queries, sequence_.len).any;
    const int32_t first = any.begin / scratch_.tile_kv;
    const int32_t last = (any.end - 1) / scratch_.tile_kv;
    const int64_t index = job_.q_tile_index(sequence_, b_, head, tile);
    const int32_t rows = queries.end - queries.begin;
    float* dq = job_.dq + index * scratch_.tile_q * scratch_.qk_columns;
    bool empty = kv_tile_ == first, packed = false, waited = false;
    const bool dbias = (problem_.features & FLASHATTN_FEATURE_DBIAS) && !job_.dbias_is_reduced;
    for_each_active_columns(head, queries, [&](Interval columns) {
      if (!packed) pack_queries(head, queries);
      score_gradients(head, queries, tile, columns, dbias);
      accumulate_keys(queries, columns);
      packed = true;
      if (!waited) wait_for_semaphore(job_.dq_semaphore + index, kv_tile_ - first);
      waited = true;
      add_to_dq(rows, columns, dq, empty);
      empty = false;
    });
    if (!waited) wait_for_semaphore(job_.dq_semaphore + index, kv_tile_ - first);
    if (empty) clear(dq, int64_t{rows} * scratch_.qk_columns);
    if (kv_tile_ == last) {
      const TokenRows out =
          rows_of(job_.args->dq, dtype_size(problem_.dtype_grad), b_, head, sequence_.offset_q);
      for (int32_t r = 0; r < rows; ++r) {
        store_row(out.row(queries.begin + r), problem_.dtype_grad,
                  dq + static_cast<int64_t>(r) * scratch_.qk_columns, problem_.scale,
                  problem_.dim_qk);
      }
    }
    __atomic_store_n(job_.dq_semaphore + index, kv_tile_ - first + 1, __ATOMIC_RELEASE);
  }

  // dq (+)= dS K.
  void add_to_dq(int32_t rows, Interval columns, float* dq, bool first) {
    constexpr int kU = kWordElements<kCompute>;
    const int32_t step = full_ ? rows : kMicroTileRows<kCompute>;
    for (int32_t r = 0; r < rows; r += step) {
      const Interval own = full_ ? columns : row_columns_[r / kMicroTileRows<kCompute>];
      const int32_t begin = own.begin / kU, end = (last_column(own) + kU - 1) / kU;
      const int32_t count = rows - r < step ? rows - r : step;
      float* sum = dq + int64_t{r} * scratch_.qk_columns;
      if (end <= begin) {
        if (first) clear(sum, int64_t{count} * scratch_.qk_columns);
        continue;
      }
      gemm<kCompute>(
          count, {0, scratch_.qk_columns}, end - begin,
          {scratch_.ds + (int64_t{r} * scratch_.tile_kv) / kU + begin, scratch_.tile_kv / kU, 1},
          {scratch_.k + int64_t{begin} * kPanelOf<kCompute>, scratch_.kv_panel},
          {sum, scratch_.qk_columns}, !first);
    }
  }

  // Packs Q and dO twice: with the head dimension as k, and with the queries as k.
  void pack_queries(int32_t head, Interval queries) {
    pack_both(q(head), queries, problem_.dim_qk, problem_.dtype, scratch_.q_a, scratch_.qk_words,
              scratch_.q_k);
    pack_both(dout(head), queries, problem_.dim_v, problem_.dtype_o, scratch_.do_a,
              scratch_.v_words, scratch_.do_k);
  }

  void pack_both(const TokenRows& x, Interval queries, int32_t dim, int32_t dtype, uint32_t* a,
                 int32_t a_words, uint32_t* k) {
    // In fp32 the second operand also serves as the first.
    if (kCompute != Compute::kF32) pack_a<kCompute>(x, queries, dim, dtype, a, a_words);
    if constexpr (kKeysAsColumns<kCompute>) {
      pack_a_transposed<kCompute>(x, queries, dim, dtype, k,
                                  scratch_.tile_q / kWordElements<kCompute>);
    } else {
      pack_b<kCompute>(x, queries, dim, dtype, k, scratch_.q_panel);
    }
  }

  void multiply_scores(Interval queries, Interval columns) {
    gemm<kCompute>(queries.end - queries.begin, columns,
                   static_cast<int32_t>(scratch_.qk_panel / kPanelOf<kCompute>),
                   scratch_.left(scratch_.q_a, scratch_.qk_words), {scratch_.kt, scratch_.qk_panel},
                   {scratch_.s, scratch_.tile_kv}, false,
                   [&](int32_t r) { return row_columns_[r / kMicroTileRows<kCompute>]; });
  }

  // Turns the products of query i into scores, -inf for keys that it does not see.
  FLASHATTN_INLINE void finish_scores(const ScoreMod& mods, int32_t i, int32_t row, Interval own,
                                      float* derivative) {
    float* s = scratch_.s + int64_t{row} * scratch_.tile_kv;
    if (mods.modified()) {
      score_mod_row(mods, i, keys_.begin, sequence_.len.kv, own.begin, own.end, s, derivative);
    }
    if (full_) return;
    mask_row(mods, mods.blocks != nullptr, i, keys_.begin,
             intersect(visible_keys(mask_, i, sequence_.len), active_), own, s);
  }

  // Computes scores and dP of a tile, then P (after dropout) and dS as operands of the next
  // products. dbias: also adds dS to dbias.
  void score_gradients(int32_t head, Interval queries, int32_t tile, Interval columns, bool dbias) {
    const int32_t rows = queries.end - queries.begin;
    multiply_scores(queries, columns);
    gemm<kCompute>(rows, columns, static_cast<int32_t>(scratch_.v_panel / kPanelOf<kCompute>),
                   scratch_.left(scratch_.do_a, scratch_.v_words), {scratch_.vt, scratch_.v_panel},
                   {scratch_.dp, scratch_.tile_kv}, false,
                   [&](int32_t r) { return row_columns_[r / kMicroTileRows<kCompute>]; });

    const ScoreMod mods = score_mod(problem_, in_, b_, head, sequence_.len);
    if (problem_.dropout > 0) {
      dropout_rows(problem_, job_.rng_seed, job_.rng_offset, b_, head, queries,
                   keys_.begin + columns.begin, columns.end - columns.begin,
                   scratch_.keep + columns.begin, scratch_.tile_kv);
    }
    const int64_t first_row = job_.q_tile_index(sequence_, b_, head, tile) * scratch_.tile_q;
    for (int32_t r = 0; r < rows;) {
      r += for_row_pair(r, rows - r, [&](auto count) {
        constexpr int32_t kRows = decltype(count)::value;
        for (RowPrefetch& prefetch : prefetch_) prefetch.prefetch((rows - r + kRows - 1) / kRows);
        row_gradients<kRows>(mods, head, queries.begin + r, r, columns, first_row + r, dbias);
      });
    }
  }

  // The part of score_gradients() behind the products, for kRows rows: query i + r is row `row` + r
  // of the tile and row job_row + r of the arrays of the job.
  template <int kRows>
  FLASHATTN_INLINE void row_gradients(const ScoreMod& mods, int32_t head, int32_t i, int32_t row,
                                      Interval columns, int64_t job_row, bool dbias) {
    const float *lse = job_.lse_log2 + job_row, *delta = job_.delta + job_row;
    const int64_t stride = scratch_.tile_kv, at = row * stride;
    float *s = scratch_.s + at, *dp = scratch_.dp + at;
    const bool has_softcap = problem_.softcap != 0, dropout = problem_.dropout > 0;
    const Interval own = row_columns_[row / kMicroTileRows<kCompute>];
    float factor[kRows];
    for (int32_t r = 0; r < kRows; ++r) {
      finish_scores(mods, i + r, row + r, own,
                    has_softcap ? scratch_.derivative + r * stride : nullptr);
      factor[r] = mods.unit().log2;
      if (job_.softmax_base[job_row + r] == kInfinity) continue;
      to_exponents(s + r * stride, own, job_.softmax_base[job_row + r], factor[r]);
      factor[r] = 1;
    }
    // P is 0 in columns that these rows do not need.
    const Floats none[2 * kRows] = {};
    for (int32_t c = columns.begin; c < own.begin; c += 2 * kWidth) {
      store_p_ds<kRows>(row, c, none, none);
    }
    for (int32_t c = own.end; c < columns.end; c += 2 * kWidth) {
      store_p_ds<kRows>(row, c, none, none);
    }
    const auto each = [&](auto more) {
      constexpr bool kMore = decltype(more)::value;
      for (int32_t first = own.begin; first < own.end; first += 2 * kWidth) {
        Floats p[2 * kRows], g[2 * kRows];
#pragma GCC unroll 4
        for (int n = 0; n < 2 * kRows; ++n) {
          const int64_t c = n / 2 * stride + first + n % 2 * kWidth;
          p[n] = load(s + c) * splat(factor[n / 2]) - splat(lse[n / 2]);
          g[n] = load(dp + c);
        }
        exp2_each<kExp2For<kCompute>>(p);
#pragma GCC unroll 4
        for (int n = 0; n < 2 * kRows; ++n) {
          const int32_t r = n / 2, column = first + n % 2 * kWidth;
          const uint8_t* keep = scratch_.keep + at + r * stride + column;
          if (kMore && dropout) g[n] = apply_keep(g[n], keep) * splat(kept_);
          // The gradient of a masked key may be infinite, which times 0 would be NaN.
          g[n] = select(p[n] == 0.0f, Floats{}, p[n] * (g[n] - splat(delta[r])));
          if (kMore && dropout) p[n] = apply_keep(p[n], keep);
          if (kMore && dbias) add_to_dbias(head, i + r, column, g[n]);
          if (kMore && has_softcap) g[n] *= load(scratch_.derivative + r * stride + column);
        }
        store_p_ds<kRows>(row, first, p, g);
      }
    };
    if (dropout || dbias || has_softcap) {
      each(std::true_type{});
    } else {
      each(std::false_type{});
    }
  }

  // Stores P and dS of 2 * kWidth columns: in fp32 in the place of scores and dP, else as pairs of
  // bf16.
  template <int kRows>
  FLASHATTN_INLINE void store_p_ds(int32_t row, int32_t column, const Floats (&p)[2 * kRows],
                                   const Floats (&g)[2 * kRows]) {
    const int64_t stride = scratch_.tile_kv;
    if constexpr (kCompute == Compute::kF32) {
      const int64_t at = row * stride + column;
      for (int n = 0; n < 2 * kRows; ++n) {
        store(scratch_.s + at + n / 2 * stride + n % 2 * kWidth, p[n]);
        store(scratch_.dp + at + n / 2 * stride + n % 2 * kWidth, g[n]);
      }
    } else {
      uint32_t* ds = scratch_.ds + (row * stride + column) / 2;
      for (int r = 0; r < kRows; ++r) store_bf16_row(ds + r * stride / 2, g[2 * r], g[2 * r + 1]);
      for (int n = 0; n < 2; ++n) {
        constexpr int kColumns = kPanelOf<kCompute>;
        const int32_t c = column + n * kWidth;
        const int64_t at =
            c / kColumns * scratch_.pair_panel + row / 2 * scratch_.pair_row + c % kColumns;
        // An odd last row has no partner.
        const Floats below_p = kRows == 2 ? p[(2 + n) % (2 * kRows)] : Floats{};
        const Floats below_g = kRows == 2 ? g[(2 + n) % (2 * kRows)] : Floats{};
        store_words(scratch_.p_t + at, pair_bf16(p[n], below_p));
        store_words(scratch_.ds_t + at, pair_bf16(g[n], below_g));
      }
    }
  }

  FLASHATTN_INLINE void add_to_dbias(int32_t head, int32_t i, int32_t column, Floats g) {
    float* out = job_.args->dbias + b_ * job_.args->dbias_stride_batch +
                 head * job_.args->dbias_stride_head + i * job_.args->dbias_stride_row +
                 keys_.begin + column;
    const int32_t left = keys_.end - keys_.begin - column;
    char* at = reinterpret_cast<char*>(out);
    store_first<FLASHATTN_DTYPE_F32>(at, load_first<FLASHATTN_DTYPE_F32>(at, left) + g, left);
  }

  // dv += P^T dO, dk += dS^T Q.
  void accumulate_keys(Interval queries, Interval columns) {
    accumulate(queries, scratch_.do_k, scratch_.p_t, columns, scratch_.dv, scratch_.v_columns);
    accumulate(queries, scratch_.q_k, scratch_.ds_t, columns, scratch_.dk, scratch_.qk_columns);
  }

  // sum += weights^T x, weights being P or dS. packed: x with the queries as k.
  void accumulate(Interval queries, const uint32_t* packed, const uint32_t* weights,
                  Interval columns, float* sum, int32_t sum_columns) {
    constexpr int kU = kWordElements<kCompute>;
    const int32_t words = (queries.end - queries.begin + kU - 1) / kU;
    const int32_t end = last_column(columns);
    const int32_t step = full_ ? end - columns.begin : kMicroTileRows<kCompute>;
    for (int32_t c = columns.begin; c < end; c += step) {
      const int32_t next = end - c < step ? end : c + step;
      Interval k{0, words};
      if (!full_) {
        // The queries that see one of these keys.
        Interval seen = intersect(
            query_span(mask_, {keys_.begin + c, keys_.begin + next}, sequence_.len), queries);
        if (seen.begin >= seen.end) continue;
        seen = {seen.begin - queries.begin, seen.end - queries.begin};
        // AMX reads whole micro-tiles of queries.
        if (kKeysAsColumns<kCompute>) seen = {seen.begin / step * step, round_up(seen.end, step)};
        k = intersect(k, {seen.begin / kU, (seen.end + kU - 1) / kU});
      }
      if constexpr (kKeysAsColumns<kCompute>) {
        gemm<kCompute>(sum_columns, round_out({c, next}), k.end - k.begin,
                       {packed + k.begin, scratch_.tile_q / kU, 1},
                       {weights + k.begin * scratch_.pair_row, scratch_.pair_panel},
                       {sum, scratch_.tile_kv}, true);
      } else {
        gemm<kCompute>(next - c, {0, sum_columns}, k.end - k.begin,
                       {weights + k.begin * scratch_.pair_row + c, 1, scratch_.pair_row},
                       {packed + int64_t{k.begin} * kPanelOf<kCompute>, scratch_.q_panel},
                       {sum + int64_t{c} * sum_columns, sum_columns}, true);
      }
    }
  }

  void store_gradient(const TokenRows& out, const float* sum, int32_t columns, float factor,
                      int32_t dim) {
    if constexpr (kKeysAsColumns<kCompute>) {
      store_columns(out, keys_, sum, scratch_.tile_kv, factor, dim);
    } else {
      for (int32_t j = keys_.begin; j < keys_.end; ++j, sum += columns) {
        store_row(out.row(j), problem_.dtype_grad, sum, factor, dim);
      }
    }
  }

  // The end of those columns that hold keys.
  FLASHATTN_INLINE int32_t last_column(Interval columns) const {
    const int32_t count = keys_.end - keys_.begin;
    return columns.end < count ? columns.end : count;
  }

  const BackwardScratch<kCompute> scratch_;
  // The keys of the current columns whose mask blocks are on, and whether every query sees all of
  // them.
  Interval active_{0, 0};
  RowPrefetch prefetch_[4] = {};
  bool full_ = false;
  Interval row_columns_[kMaxBackwardRows / kMicroKernelRows + 1];  // per micro-tile of rows
  const float kept_ = dropout_keep_scale(problem_.dropout_threshold());
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
