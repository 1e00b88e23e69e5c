// Mask geometry: the one place that decides, for the CPU backend and for every GPU kernel, which
// keys a query sees and which tiles a kernel visits. Intervals are half open.
#pragma once

#include <cstdint>

#include "flashattn.h"

#if defined(__CUDACC__)
#define FLASHATTN_HD __host__ __device__ __forceinline__
#else
// Always inlined: the CPU kernels are compiled once per instruction set, and the linker must not
// share a function of a newer set with code for an older machine.
#define FLASHATTN_HD inline __attribute__((always_inline))
#endif

namespace flashattn {

struct Interval {
  int32_t begin, end;
};

struct MaskRule {
  uint32_t mask;  // enum flashattn_mask; BLOCKS, TREE and PAGES are not looked at here
  int32_t window_left, window_right;
  int32_t chunk;
  int32_t tree = 0;  // length of the tree; only the functions of trees look at it
};

// Masks that may hide any key or page: the keys that a query sees are no interval.
constexpr uint32_t kKeyBitMasks = FLASHATTN_MASK_TREE | FLASHATTN_MASK_PAGES;

// Lengths of one sequence.
struct Lengths {
  int32_t q, kv;
};

// a / b, rounded down. In 32 bits: a 64-bit division on a GPU is a function call with its own
// registers.
FLASHATTN_HD constexpr int32_t floor_div(int32_t a, int32_t b) {
  return a / b - ((a % b != 0 && (a % b < 0) != (b < 0)) ? 1 : 0);
}

FLASHATTN_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

FLASHATTN_HD constexpr int32_t clamp_index(int64_t x, int32_t n) {
  return x < 0 ? 0 : x > n ? n : static_cast<int32_t>(x);
}

// `off` of the specification: query i has key position i + off.
FLASHATTN_HD constexpr int32_t diagonal_offset(const MaskRule& rule, Lengths len) {
  return (rule.mask & FLASHATTN_MASK_TOP_LEFT) ? 0 : len.kv - len.q;
}

FLASHATTN_HD constexpr Interval intersect(Interval a, Interval b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Whether every query sees every key, block masks aside.
FLASHATTN_HD constexpr bool sees_all(const MaskRule& rule) {
  return !(rule.mask & (FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK));
}

// The keys that query i sees. Neither end decreases with i.
//
// Windows are compared with differences of positions, here and below: a sum of a window and a
// position might not fit 32 bits.
FLASHATTN_HD constexpr Interval visible_keys(const MaskRule& rule, int32_t i, Lengths len) {
  const int32_t at = i + diagonal_offset(rule, len);
  int32_t begin = 0, end = len.kv;
  if ((rule.mask & FLASHATTN_MASK_CAUSAL) && at < end) end = at + 1;
  // One test for both bits: GPU kernels pay for every jump over code that they do not execute.
  if (rule.mask & (FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK)) {
    if (rule.mask & FLASHATTN_MASK_WINDOW) {
      if (rule.window_left >= 0 && rule.window_left < at) begin = at - rule.window_left;
      if (rule.window_right >= 0 && rule.window_right < end - 1 - at) {
        end = at + rule.window_right + 1;
      }
    }
    if (rule.mask & FLASHATTN_MASK_CHUNK) {
      const int64_t first = static_cast<int64_t>(floor_div(at, rule.chunk)) * rule.chunk;
      if (first > begin) begin = static_cast<int32_t>(first);
      if (first + rule.chunk < end) end = static_cast<int32_t>(first + rule.chunk);
    }
  }
  return {begin < len.kv ? begin : len.kv, end > 0 ? end : 0};
}

// The queries that see key j: the inverse of visible_keys. Neither end decreases with j.
FLASHATTN_HD constexpr Interval visible_queries(const MaskRule& rule, int32_t j, Lengths len) {
  const int32_t off = diagonal_offset(rule, len), own = j - off;  // the query on the diagonal
  int32_t begin = 0, end = len.q;
  if ((rule.mask & FLASHATTN_MASK_CAUSAL) && own > 0) begin = own;
  if (rule.mask & (FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK)) {  // one test, as above
    if (rule.mask & FLASHATTN_MASK_WINDOW) {
      if (rule.window_right >= 0 && begin < own && rule.window_right < own - begin) {
        begin = own - rule.window_right;
      }
      if (rule.window_left >= 0 && rule.window_left < end - 1 - own) {
        end = own + rule.window_left + 1;
      }
    }
    if (rule.mask & FLASHATTN_MASK_CHUNK) {
      const int64_t first = static_cast<int64_t>(j / rule.chunk) * rule.chunk - off;
      if (first > begin) begin = static_cast<int32_t>(first < len.q ? first : len.q);
      if (first + rule.chunk < end) {
        end = static_cast<int32_t>(first + rule.chunk > 0 ? first + rule.chunk : 0);
      }
    }
  }
  return {begin < len.q ? begin : len.q, end > 0 ? end : 0};
}

// The queries that see key j, chunks aside, relative to query `from`. The bounds are not clamped to
// the sequence. For key j + n, n < 2^30, both bounds are n more.
FLASHATTN_HD constexpr Interval relative_queries(const MaskRule& rule, int32_t j, Lengths len,
                                                 int32_t from) {
  constexpr int64_t kFar = 1 << 30;  // beyond every query of a sequence
  const int64_t at = static_cast<int64_t>(j) - diagonal_offset(rule, len) - from;
  int64_t begin = -kFar, end = kFar;
  if (rule.mask & FLASHATTN_MASK_CAUSAL) begin = at;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_right >= 0 && at - rule.window_right > begin) begin = at - rule.window_right;
    if (rule.window_left >= 0) end = at + rule.window_left + 1;
  }
  return {static_cast<int32_t>(begin < -kFar  ? -kFar
                               : begin > kFar ? kFar
                                              : begin),
          static_cast<int32_t>(end < -kFar  ? -kFar
                               : end > kFar ? kFar
                                            : end)};
}

