// Where sequences lie, whatever starts and lengths say: inside the arrays, with the tiles of the
// workspace that are theirs; and what makes sense comes out as it is.
#include "core/seqlen_info.h"

#include <climits>
#include <random>
#include <vector>

#include "check.h"

using namespace flashattn;

namespace {

constexpr int32_t kBatch = 3;

struct Call {
  Problem problem{};
  Shape shape{};
  Inputs in{};
  int32_t cu[kBatch + 1], lens[kBatch], starts[kBatch] = {};

  // Of queries alone, or of keys, which may have starts, too.
  Call(bool keys, int64_t total, int32_t longest, bool has_lens, bool has_starts = false) {
    problem.layout = keys ? FLASHATTN_LAYOUT_VARLEN_KV : FLASHATTN_LAYOUT_VARLEN_Q;
    shape.batch = kBatch;
    (keys ? shape.seqlen_kv : shape.seqlen_q) = longest;
    (keys ? shape.total_kv : shape.total_q) = total;
    (keys ? in.cu_seqlens_kv : in.cu_seqlens_q) = cu;
    if (has_lens) (keys ? in.lens_kv : in.lens_q) = lens;
    if (has_starts) in.starts_kv = starts;
  }
};

struct Range {
  int64_t first;
  int32_t length;
};

Range range_of(const SeqlenInfo& s, bool keys) {
  return keys ? Range{s.offset_kv, s.len.kv} : Range{s.offset_q, s.len.q};
}

// Whether starts and lengths are such as a caller should give.
bool makes_sense(const Call& call, int64_t total, int32_t longest, bool has_lens) {
  if (call.cu[0] < 0 || call.cu[kBatch] > total) return false;
  for (int32_t b = 0; b < kBatch; ++b) {
    const int64_t capacity = int64_t{call.cu[b + 1]} - call.cu[b];
    if (capacity < 0) return false;
    const int64_t length = has_lens ? call.lens[b] : capacity;
    if (length < 0 || length > capacity || length > longest) return false;
    if (call.starts[b] < 0 || call.starts[b] > length) return false;
  }
  return true;
}

// Whether no tile, or row, is outside, and, of `apart`, none of two sequences.
bool tiles_fit(const HeadTiles& tiles, const Range (&ranges)[kBatch], bool apart) {
  int64_t next_tile = 0, next_row = 0;
  for (int32_t b = 0; b < kBatch; ++b) {
    const Range r = ranges[b];
    if (r.first < 0 || r.length < 0 || r.length > tiles.longest) return false;
    if (r.first + r.length > tiles.total) return false;
    // Its place is asked for, too, where it is empty.
    const int64_t first = tiles.first(r.first, b), end = first + ceil_div(r.length, tiles.rows);
    if (first < 0 || first >= tiles.count() || end > tiles.count()) return false;
    if (r.length == 0) continue;
    if (apart && (first < next_tile || r.first < next_row)) return false;
    next_tile = end;
    next_row = r.first + r.length;
  }
  return true;
}

bool right(const Call& call, bool keys, int64_t total, int32_t longest, bool has_lens) {
  Range found[kBatch], resolved[kBatch];
  SeqlenInfo sequences[kBatch];
  resolve_seqlens(call.problem, call.shape, call.in, sequences);
  for (int32_t b = 0; b < kBatch; ++b) {
    found[b] = range_of(seqlen_info(call.problem, call.shape, call.in, b), keys);
    resolved[b] = range_of(sequences[b], keys);
  }
  const bool sense = makes_sense(call, total, longest, has_lens);
  for (const int32_t rows : {1, 2, 3, 64}) {
    const HeadTiles tiles = keys ? HeadTiles::of_keys(call.problem, call.shape, rows)
                                 : HeadTiles::of_queries(call.problem, call.shape, rows);
    if (!tiles_fit(tiles, found, sense) || !tiles_fit(tiles, resolved, true)) return false;
  }
  for (int32_t b = 0; sense && b < kBatch; ++b) {
    const int32_t begin = call.cu[b] + call.starts[b];
    const int32_t length = (has_lens ? call.lens[b] : call.cu[b + 1] - call.cu[b]) - call.starts[b];
    if (found[b].first != begin || found[b].length != length) return false;
    if (resolved[b].first != begin || resolved[b].length != length) return false;
  }
  return true;
}

void check_all(bool keys, int32_t total, int32_t longest) {
  const int32_t edges[] = {INT_MIN, -1, 0, 1, total / 2, total, total + 1, INT_MAX};
  constexpr int32_t kEdges = sizeof edges / sizeof *edges;
  int failed = 0;
  for (int32_t n = 0; n < kEdges * kEdges * kEdges * kEdges; ++n) {
    for (const bool has_lens : {false, true}) {
      Call call(keys, total, longest, has_lens);
      for (int32_t i = 0, rest = n; i <= kBatch; ++i, rest /= kEdges) {
        call.cu[i] = edges[rest % kEdges];
      }
      for (int32_t b = 0; b < kBatch; ++b) call.lens[b] = edges[(n / 7 + 3 * b) % kEdges];
      failed += !right(call, keys, total, longest, has_lens);
    }
  }
  CHECK(failed == 0);
}

void check_random(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  int failed = 0;
  for (int round = 0; round < 200000; ++round) {
    const bool keys = below(2), has_lens = below(2), has_starts = keys && below(2);
    const int64_t total = below(10) == 0 ? int64_t{INT_MAX} + below(2) * 1000 : below(300);
    const int32_t longest = below(200);
    Call call(keys, total, longest, has_lens, has_starts);
    const auto any = [&] {
      const int32_t kind = below(8);
      if (kind == 0) return static_cast<int32_t>(random());
      return kind == 1 ? -below(300) : below(300);
    };
    for (int32_t& x : call.cu) x = any();
    if (below(2)) std::sort(call.cu, call.cu + kBatch + 1);
    for (int32_t& x : call.lens) x = any();
    if (has_starts) {
      for (int32_t& x : call.starts) x = any();
    }
    failed += !right(call, keys, total, longest, has_lens);
  }
  CHECK(failed == 0);
}

// Dense sequences: lengths beyond the shape's count as those.
void check_dense() {
  for (const int32_t length : {INT_MIN, -1, 0, 3, 7, 8, INT_MAX}) {
    Problem problem{};
    Shape shape{};
    shape.batch = 1;
    shape.seqlen_q = 7;
    shape.seqlen_kv = 5;
    Inputs in{};
    in.lens_q = in.lens_kv = &length;
    const SeqlenInfo s = seqlen_info(problem, shape, in, 0);
    CHECK(s.offset_q == 0 && s.len.q == clamp_index(length, 7));
    CHECK(s.offset_kv == 0 && s.len.kv == clamp_index(length, 5));
    for (const int32_t start : {INT_MIN, -1, 0, 2, 5, 6, INT_MAX}) {
      in.starts_kv = &start;
      const SeqlenInfo t = seqlen_info(problem, shape, in, 0);
      CHECK(t.offset_kv == clamp_index(start, s.len.kv) && t.offset_kv + t.len.kv == s.len.kv);
    }
    in.starts_kv = nullptr;
  }
}

// No length within the bounds makes more parts than partial results have room for.
void check_parts() {
  int failed = 0;
  for (const int32_t parts : {0, 1, 2, 3, 7}) {
    for (const int32_t keys : {1, 16, 50}) {
      for (const int32_t max_queries : {4, INT32_MAX}) {
        const SplitRule rule = SplitRule::of(parts, keys, max_queries, 16);
        for (int32_t most = 0; most <= 130; ++most) {
          const int32_t bound = max_split_count(rule, {9, most});
          for (int32_t q = 0; q <= 9; ++q) {
            for (int32_t kv = 0; kv <= most; ++kv) failed += split_count(rule, {q, kv}) > bound;
          }
        }
      }
    }
  }
  CHECK(failed == 0);
}

}  // namespace

int main() {
  for (const bool keys : {false, true}) {
    for (const int32_t total : {0, 1, 5, 64, 129}) {
      for (const int32_t longest : {0, 1, 4, 200}) check_all(keys, total, longest);
    }
  }
  check_random(1);
  check_dense();
  check_parts();
  return check_report();
}
