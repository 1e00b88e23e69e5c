// The tile geometry against brute force: every mask, every small pair of lengths, every tile.
#include "core/seqlen_info.h"

#include <algorithm>
#include <climits>
#include <vector>

#include "check.h"
#include "cuda/kernels/sm90/block_mask_bits.h"

using namespace flashattn;

namespace {

// The specification, pair by pair.
bool visible(const MaskRule& rule, int i, int j, Lengths len) {
  const int at = i + ((rule.mask & FLASHATTN_MASK_TOP_LEFT) ? 0 : len.kv - len.q);
  if (j < 0 || j >= len.kv) return false;
  if ((rule.mask & FLASHATTN_MASK_CAUSAL) && j > at) return false;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_left >= 0 && j < at - rule.window_left) return false;
    if (rule.window_right >= 0 && j > at + rule.window_right) return false;
  }
  if (rule.mask & FLASHATTN_MASK_CHUNK) {
    const int chunk_of_query = at >= 0 ? at / rule.chunk : -((-at + rule.chunk - 1) / rule.chunk);
    if (chunk_of_query != j / rule.chunk) return false;
  }
  return true;
}

bool empty(Interval x) { return x.begin >= x.end; }

struct Table {
  MaskRule rule;
  Lengths len;
  std::vector<char> cell;

  Table(const MaskRule& r, Lengths l) : rule(r), len(l), cell(static_cast<size_t>(l.q * l.kv)) {
    for (int i = 0; i < len.q; ++i) {
      for (int j = 0; j < len.kv; ++j) at(i, j) = visible(rule, i, j, len);
    }
  }
  char& at(int i, int j) { return cell[static_cast<size_t>(i * len.kv + j)]; }
};

// Whether [begin, end) is exactly where `sees` holds, within [0, n).
template <typename Sees>
bool exact(Interval x, int n, const Sees& sees) {
  if (x.begin < 0 || x.end > n || x.begin > n || x.end < 0) return false;
  for (int k = 0; k < n; ++k) {
    if ((k >= x.begin && k < x.end) != static_cast<bool>(sees(k))) return false;
  }
  return true;
}

bool rows_right(Table& t) {
  Interval before = {0, 0};
  int64_t pairs = 0;
  for (int i = 0; i < t.len.q; ++i) {
    const Interval keys = visible_keys(t.rule, i, t.len);
    if (!exact(keys, t.len.kv, [&](int j) { return t.at(i, j); })) return false;
    if (keys.begin < before.begin || keys.end < before.end) return false;
    before = keys;
    pairs += std::max(0, keys.end - keys.begin);
  }
  return pairs == visible_pairs(t.rule, t.len) &&
         pairs == std::count(t.cell.begin(), t.cell.end(), char{1});
}

bool columns_right(Table& t) {
  Interval before = {0, 0};
  for (int j = 0; j < t.len.kv; ++j) {
    const Interval queries = visible_queries(t.rule, j, t.len);
    if (!exact(queries, t.len.q, [&](int i) { return t.at(i, j); })) return false;
    if (queries.begin < before.begin || queries.end < before.end) return false;
    before = queries;
  }
  return true;
}

// Relative bounds, of one key and moved to each of the others, from several queries on.
bool relative_right(const MaskRule& rule, Lengths len) {
  if (rule.mask & FLASHATTN_MASK_CHUNK) return true;
  for (int from = 0; from < len.q; from += 3) {
    const Interval first = relative_queries(rule, 0, len, from);
    for (int j = 0; j < len.kv; ++j) {
      const Interval seen = visible_queries(rule, j, len);
      for (int i = 0; i < len.q; ++i) {
        const bool inside = i - from >= first.begin + j && i - from < first.end + j;
        if (inside != (i >= seen.begin && i < seen.end)) return false;
      }
    }
  }
  return true;
}

