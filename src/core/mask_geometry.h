// Which keys a query sees and which tiles a kernel visits: the one place where this is decided, for
// the CPU backend and for every GPU kernel. Intervals are half open. All functions are constexpr
// and may be called from device code.
#pragma once

#include <cstdint>

#include "flashattn.h"

#if defined(__CUDACC__)
#define FLASHATTN_HD __host__ __device__ __forceinline__
#else
// Always inlined: the kernels are compiled once per instruction set, and no function built for a
// newer one may be shared with code that runs on an older machine.
#define FLASHATTN_HD inline __attribute__((always_inline))
#endif

namespace flashattn {

struct Interval {
  int32_t begin, end;
};

struct MaskRule {
  uint32_t mask;  // enum flashattn_mask; BLOCKS is not looked at here
  int32_t window_left, window_right;
  int32_t chunk;
};

// Lengths of one sequence.
struct Lengths {
  int32_t q, kv;
};

// 32 bits: 64-bit division is a call with registers of its own on a GPU.
FLASHATTN_HD constexpr int32_t floor_div(int32_t a, int32_t b) {
  return a / b - ((a % b != 0 && (a % b < 0) != (b < 0)) ? 1 : 0);
}

FLASHATTN_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

FLASHATTN_HD constexpr int32_t clamp_index(int64_t x, int32_t n) {
  return x < 0 ? 0 : x > n ? n : static_cast<int32_t>(x);
}

// off of the specification: query i stands at key position i + off.
FLASHATTN_HD constexpr int32_t diagonal_offset(const MaskRule& rule, Lengths len) {
  return (rule.mask & FLASHATTN_MASK_TOP_LEFT) ? 0 : len.kv - len.q;
}

FLASHATTN_HD constexpr Interval intersect(Interval a, Interval b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Every query sees every key, block masks aside.
FLASHATTN_HD constexpr bool sees_all(const MaskRule& rule) {
  return !(rule.mask & (FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK));
}

// Keys that query i sees. Both ends never decrease with i.
//
// Here and below windows are compared with differences, which fit 32 bits where their sums might
// not: positions lie between -len.q and the larger of the lengths.
FLASHATTN_HD constexpr Interval visible_keys(const MaskRule& rule, int32_t i, Lengths len) {
  const int32_t at = i + diagonal_offset(rule, len);
  int32_t begin = 0, end = len.kv;
  if ((rule.mask & FLASHATTN_MASK_CAUSAL) && at < end) end = at + 1;
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
  return {begin < len.kv ? begin : len.kv, end > 0 ? end : 0};
}

// Queries that see key j: the inverse of visible_keys. Both ends never decrease with j.
FLASHATTN_HD constexpr Interval visible_queries(const MaskRule& rule, int32_t j, Lengths len) {
  const int32_t off = diagonal_offset(rule, len), own = j - off;  // the query that stands there
  int32_t begin = 0, end = len.q;
  if ((rule.mask & FLASHATTN_MASK_CAUSAL) && own > 0) begin = own;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_right >= 0 && begin < own && rule.window_right < own - begin) {
      begin = own - rule.window_right;
    }
    if (rule.window_left >= 0 && rule.window_left < end - 1 - own) end = own + rule.window_left + 1;
  }
  if (rule.mask & FLASHATTN_MASK_CHUNK) {
    const int64_t first = static_cast<int64_t>(j / rule.chunk) * rule.chunk - off;
    if (first > begin) begin = static_cast<int32_t>(first < len.q ? first : len.q);
    if (first + rule.chunk < end) {
      end = static_cast<int32_t>(first + rule.chunk > 0 ? first + rule.chunk : 0);
    }
  }
  return {begin < len.q ? begin : len.q, end > 0 ? end : 0};
}

