// How many splits of the keys plans for GPUs make, and whether their workspace holds what these
// leave, of a shape and of all smaller ones.
#include "cuda/host/schedule/split_kv.h"

#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

constexpr int32_t kUnits = 132, kTileQ = 64, kStep = 128;

Problem problem_of(int32_t heads, uint32_t layout, int32_t splits, int32_t determinism) {
  Problem p{};
  p.heads_q = heads;
  p.heads_kv = 1;
  p.layout = layout;
  p.splits = splits;
  p.determinism = determinism;
  return p;
}

int64_t ctas_of(const Problem& p, const Shape& shape) {
  return ceil_div(int64_t{shape.seqlen_q} * p.heads_q, kTileQ) * shape.batch;
}

SplitRule rule_of(const Problem& p, const Shape& shape) {
  const int64_t rows = int64_t{shape.batch} * p.heads_q * shape.seqlen_q;
  return split_rule(p, shape,
                    whole_wave_splits(ctas_of(p, shape), shape.seqlen_kv, rows, kUnits, kStep),
                    kStep, may_be_uneven(p, shape, kUnits));
}

int64_t rows_reserved(const Problem& p, const Shape& shape) {
  return partial_rows(p, shape, rule_of(p, shape), kMostWaves * kUnits * kTileQ);
}

// Partial rows of a call.
int64_t rows_used(const Problem& p, const Shape& shape) {
  const SplitRule rule = rule_of(p, shape);
  const int32_t splits = max_split_count(rule, {shape.seqlen_q, shape.seqlen_kv});
  const int64_t queries = std::min(shape.seqlen_q, rule.max_queries);
  return splits > 1 ? int64_t{splits} * shape.batch * p.heads_q * queries : 0;
}

constexpr int32_t kBatches[] = {1, 2, 3, 32, 40, 66, 133, 200}, kQueries[] = {1, 2, 5, 17};
constexpr int32_t kKeys[] = {1, 64, 129, 255, 256, 300, 1000, 4096, 5000, 65536};

void test_workspace(const Problem& p) {
  for (const int32_t batch : kBatches) {
    for (const int32_t queries : kQueries) {
      for (const int32_t keys : kKeys) {
        const int64_t reserved = rows_reserved(p, {batch, queries, keys, 0, 0});
        for (const int32_t b : kBatches) {
          for (const int32_t q : kQueries) {
            for (const int32_t k : kKeys) {
              if (b > batch || q > queries || k > keys) continue;
              CHECK(rows_used(p, {b, q, k, 0, 0}) <= reserved);
            }
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const int32_t heads : {1, 20, 128}) {
    for (const uint32_t layout : {0u, static_cast<uint32_t>(FLASHATTN_LAYOUT_PAGED_KV)}) {
      test_workspace(problem_of(heads, layout, 0, 0));
      test_workspace(problem_of(heads, layout, 3, 0));
      test_workspace(problem_of(heads, layout, 0, FLASHATTN_DETERMINISM_BATCH_INVARIANT));
    }
  }
  // CTAs, keys, rows: one full wave; two waves that are nearly full; few keys a split.
  CHECK(whole_wave_splits(64, 8192, 4096, kUnits, kStep) == 2);
  CHECK(whole_wave_splits(32, 8192, 512, kUnits, kStep) == 4);
  CHECK(whole_wave_splits(80, 8192, 5120, kUnits, kStep) == 3);
  CHECK(whole_wave_splits(2, 4096, 128, kUnits, kStep) == 32);
  CHECK(whole_wave_splits(128, 8192, 8192, kUnits, kStep) == 1);
  CHECK(whole_wave_splits(512, 4096, 32768, kUnits, kStep) == 1);
  CHECK(whole_wave_splits(1, 1, 1, kUnits, kStep) == 1);
  // A split may be the caller's.
  CHECK(split_rule(problem_of(16, 0, 7, 0), {1, 1, 100, 0, 0}, 1, 64, false).splits == 7);
  CHECK(split_rule(problem_of(16, 0, 0, 0), {1, 1, 1000, 0, 0}, 4, 64, true).keys == 256);
  return check_report();
}