// The keys of a non-empty Q tile [rows.begin, rows.end).
struct KeySpan {
  Interval any;  // contains every key that some row sees
  Interval all;  // keys that every row sees; may be empty (begin >= end)
};

FLASHATTN_HD constexpr KeySpan key_span(const MaskRule& rule, Interval rows, Lengths len) {
  const Interval first = visible_keys(rule, rows.begin, len);
  const Interval last = visible_keys(rule, rows.end - 1, len);
  return {{first.begin, last.end}, {last.begin, first.end}};
}

// The first key of the tree. tree_bits decide who sees it and the keys behind it, the other masks
// who sees the keys before it. Without TREE: len.kv.
FLASHATTN_HD constexpr int32_t tree_begin(const MaskRule& rule, Lengths len) {
  return rule.tree < len.kv ? len.kv - rule.tree : 0;
}

// The row of tree_bits that belongs to one query.
struct TreeRow {
  const uint32_t* bits;
  int32_t first;  // the key of bit 0; below 0 if there are more bits than keys

  FLASHATTN_HD bool shows(int32_t key) const {
    const auto n = static_cast<uint32_t>(key - first);
    return bits[n / 32] >> n % 32 & 1;
  }
};

// The keys before the tree that query i sees. May be empty (begin >= end).
FLASHATTN_HD constexpr Interval keys_before_tree(const MaskRule& rule, int32_t i, Lengths len) {
  return intersect(visible_keys(rule, i, len), {0, tree_begin(rule, len)});
}

// key_span() with TREE: any row may see keys of the tree, and none counts as seeing all of them.
FLASHATTN_HD constexpr KeySpan tree_span(const MaskRule& rule, Interval rows, Lengths len) {
  const KeySpan span = key_span(rule, rows, len);
  const int32_t begin = tree_begin(rule, len);
  return {{span.any.begin < begin ? span.any.begin : begin, len.kv},
          intersect(span.all, {0, begin})};
}

// A rule without TREE by which each query sees every key that it may see by `rule`, and few others.
// It relies on a query being at most tree - 1 keys behind the first key of the tree, unless masks
// are aligned at the start.
FLASHATTN_HD constexpr MaskRule tree_hull(const MaskRule& rule) {
  constexpr uint32_t kShapes = FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK;
  int32_t left = -1;
  if (rule.mask & FLASHATTN_MASK_WINDOW) left = rule.window_left;
  if (rule.mask & FLASHATTN_MASK_CHUNK && (left < 0 || rule.chunk - 1 < left))
    left = rule.chunk - 1;
  if (left < 0 || rule.mask & FLASHATTN_MASK_TOP_LEFT) return {rule.mask & ~kShapes, 0, 0, 0};
  return {(rule.mask & ~kShapes) | FLASHATTN_MASK_WINDOW,
          left < rule.tree - 1 ? rule.tree - 1 : left, -1, 0};
}

// The KV tiles of which some query of a non-empty Q tile sees a key. May be empty (begin >= end).
FLASHATTN_HD constexpr Interval key_tiles(const MaskRule& rule, Interval rows, Lengths len,
                                          int32_t tile_kv) {
  const Interval any = key_span(rule, rows, len).any;
  return {any.begin / tile_kv, any.end > any.begin ? (any.end - 1) / tile_kv + 1 : 0};
}

// The queries that see some key of a non-empty [keys.begin, keys.end).
FLASHATTN_HD constexpr Interval query_span(const MaskRule& rule, Interval keys, Lengths len) {
  const Interval first = visible_queries(rule, keys.begin, len);
  const Interval last = visible_queries(rule, keys.end - 1, len);
  return {first.begin, last.end};
}

