// Masks on a tile of scores: which columns are computed at all, and -inf for keys that a query does
// not see.
#pragma once

#include "core/score_mod.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE Interval round_out(Interval columns) {
  return {columns.begin / kColumnStep * kColumnStep, round_up(columns.end, kColumnStep)};
}

// The queries around `query` that share ranges of active keys: those of one row of mask blocks, or
// of as many rows as fit in a tile of tile_q rows. They begin at the same queries wherever the tile
// starts, so that the bits of a query do not depend on its neighbours.
FLASHATTN_INLINE Interval same_block_rows(const ScoreMod& mods, int32_t query, int32_t tile_q,
                                          Lengths len) {
  if (!mods.blocks) return {0, len.q};
  const int32_t rows = mods.block_q >= tile_q ? mods.block_q : tile_q / mods.block_q * mods.block_q;
  const int32_t begin = query / rows * rows;
  return {begin, clamp_index(static_cast<int64_t>(begin) + rows, len.q)};
}

// The page numbers of a sequence; a negative number hides the keys of that page.
struct HiddenPages {
  const int32_t* numbers;  // NULL: no key is hidden
  int32_t page_size;
};

// Calls body(keys) for each range of keys whose pages are not hidden.
template <class Body>
FLASHATTN_INLINE void for_each_shown_range(const HiddenPages& pages, Interval keys, Body body) {
  if (!pages.numbers) return body(keys);
  Interval shown{keys.begin, keys.begin};
  while (shown.end < keys.end) {
    const int32_t x = shown.end / pages.page_size;
    const int32_t next = clamp_index((x + 1LL) * pages.page_size, keys.end);
    const bool hidden = pages.numbers[x] < 0;
    if (!hidden) shown.end = next;
    if ((hidden || next == keys.end) && shown.begin < shown.end) body(shown);
    if (hidden) shown = {next, next};
  }
}

// The end of the keys that count of block x of a block mask, at most `end`.
FLASHATTN_INLINE int32_t block_end(const ScoreMod& mods, int32_t x, int32_t end) {
  const int64_t len = mods.block_lens ? mods.block_lens[x] : mods.block_kv;
  return clamp_index(static_cast<int64_t>(x) * mods.block_kv + len, end);
}

// Calls body(keys, full) for each range of keys whose mask blocks are on for some of the queries;
// full: for all of them.
template <class Body>
FLASHATTN_INLINE void for_each_active_range(const ScoreMod& mods, Interval queries, Interval keys,
                                            Body body) {
  if (!mods.blocks) return body(keys, true);
  Interval active{keys.begin, keys.begin};
  bool full = true;
  for (int32_t j = keys.begin; j < keys.end;) {
    const int32_t x = j / mods.block_kv;
    const int32_t next = clamp_index((x + 1LL) * mods.block_kv, keys.end);
    const int32_t end = block_end(mods, x, next);
    bool any = false, all = true;
    for (int32_t y = queries.begin / mods.block_q; y <= (queries.end - 1) / mods.block_q; ++y) {
      const bool on = mods.blocks[y * mods.blocks_row + x] != 0;
      any |= on;
      all &= on;
    }
    if (any && end > j) {
      active.end = end;
      full &= all;
    }
    const bool gap = !any || end < next;
    if ((gap || next == keys.end) && active.begin < active.end) body(active, full);
    if (gap) {
      active = {next, next};
      full = true;
    }
    j = next;
  }
}

inline void fill(float* s, int32_t begin, int32_t end, float value) {
  for (int32_t c = begin; c < end; ++c) s[c] = value;
}

// Writes -inf to the columns, whole vectors, that are not in `shown`. It stores whole vectors
// because a load of one would wait for smaller stores.
FLASHATTN_INLINE void mask_columns(float* s, Interval shown, Interval columns) {
  const Floats hidden = splat(-kInfinity);
  if (shown.begin >= shown.end) shown = {columns.end, columns.end};
  const auto lanes_from = [](int32_t c) { return iota() >= splat(static_cast<float>(c)); };
  for (int32_t c = columns.begin; c < shown.begin; c += kWidth) {
    store(s + c, select(lanes_from(shown.begin - c), load(s + c), hidden));
  }
  for (int32_t c = shown.end / kWidth * kWidth; c < columns.end; c += kWidth) {
    store(s + c, select(lanes_from(shown.end - c), hidden, load(s + c)));
  }
}

// Writes -inf to columns of s whose keys are not visible, or lie in mask blocks that are off.
// Column 0 is key `first`.
inline void mask_row(const ScoreMod& mods, bool blocks, int32_t i, int32_t first, Interval visible,
                     Interval columns, float* s) {
  const Interval shown = intersect({visible.begin - first, visible.end - first}, columns);
  mask_columns(s, shown, columns);
  if (!blocks) return;
  const uint8_t* row = mods.blocks + i / mods.block_q * mods.blocks_row;
  for (int32_t j = first + shown.begin; j < first + shown.end;) {
    const int32_t x = j / mods.block_kv;
    const int32_t next = clamp_index((x + 1LL) * mods.block_kv, first + shown.end);
    const int32_t end = row[x] ? block_end(mods, x, next) : j;
    fill(s, (end > j ? end : j) - first, next - first, -kInfinity);
    j = next;
  }
}

// With a tree, whose first key is `begin`: writes -inf to those columns of s, for keys in `keys`,
// that a query does not see. before: the keys before the tree that it sees.
inline void mask_tree(const TreeRow& tree, int32_t begin, Interval before, Interval keys,
                      int32_t first, float* s) {
  const int32_t seen = before.begin < before.end ? before.end : 0;
  int32_t j = keys.begin > seen ? keys.begin : seen;
  for (; j < keys.end && j < begin; ++j) s[j - first] = -kInfinity;
  for (; j < keys.end; ++j) {
    if (!tree.shows(j)) s[j - first] = -kInfinity;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
