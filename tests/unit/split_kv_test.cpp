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

// The kernels that pack heads: of each plan two, the larger for more rows. CTAs of a
// multiprocessor: of each, as registers and shared memory may have it.
struct PackedPlan {
  int32_t multiprocessors, tile_kv, small_ctas, large_ctas;
};

PackedTiling tiling_of(const PackedPlan& plan, int32_t log2_group, bool large) {
  const int64_t ctas = large ? plan.large_ctas : plan.small_ctas;
  return {log2_group, large ? 128 : 64, plan.tile_kv, ctas * plan.multiprocessors,
          plan.multiprocessors};
}

// Partial rows of a call, by the kernel that takes it.
int64_t packed_rows_used(const Problem& p, const PackedPlan& plan, int32_t log2_group,
                         const Shape& shape) {
  const bool large = int64_t{shape.seqlen_q} << log2_group > 64;
  const SplitRule rule = tiling_of(plan, log2_group, large).split_rule(p, shape);
  const int32_t splits = max_split_count(rule, {shape.seqlen_q, shape.seqlen_kv});
  const int64_t queries = std::min(shape.seqlen_q, rule.max_queries);
  return splits > 1 ? int64_t{splits} * shape.batch * p.heads_q * queries : 0;
}

void test_packed_workspace(Problem p, const PackedPlan& plan, int32_t group) {
  constexpr int32_t kPackedQueries[] = {1, 2, 9, 17, 33, 64, 65, 300, 1024, 4096};
  constexpr int32_t kPackedBatches[] = {1, 2, 5, 40};
  int32_t log2_group = 0;
  while (1 << log2_group < group) ++log2_group;
  p.heads_q = p.heads_kv * group;
  for (const int32_t batch : kPackedBatches) {
    for (const int32_t queries : kPackedQueries) {
      for (const int32_t keys : kKeys) {
        const Shape shape{batch, queries, keys, 0, 0};
        const int64_t used = packed_rows_used(p, plan, log2_group, shape);
        // The workspace of every shape that is at least as large holds them.
        for (const int32_t more : {1, 2, 7}) {
          for (const Shape& larger :
               {shape, Shape{batch * more, queries, keys, 0, 0},
                Shape{batch, queries * more, keys, 0, 0}, Shape{batch, queries, keys * more, 0, 0},
                Shape{batch * more, queries * more, keys * more, 0, 0}}) {
            const int64_t held = tiling_of(plan, log2_group, true).partial_rows(p, larger);
            CHECK(used <= held);
            if (used <= held) continue;
            printf(
                "%d multiprocessors, tile_kv %d, CTAs %d %d, %d x %d heads, dim_v %d: %d, %d, "
                "%d\n",
                plan.multiprocessors, plan.tile_kv, plan.small_ctas, plan.large_ctas, p.heads_kv,
                group, p.dim_v, batch, queries, keys);
          }
        }
      }
    }
  }
}

void test_packed_heads() {
  for (const int32_t multiprocessors : {132, 108, 78}) {
    for (const PackedPlan& plan :
         {PackedPlan{multiprocessors, 128, 1, 1}, PackedPlan{multiprocessors, 128, 2, 1},
          PackedPlan{multiprocessors, 64, 1, 1}}) {
      for (const int32_t dim_v : {8, 128}) {
        for (const int32_t group : {1, 3, 8, 64}) {
          for (const int32_t heads : {1, 8}) {
            Problem p = problem_of(1, 0, 0, 0);
            p.heads_kv = heads;
            p.dim_v = dim_v;
            test_packed_workspace(p, plan, group);
            p.layout = FLASHATTN_LAYOUT_PAGED_KV;
            test_packed_workspace(p, plan, group);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_packed_heads();
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
  // Row tiles, keys, elements of a key: as many CTAs as multiprocessors and steps allow, in a power
  // of two; none that would save little, or leave each CTA far more keys than splits of any number.
  const auto log2 = [](int64_t tiles, int64_t keys, int64_t elements, int32_t rows = 4) {
    return log2_cluster_ctas(tiles, rows, keys, elements, kStep, kUnits, {{0, 64, 32, 16, 8}});
  };
  CHECK(log2(8, 1024, 256) == 3 && log2(16, 8192, 256) == 3 && log2(32, 1024, 256) == 2);
  CHECK(log2(8, 8192, 256) == 4 && log2(8, 8192, 256, 16) == 0 && log2(8, 1024, 256, 16) == 3);
  CHECK(log2(64, 1024, 256) == 1 && log2(66, 1024, 256) == 0 && log2(67, 8192, 256) == 0);
  CHECK(log2(8, 512, 256) == 2 && log2(8, 256, 256) == 0 && log2(64, 512, 256) == 0);
  CHECK(log2(8, 512, 512) == 2 && log2(8, 512, 128) == 2 && log2(64, 512, 512) == 1);
  CHECK(log2(9, 4096, 256) == 0 && log2(1, 2048, 256) == 4 && log2(1, 8192, 256) == 0);
  CHECK(log2(1, 0, 256) == 0 && log2(200, 8192, 256) == 0);
  CHECK(log2_cluster_ctas(8, 4, 1024, 256, kStep, kUnits, {}) == 0);
  CHECK(log2_cluster_ctas(16, 4, 1024, 256, kStep, kUnits, {{0, 64, 32, 15, 0}}) == 2);
  // A split may be the caller's.
  CHECK(split_rule(problem_of(16, 0, 7, 0), {1, 1, 100, 0, 0}, 1, 64, false).splits == 7);
  CHECK(split_rule(problem_of(16, 0, 0, 0), {1, 1, 1000, 0, 0}, 4, 64, true).keys == 256);
  return check_report();
}