// Spans of a row tile, and how each key tile stands to it: kEmpty and kFull must be true, and a
// full tile must be said to be full. kPartial may hold a tile without a pair (between rows).
bool spans_right(Table& t, int tile_q, int tile_kv) {
  for (int q = 0; q < t.len.q; q += tile_q) {
    const Interval rows = {q, std::min(q + tile_q, t.len.q)};
    const KeySpan span = key_span(t.rule, rows, t.len);
    for (int k = 0; k < t.len.kv; k += tile_kv) {
      const Interval keys = {k, std::min(k + tile_kv, t.len.kv)};
      int seen = 0;
      for (int i = rows.begin; i < rows.end; ++i) {
        for (int j = keys.begin; j < keys.end; ++j) {
          seen += t.at(i, j);
          if (t.at(i, j) && (j < span.any.begin || j >= span.any.end)) return false;
          if (!t.at(i, j) && j >= span.all.begin && j < span.all.end) return false;
        }
      }
      const TileKind kind = classify(span, keys);
      const int cells = (rows.end - rows.begin) * (keys.end - keys.begin);
      if (kind == TileKind::kEmpty && seen != 0) return false;
      if ((kind == TileKind::kFull) != (seen == cells)) return false;
    }
  }
  return true;
}

bool query_spans_right(Table& t, int tile_kv) {
  for (int k = 0; k < t.len.kv; k += tile_kv) {
    const Interval keys = {k, std::min(k + tile_kv, t.len.kv)};
    const Interval span = query_span(t.rule, keys, t.len);
    const Interval full = full_queries(t.rule, keys, t.len);
    if (span.begin < 0 || span.end > t.len.q) return false;
    for (int i = 0; i < t.len.q; ++i) {
      bool all = true;
      for (int j = keys.begin; j < keys.end; ++j) {
        if (t.at(i, j) && (i < span.begin || i >= span.end)) return false;
        all = all && t.at(i, j);
      }
      if (all != (i >= full.begin && i < full.end)) return false;
    }
    if (tile_kv == 1 && !empty(span) && (!t.at(span.begin, k) || !t.at(span.end - 1, k))) {
      return false;
    }
  }
  return true;
}

// The tiles of keys that visit a tile of queries are key_tiles: each may wait for the one after it,
// and the last is known.
bool turns_right(Table& t, int tile_q, int tile_kv) {
  for (int q = 0; q < t.len.q; q += tile_q) {
    const Interval tiles = key_tiles(t.rule, {q, std::min(q + tile_q, t.len.q)}, t.len, tile_kv);
    for (int k = 0; k < t.len.kv; k += tile_kv) {
      const Interval span = query_span(t.rule, {k, std::min(k + tile_kv, t.len.kv)}, t.len);
      const bool visits = !empty(span) && q / tile_q >= span.begin / tile_q && q < span.end;
      if (visits != (k / tile_kv >= tiles.begin && k / tile_kv < tiles.end)) return false;
    }
  }
  return true;
}

void test_rule(const MaskRule& rule) {
  constexpr int kMost = 9;
  constexpr int kTiles[] = {1, 2, 3, 4, 16};
  for (int q = 0; q <= kMost; ++q) {
    for (int kv = 0; kv <= kMost; ++kv) {
      Table table(rule, {q, kv});
      bool ok = rows_right(table) && columns_right(table) && relative_right(table.rule, table.len);
      for (const int tile_kv : kTiles) {
        for (const int tile_q : kTiles) {
          ok = ok && spans_right(table, tile_q, tile_kv) && turns_right(table, tile_q, tile_kv);
        }
        ok = ok && query_spans_right(table, tile_kv);
      }
      if (!CHECK(ok)) {
        printf("  mask %u window %d %d chunk %d lengths %d %d\n", rule.mask, rule.window_left,
               rule.window_right, rule.chunk, q, kv);
      }
    }
  }
}