// The queries that see all keys of a non-empty [keys.begin, keys.end). May be empty (begin >= end).
FLASHATTN_HD constexpr Interval full_queries(const MaskRule& rule, Interval keys, Lengths len) {
  const Interval first = visible_queries(rule, keys.begin, len);
  const Interval last = visible_queries(rule, keys.end - 1, len);
  return {last.begin, first.end};
}

enum class TileKind { kEmpty, kPartial, kFull };

// The kind of a KV tile for a Q tile with this span.
FLASHATTN_HD constexpr TileKind classify(const KeySpan& span, Interval keys) {
  if (keys.begin >= span.any.end || keys.end <= span.any.begin) return TileKind::kEmpty;
  if (keys.begin >= span.all.begin && keys.end <= span.all.end) return TileKind::kFull;
  return TileKind::kPartial;
}

// The sum of the positive numbers among slope * x + first, x in [begin, end); slope is -1, 0 or 1.
constexpr int64_t positive_sum(int64_t begin, int64_t end, int64_t slope, int64_t first) {
  if (slope > 0 && begin < 1 - first) begin = 1 - first;
  if (slope < 0 && end > first) end = first;
  if (begin >= end || (slope == 0 && first <= 0)) return 0;
  const int64_t count = end - begin, ends = 2 * first + slope * (begin + end - 1);
  return count % 2 == 0 ? count / 2 * ends : count * (ends / 2);
}

// The number of visible pairs of positions [rows.begin, rows.end) with keys: position x sees the
// keys in both [keys.begin, keys.end) and [x - left, x + right].
constexpr int64_t band_pairs(Interval rows, Interval keys, int64_t left, int64_t right) {
  // Up to bends[0] the upper end is x + right; up to bends[1] the lower end is the first key.
  const int64_t bends[] = {keys.end - 1 - right, keys.begin + left};
  int64_t pairs = 0, begin = rows.begin;
  while (begin < rows.end) {
    int64_t end = rows.end;
    for (const int64_t bend : bends) {
      if (begin <= bend && bend + 1 < end) end = bend + 1;
    }
    const bool far = begin <= bends[0], near = begin <= bends[1];
    pairs += positive_sum(begin, end, (far ? 1 : 0) - (near ? 0 : 1),
                          (far ? right + 1 : keys.end) - (near ? keys.begin : -left));
    begin = end;
  }
  return pairs;
}

// Visible (query, key) pairs of one sequence, block masks and hidden pages aside, in closed form:
// full chunks have equal counts. All bits of a tree count as set.
constexpr int64_t visible_pairs(const MaskRule& rule, Lengths len) {
  constexpr int64_t kOpen = INT64_C(1) << 33;
  int64_t left = kOpen, right = kOpen;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_left >= 0) left = rule.window_left;
    if (rule.window_right >= 0) right = rule.window_right;
  }
  if (rule.mask & FLASHATTN_MASK_CAUSAL) right = 0;
  const int32_t off = diagonal_offset(rule, len);
  const Interval rows{off, off + len.q}, keys{0, tree_begin(rule, len)};
  const int64_t of_tree = static_cast<int64_t>(len.q) * (len.kv - keys.end);
  if (!(rule.mask & FLASHATTN_MASK_CHUNK)) return of_tree + band_pairs(rows, keys, left, right);
  const auto of_chunk = [&](int64_t n) {
    const int64_t begin = n * rule.chunk, end = begin + rule.chunk;
    const auto cut = [&](Interval x) {
      return Interval{static_cast<int32_t>(begin > x.begin ? begin : x.begin),
                      static_cast<int32_t>(end < x.end ? end : x.end)};
    };
    return band_pairs(cut(rows), cut(keys), left, right);
  };
  // The chunks that have rows and keys, and among them those that are full.
  const int64_t chunk = rule.chunk, stop = rows.end < keys.end ? rows.end : keys.end;
  const int64_t start = off > 0 ? off : 0;
  if (start >= rows.end || keys.end == 0) return of_tree;
  const int64_t first = start / chunk, last = (stop - 1) / chunk;
  if (first > last) return of_tree;
  const int64_t whole = ceil_div(start, chunk), whole_end = stop / chunk;
  if (whole >= whole_end) {
    return of_tree + (first == last ? of_chunk(first) : of_chunk(first) + of_chunk(last));
  }
  int64_t pairs = of_tree + (whole_end - whole) * of_chunk(whole);
  if (first < whole) pairs += of_chunk(first);
  if (last >= whole_end) pairs += of_chunk(last);
  return pairs;
}

}  // namespace flashattn