// Queries that see key j, chunks aside, counted from query `from` on: bounds that hold for queries
// of the sequence. For key j + n, n < 2^30, they are n more.
FLASHATTN_HD constexpr Interval relative_queries(const MaskRule& rule, int32_t j, Lengths len,
                                                 int32_t from) {
  constexpr int64_t kFar = 1 << 30;  // further than any query that is asked for
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

// What a tile of queries [rows.begin, rows.end), not empty, needs of the keys.
struct KeySpan {
  Interval any;  // every key that some row sees lies here
  Interval all;  // every row sees all of these; may be empty (begin >= end)
};

FLASHATTN_HD constexpr KeySpan key_span(const MaskRule& rule, Interval rows, Lengths len) {
  const Interval first = visible_keys(rule, rows.begin, len);
  const Interval last = visible_keys(rule, rows.end - 1, len);
  return {{first.begin, last.end}, {last.begin, first.end}};
}

// The tiles of keys of which these queries, not none, see some. May be empty (begin >= end).
FLASHATTN_HD constexpr Interval key_tiles(const MaskRule& rule, Interval rows, Lengths len,
                                          int32_t tile_kv) {
  const Interval any = key_span(rule, rows, len).any;
  return {any.begin / tile_kv, any.end > any.begin ? (any.end - 1) / tile_kv + 1 : 0};
}

// The queries that see some key of [keys.begin, keys.end), not empty.
FLASHATTN_HD constexpr Interval query_span(const MaskRule& rule, Interval keys, Lengths len) {
  const Interval first = visible_queries(rule, keys.begin, len);
  const Interval last = visible_queries(rule, keys.end - 1, len);
  return {first.begin, last.end};
}

// The queries that see all of [keys.begin, keys.end), not empty. May be empty (begin >= end).
FLASHATTN_HD constexpr Interval full_queries(const MaskRule& rule, Interval keys, Lengths len) {
  const Interval first = visible_queries(rule, keys.begin, len);
  const Interval last = visible_queries(rule, keys.end - 1, len);
  return {last.begin, first.end};
}

enum class TileKind { kEmpty, kPartial, kFull };

// How a tile of keys stands to a tile of queries with this span.
FLASHATTN_HD constexpr TileKind classify(const KeySpan& span, Interval keys) {
  if (keys.begin >= span.any.end || keys.end <= span.any.begin) return TileKind::kEmpty;
  if (keys.begin >= span.all.begin && keys.end <= span.all.end) return TileKind::kFull;
  return TileKind::kPartial;
}

// Sum of the positive ones among slope * x + first, x in [begin, end), slope -1, 0 or 1.
constexpr int64_t positive_sum(int64_t begin, int64_t end, int64_t slope, int64_t first) {
  if (slope > 0 && begin < 1 - first) begin = 1 - first;
  if (slope < 0 && end > first) end = first;
  if (begin >= end || (slope == 0 && first <= 0)) return 0;
  const int64_t count = end - begin, ends = 2 * first + slope * (begin + end - 1);
  return count % 2 == 0 ? count / 2 * ends : count * (ends / 2);
}

// Pairs of positions [rows.begin, rows.end) with keys: position x sees those of [keys.begin,
// keys.end) and [x - left, x + right].
constexpr int64_t band_pairs(Interval rows, Interval keys, int64_t left, int64_t right) {
  // Up to these positions the far end is x + right, the near one the first key.
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

// Visible (query, key) pairs of one sequence, block masks aside. In closed form: whole chunks are
// alike.
constexpr int64_t visible_pairs(const MaskRule& rule, Lengths len) {
  constexpr int64_t kOpen = INT64_C(1) << 33;
  int64_t left = kOpen, right = kOpen;
  if (rule.mask & FLASHATTN_MASK_WINDOW) {
    if (rule.window_left >= 0) left = rule.window_left;
    if (rule.window_right >= 0) right = rule.window_right;
  }
  if (rule.mask & FLASHATTN_MASK_CAUSAL) right = 0;
  const int32_t off = diagonal_offset(rule, len);
  const Interval rows{off, off + len.q}, keys{0, len.kv};
  if (!(rule.mask & FLASHATTN_MASK_CHUNK)) return band_pairs(rows, keys, left, right);
  const auto of_chunk = [&](int64_t n) {
    const int64_t begin = n * rule.chunk, end = begin + rule.chunk;
    const auto cut = [&](Interval x) {
      return Interval{static_cast<int32_t>(begin > x.begin ? begin : x.begin),
                      static_cast<int32_t>(end < x.end ? end : x.end)};
    };
    return band_pairs(cut(rows), cut(keys), left, right);
  };
  // Chunks of rows and keys that are there, and among them those that are whole.
  const int64_t chunk = rule.chunk, stop = rows.end < len.kv ? rows.end : len.kv;
  const int64_t start = off > 0 ? off : 0;
  if (start >= stop) return 0;
  const int64_t first = start / chunk, last = (stop - 1) / chunk;
  const int64_t whole = ceil_div(start, chunk), whole_end = stop / chunk;
  if (whole >= whole_end) return first == last ? of_chunk(first) : of_chunk(first) + of_chunk(last);
  int64_t pairs = (whole_end - whole) * of_chunk(whole);
  if (first < whole) pairs += of_chunk(first);
  if (last >= whole_end) pairs += of_chunk(last);
  return pairs;
}

}  // namespace flashattn