// The functions of trees: what a query sees before the tree, spans of Q tiles, the hull, the pairs.
bool tree_right(Table& t) {
  const int begin = tree_begin(t.rule, t.len);
  const MaskRule hull = tree_hull(t.rule);
  if (begin != std::max(t.len.kv - t.rule.tree, 0) || hull.tree != 0) return false;
  int64_t pairs = static_cast<int64_t>(t.len.q) * (t.len.kv - begin);
  for (int i = 0; i < t.len.q; ++i) {
    const Interval before = keys_before_tree(t.rule, i, t.len), all = visible_keys(hull, i, t.len);
    for (int j = 0; j < t.len.kv; ++j) {
      const bool sees = j < begin && t.at(i, j);
      if (sees != (j >= before.begin && j < before.end)) return false;
      if ((sees || j >= begin) && (j < all.begin || j >= all.end)) return false;
      pairs += sees;
    }
    for (int end = i + 1; end <= t.len.q; ++end) {
      const KeySpan span = tree_span(t.rule, {i, end}, t.len);
      for (int j = 0; j < t.len.kv; ++j) {
        bool any = j >= begin, every = j < begin;
        for (int row = i; row < end; ++row) {
          any = any || t.at(row, j);
          every = every && t.at(row, j);
        }
        if (any && (j < span.any.begin || j >= span.any.end)) return false;
        if (every != (j >= span.all.begin && j < span.all.end)) return false;
      }
    }
  }
  return pairs == visible_pairs(t.rule, t.len);
}

void test_trees() {
  const Interval windows[] = {{-1, -1}, {0, -1}, {-1, 0}, {1, 2}, {6, 0}};
  for (uint32_t mask = 0; mask < 16; ++mask) {
    for (const Interval window : windows) {
      for (const int chunk : {1, 3, 8}) {
        for (const int tree : {1, 2, 5, 20}) {
          for (int n = 0; n < 100; ++n) {
            const Lengths len{n / 10, n % 10};
            const MaskRule rule{mask | FLASHATTN_MASK_TREE, window.begin, window.end, chunk, tree};
            Table table(rule, len);
            if (CHECK(tree_right(table))) continue;
            printf("  mask %u window %d %d chunk %d tree %d lengths %d %d\n", mask, window.begin,
                   window.end, chunk, tree, len.q, len.kv);
          }
        }
      }
    }
  }
  // Bits of the second word; a first key before the sequence's, which has fewer than the tree.
  const uint32_t bits[] = {1u << 31, 2};
  const TreeRow row{bits, -30};
  CHECK(row.shows(1) && !row.shows(2) && row.shows(3) && !row.shows(4));
}

void test_masks() {
  for (uint32_t mask = 0; mask < 16; ++mask) {
    const bool window = mask & FLASHATTN_MASK_WINDOW, chunk = mask & FLASHATTN_MASK_CHUNK;
    for (int left = window ? -1 : 0; left <= (window ? 3 : 0); ++left) {
      for (int right = window ? -1 : 0; right <= (window ? 3 : 0); ++right) {
        for (int size = chunk ? 1 : 0; size <= (chunk ? 5 : 0); ++size) {
          test_rule({mask, left, right, size});
        }
      }
    }
  }
}

// Nothing overflows at the far end of the numbers.
void test_extremes() {
  constexpr int32_t kMax = INT32_MAX;
  const MaskRule causal = {FLASHATTN_MASK_CAUSAL, 0, 0, 0};
  const MaskRule window = {FLASHATTN_MASK_WINDOW, kMax, kMax, 0};
  const MaskRule chunk = {FLASHATTN_MASK_CHUNK, 0, 0, kMax};
  CHECK(visible_keys(causal, kMax - 1, {kMax, kMax}).end == kMax);
  CHECK(visible_keys(causal, 0, {kMax, 1}).end == 0);
  CHECK(visible_keys(window, kMax - 1, {kMax, kMax}).begin == 0);
  CHECK(visible_keys(window, 0, {1, kMax}).end == kMax);
  CHECK(visible_keys(chunk, kMax - 1, {kMax, kMax}).end == kMax);
  CHECK(visible_queries(window, kMax - 1, {kMax, kMax}).end == kMax);
  CHECK(visible_queries(causal, 0, {1, kMax}).begin == 0);
  CHECK(visible_queries(chunk, kMax - 1, {kMax, kMax}).end == kMax);
  CHECK(relative_queries(causal, kMax - 1, {kMax, kMax}, 0).begin == 1 << 30);
  CHECK(relative_queries(window, 0, {kMax, 1}, kMax - 1).end == 1 << 30);
  CHECK(floor_div(-1, 4) == -1 && floor_div(-4, 4) == -1 && floor_div(-5, 4) == -2);
  CHECK(floor_div(7, 4) == 1 && ceil_div(7, 4) == 2 && ceil_div(8, 4) == 2 && ceil_div(0, 4) == 0);
}

