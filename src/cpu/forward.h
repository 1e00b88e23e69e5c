// The forward pass of a Q block (Dao 2023, algorithm 1): KV tile after KV tile, and of each tile
// all rows, tile_q at a time. Kv says how Q K^T and P V are computed: PackedKv, DirectKv, AmxKv.
#pragma once

#include "cpu/forward_amx.h"
#include "cpu/forward_direct.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute, template <Compute> class Kv>
class ForwardBlock {
 public:
  FLASHATTN_INLINE ForwardBlock(const QBlock& block, char* scratch)
      : block_(block),
        scratch_(block.problem, block.tiling(), scratch),
        softmax_(block, scratch_),
        kv_(block, scratch_, softmax_) {
    if (block.direct) *scratch_.kept = {};
  }

  // next: the Q block that this thread will probably compute next, or NULL.
  void run(const QBlock* next) {
    if (block_.rows <= 0 || block_.split >= block_.splits) return;
    compute(next);
    if (softmax_.finish()) return;
    softmax_.fixed_base = false;
    compute(nullptr);
    softmax_.finish();
  }

 private:
  void compute(const QBlock* next) {
    pack_queries();
    softmax_.reset();
    const int32_t tile_kv = scratch_.tile_kv;
    int32_t first = block_.keys.begin / tile_kv * tile_kv;
    for (int32_t after; first < block_.keys.end; first = after) {
      after = first + tile_kv;
      if (after < block_.keys.end && !block_.direct) {
        block_.plan_prefetch({0, 0}, after, softmax_.prefetch);
      }
      if (after >= block_.keys.end && next) {
        next->plan_prefetch(next->queries, next->keys.begin, softmax_.prefetch);
        // If `next` reads the KV tile that this block reads now, K and V are in the caches.
        const bool same = next->b == block_.b && next->kv_head == block_.kv_head;
        if (same && next->keys.begin >= first) softmax_.prefetch[1] = softmax_.prefetch[2] = {};
      }
      add_tile(intersect({first, after}, {block_.split_begin, block_.keys.end}));
    }
  }

  void pack_queries() {
    const Problem& problem = block_.problem;
    const int32_t count = block_.queries.end - block_.queries.begin;
    for (int32_t row = 0; row < block_.rows; row += count) {
      pack_a<kCompute>(block_.q(block_.first_head + row / count), block_.queries, problem.dim_qk,
                       problem.dtype, scratch_.q + static_cast<int64_t>(row) * scratch_.q_words,
                       scratch_.q_words);
    }
    kv_.prepare_queries();
  }

  // Adds a KV tile to all rows.
  void add_tile(Interval kv_tile) {
    kv_.begin_tile(kv_tile);
    // With a block mask a Q block has one head.
    const ScoreMod mods = block_.mods(block_.first_head);
    const int32_t tile_q = block_.tiling().tile_q, first_query = block_.queries.begin;
    for (int32_t row = 0; row < block_.rows;) {
      int32_t end_row = row + tile_q < block_.rows ? row + tile_q : block_.rows;
      const Interval same = same_block_rows(mods, first_query + row, tile_q, block_.sequence.len);
      if (mods.blocks && same.end - first_query < end_row) end_row = same.end - first_query;
      for_each_shown_range(block_.hidden_pages(), kv_tile, [&](Interval shown) {
        for_each_active_range(mods, same, shown, [&](Interval active, bool full) {
          add_active(row, end_row, kv_tile, active, full);
        });
      });
      row = end_row;
    }
  }

  // Adds the keys `active` of a KV tile, whose mask blocks are on for some of the rows [row,
  // end_row). full: for all of these rows.
  void add_active(int32_t row, int32_t end_row, Interval kv_tile, Interval active, bool full) {
    const int32_t size = scratch_.score_columns;
    for (int32_t at = active.begin; at < active.end;) {
      const int32_t into = (at - kv_tile.begin) % size;
      if (into == 0 && full) at += kv_.run_mainloop(row, end_row, {at, active.end}) * size;
      if (at >= active.end) return;
      ScoreTile<kCompute> tile;
      tile.row = row;
      tile.end_row = end_row;
      tile.skip = at - into - kv_tile.begin;
      tile.keys = intersect({at - into, at - into + size}, kv_tile);
      tile.active = intersect(tile.keys, {at, active.end});
      tile.full = full;
      add_scores(tile);
      at = tile.keys.end;
    }
  }