// The parts follow each other without gap, cut at multiples of the step; none is empty.
void test_splits() {
  for (int n = 0; n <= 40; ++n) {
    for (int step = 1; step <= 9; ++step) {
      for (int parts = 0; parts <= 12; ++parts) {
        const SplitRule rule = SplitRule::of(parts, 2 * step, 16, step);
        const Lengths len{16, n};
        const int count = split_count(rule, len);
        bool ok = count >= 1 && (parts == 0 || count <= parts);
        int at = 0;
        for (int part = 0; part < count; ++part) {
          const Interval keys = split_range(rule, len, part);
          ok = ok && keys.begin == at && (keys.end > keys.begin || n == 0) &&
               (keys.end % step == 0 || keys.end == n);
          at = keys.end;
        }
        CHECK(ok && at == n);
        CHECK(split_count(rule, {17, n}) == 1 && split_range(rule, {17, n}, 0).end == n);
      }
    }
  }
  // Decoding on an H200, 8 heads, three blocks a multiprocessor: 16 times 8k, 8 times 16k, and 16
  // and 32 of which the longest has 32k.
  CHECK(splits_of_full_waves(128, 396, 5, 4) == 3);
  CHECK(splits_of_full_waves(64, 396, 5, 8) == 6);
  CHECK(splits_of_full_waves(128, 396, 5, 16) == 15);
  CHECK(splits_of_full_waves(256, 396, 5, 16) == 7);
  CHECK(splits_of_full_waves(128, 396, 5, 2) == 0);
  for (const int parts : {7, 1 << 30}) {
    const SplitRule large = SplitRule::of(parts, 1, INT32_MAX, 64);
    const int last = split_count(large, {1, INT32_MAX}) - 1;
    CHECK(split_range(large, {1, INT32_MAX}, last).end == INT32_MAX);
  }
}

// Sequences of any lengths, packed or not, have tiles of their own.
void test_head_tiles() {
  for (int rows = 1; rows <= 9; ++rows) {
    for (int seed = 0; seed < 200; ++seed) {
      const int lengths[] = {seed % 7, seed / 7 % 9, 0, seed / 3 % 11, seed % 2 * 30};
      const int batch = 5;
      const HeadTiles packed{true, lengths[0] + lengths[1] + lengths[3] + lengths[4], 30, batch,
                             rows};
      const HeadTiles padded{false, 0, 30, batch, rows};
      int64_t before = 0, after[2] = {0, 0};
      for (int b = 0; b < batch; before += lengths[b++]) {
        const int64_t first[] = {packed.first(before, b), padded.first(0, b)};
        for (int n = 0; n < 2; ++n) {
          CHECK(first[n] >= after[n]);
          after[n] = first[n] + ceil_div(lengths[b], rows);
        }
      }
      CHECK(after[0] <= packed.count() && after[1] <= padded.count());
    }
  }
}

void test_bits() {
  using cuda::sm90::bits_in;
  for (int32_t first : {0, 32, 96}) {
    for (int32_t begin = 0; begin <= 140; ++begin) {
      for (int32_t end = 0; end <= 140; ++end) {
        uint32_t bits = 0;
        for (int32_t n = 0; n < 32; ++n) {
          if (first + n >= begin && first + n < end) bits |= 1u << n;
        }
        CHECK(bits_in({begin, end}, first) == bits);
      }
    }
  }
}

}  // namespace

int main() {
  test_masks();
  test_trees();
  test_extremes();
  test_splits();
  test_head_tiles();
  test_bits();
  return check_report();
}