  void add_scores(ScoreTile<kCompute>& tile) {
    tile.visible = block_.visible_to(tile.row, tile.end_row, tile.active, &tile.full);
    if (tile.visible.begin >= tile.visible.end) return;
    const int32_t first = tile.keys.begin;
    tile.columns = round_out({tile.visible.begin - first, tile.visible.end - first});
    tile.full &= first + tile.columns.begin == tile.active.begin &&
                 first + tile.columns.end == tile.active.end;
    set_row_columns(tile);
    kv_.qk(tile);
    softmax_.update(tile);
    kv_.pv(tile);
  }

  // Sets the columns of the tile that the rows of each micro-tile need.
  void set_row_columns(ScoreTile<kCompute>& tile) const {
    constexpr int32_t kStep = kMicroTileRows<kCompute>, kU = kWordElements<kCompute>;
    const int32_t first = tile.keys.begin;
    const bool all = tile.full || Kv<kCompute>::kSameColumns;
    for (int32_t r = tile.row, n = 0; r < tile.end_row; r += kStep, ++n) {
      const int32_t end = tile.end_row - r < kStep ? tile.end_row : r + kStep;
      Interval visible =
          intersect({first + tile.columns.begin, first + tile.columns.end}, tile.keys);
      bool unused = true;
      if (!all) visible = block_.visible_to(r, end, tile.active, &unused);
      visible = {visible.begin - first, visible.end - first};
      if (visible.begin >= visible.end) visible = {0, 0};
      const Interval own = all ? tile.columns : round_out(visible);
      // AMX sums 16 words of P V before it adds to O. The sums begin at the same words whatever is
      // masked, so that a row's bits do not depend on other rows.
      tile.row_columns[n] = {own,
                             {(kFixedBase<kCompute> ? own.begin : visible.begin) / kU,
                              static_cast<int32_t>(ceil_div(visible.end, kU))}};
    }
  }

  const QBlock& block_;
  ForwardScratch<kCompute> scratch_;
  SoftmaxState<kCompute> softmax_;
  Kv<kCompute> kv_;
};

template <Compute kCompute>
using DirectFloats = DirectKv<kCompute>;
template <Compute kCompute>
using DirectBytes = DirectKv<kCompute, Compute::kBf16Pairs>;

// Computes one task that reads K and V where they lie.
template <Compute kCompute, template <Compute> class Kv>
void direct_task(const ForwardJob& job, int64_t task, char* scratch) {
  const ForwardWorkTile tile = job.work_tile(task);
  if (!is_direct(*job.problem, job.sequences[tile.b].len)) return;
  ForwardBlock<kCompute, Kv>(QBlock(job, tile, tile.kv_heads), scratch).run(nullptr);
}

// Computes one task of the forward pass.
template <Compute kCompute>
void forward_task(const ForwardJob& job, int64_t task, char* scratch) {
  if (job.direct) return direct_task<kCompute, DirectFloats>(job, task, scratch);
  const ForwardWorkTile tile = job.work_tile(task);
  if (is_direct(*job.problem, job.sequences[tile.b].len)) return;
  const QBlock block(job, tile, tile.kv_heads);
  const auto run = [&](const QBlock* next) {
    if constexpr (kFixedBase<kCompute>) {
      if (uses_amx_mainloop(*job.problem)) {
        return ForwardBlock<kCompute, AmxKv>(block, scratch).run(next);
      }
    }
    ForwardBlock<kCompute, PackedKv>(block, scratch).run(next);
  };
  if (task + job.threads >= job.tasks()) return run(nullptr);
  const ForwardWorkTile next_tile = job.work_tile(task + job.threads);
  const QBlock next(job, next_tile, next_tile.kv_heads);
  run(next.direct ? nullptr : &next);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
