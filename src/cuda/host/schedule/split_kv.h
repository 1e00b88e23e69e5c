// How many splits of the keys the forward kernels of a plan make. Pure.
#pragma once

#include <algorithm>

#include "core/seqlen_info.h"

namespace flashattn {

constexpr int32_t kInvariantKeys = 1024;  // keys of a split, with BATCH_INVARIANT
constexpr int32_t kInvariantQueries = 16;
constexpr int32_t kSplitStep = 64;
// If sequences may be uneven: the least keys of a split, and the most waves of CTAs. CTAs of splits
// that a sequence does not have end after some ns.
constexpr int64_t kUnevenKeys = 2048;
constexpr int64_t kUnevenWaves = 5;

// Whether keys are packed or paged, so that every sequence has its own number of keys.
inline bool has_own_lengths(const Problem& problem) {
  return problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV) ||
         problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
}

// Whether there are more than a few sequences and their lengths may differ much. With one CTA
// each, most multiprocessors would then wait for the longest.
inline bool may_be_uneven(const Problem& problem, const Shape& shape, int32_t multiprocessors) {
  return shape.batch > 1 && has_own_lengths(problem) &&
         4 * static_cast<int64_t>(shape.batch) * problem.heads_kv > multiprocessors;
}

struct SplitGrid {
  int64_t ctas;      // without splits; not 0
  int64_t one_wave;  // CTAs that keep enough bytes in flight if all have equal work
  int64_t resident;  // CTAs that run at once
  bool uneven;       // sequences may be uneven
};

// Enough splits to fill the device with one wave, if they pay for their merge. Uneven sequences:
// more waves.
inline int64_t one_wave_splits(const Problem& problem, const Shape& shape, const SplitGrid& grid,
                               int32_t multiprocessors) {
  int64_t splits = std::min((grid.uneven ? grid.resident : grid.one_wave) / grid.ctas,
                            ceil_div(shape.seqlen_kv, 2 * kSplitStep));
  if (grid.uneven) {
    const int64_t most = shape.seqlen_kv / kUnevenKeys;
    splits = std::max(splits, splits_of_full_waves(grid.ctas, grid.resident, kUnevenWaves, most));
  }
  const int64_t rows = static_cast<int64_t>(shape.batch) * problem.heads_q * shape.seqlen_q;
  return pays_to_split(rows, shape.seqlen_kv, splits, grid.ctas, multiprocessors) ? splits : 1;
}

// at_once[n]: clusters of 2^n CTAs that the device runs at once.
constexpr int32_t kMaxLog2Cluster = 4;
struct ClusterLimits {
  int32_t at_once[kMaxLog2Cluster + 1];
};

// log2 of the CTAs of a cluster that share a row tile's keys and merge their results; 0: no
// cluster. A cluster saves the combine kernel, but its size is a power of two, it starts later than
// single CTAs, and each CTA sends its rows. Fitted to an H200 whose caches hold neither keys nor
// code: heads of 64 to 256, 512 to 8k keys, 1 to 64 row tiles. key_elements: elements of a key in K
// and V together.
constexpr int64_t kLeastClusterKeys = 384, kMostKeysMore = 16;  // the latter per row tile
constexpr int32_t kFewClusterRows = 8;  // with more, half as many CTAs at most
constexpr int32_t log2_cluster_ctas(int64_t row_tiles, int32_t rows, int64_t keys,
                                    int64_t key_elements, int32_t step, int64_t one_wave,
                                    const ClusterLimits& limits) {
  const int64_t splits = std::min(one_wave / row_tiles, ceil_div(keys, step));
  const int32_t most = kMaxLog2Cluster - (rows > kFewClusterRows);
  int32_t log2 = 0;
  while (log2 < most && splits >> (log2 + 1) > 0 && row_tiles <= limits.at_once[log2 + 1]) ++log2;
  if (log2 == 0) return 0;
  const int64_t own = ceil_div(keys, 1 << log2), more = own - ceil_div(keys, splits);
  const int64_t saved = (keys - own) * std::max<int64_t>(key_elements, 256) / 256;
  return saved >= kLeastClusterKeys && more <= kMostKeysMore * row_tiles ? log2 : 0;
}

// The number of splits with which a kernel of one CTA per multiprocessor ends first, in whole
// waves. step: keys of one step of the kernel. The time unit is a CTA's time for one key, some 20
// ns (latent attention: 34 clocks of the tensor cores). The start and end of a CTA take 250; the
// merge takes 150 and, for writing and reading partial results, 1/20 per row and split: estimates,
// not measured.
constexpr int64_t kMostWaves = 3;
constexpr int64_t whole_wave_splits(int64_t ctas, int64_t keys, int64_t rows, int64_t resident,
                                    int64_t step) {
  const int64_t steps = ceil_div(keys, step), most = kMostWaves * resident / ctas;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits == 1 || splits <= std::min(steps, most); ++splits) {
    const int64_t waves = ceil_div(ctas * splits, resident);
    const int64_t merge = splits > 1 ? 150 + rows * splits / 20 : 0;
    const int64_t time = waves * (ceil_div(steps, splits) * step + 250) + merge;
    if (time >= least) continue;
    least = time;
    best = splits;
  }
  return best;
}

// splits: their number, unless the caller or BATCH_INVARIANT sets it. step: splits start at
// multiples of it. uneven: splits have equal length for short and long sequences.
inline SplitRule split_rule(const Problem& problem, const Shape& shape, int64_t splits,
                            int32_t step, bool uneven) {
  if (problem.splits > 0) return SplitRule::of(problem.splits, 0, INT32_MAX, step);
  if (problem.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT) {
    return SplitRule::of(0, kInvariantKeys, kInvariantQueries, kSplitStep);
  }
  const SplitRule rule = SplitRule::of(static_cast<int32_t>(splits), 0, INT32_MAX, step);
  if (!uneven) return rule;
  const int32_t keys = split_keys(rule, {shape.seqlen_q, shape.seqlen_kv});
  return SplitRule::of(0, std::max(keys, 1), INT32_MAX, step);
}

// The most fp32 rows of partial results that this shape or a smaller one needs; a smaller one has
// fewer CTAs and may have more splits. rule: the shape's. limit: the rows of all CTAs of the most
// waves, which splits never exceed unless the caller or BATCH_INVARIANT sets their number.
inline int64_t partial_rows(const Problem& problem, const Shape& shape, const SplitRule& rule,
                            int64_t limit) {
  const int64_t queries = std::min(shape.seqlen_q, rule.max_queries);
  const int64_t rows = static_cast<int64_t>(shape.batch) * problem.heads_q * queries;
  if (problem.splits == 1) return 0;
  if (problem.splits > 1 || problem.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT) {
    const int32_t splits = max_split_count(rule, {shape.seqlen_q, shape.seqlen_kv});
    return splits > 1 ? rows * splits : 0;
  }
  if (shape.seqlen_kv < 4 * kSplitStep) return 0;
  return std::min(limit, rows * ceil_div(shape.seqlen_kv, 2 * kSplitStep));
}

// A kernel whose Q tiles hold the queries of all query heads of a KV head, whose number is rounded
// up to a power of two.
struct PackedTiling {
  int32_t log2_group, tile_q, tile_kv;
  int64_t resident;  // CTAs that run at once
  int32_t multiprocessors;

  // Q tiles of a KV head of a sequence.
  constexpr int64_t row_tiles(const Shape& shape) const {
    return std::max<int64_t>(ceil_div(int64_t{shape.seqlen_q} << log2_group, tile_q), 1);
  }

  SplitRule split_rule(const Problem& problem, const Shape& shape) const {
    const int64_t ctas = int64_t{shape.batch} * problem.heads_kv * row_tiles(shape);
    // A key takes half as long, and a row of partial results dim_v / 512 as long, as in latent
    // attention, for which whole_wave_splits() counts.
    const int64_t merged =
        static_cast<int64_t>(shape.batch) * problem.heads_q * shape.seqlen_q * problem.dim_v / 512;
    // partial_rows() assumes at least this many keys in a split.
    const int32_t least_keys = std::max(tile_kv, 2 * kSplitStep);
    const int64_t splits = whole_wave_splits(
        std::max<int64_t>(ctas, 1), ceil_div(shape.seqlen_kv, 2), merged, resident, least_keys / 2);
    return flashattn::split_rule(problem, shape, splits, tile_kv,
                                 may_be_uneven(problem, shape, multiprocessors));
  }

  // partial_rows() of the plan, if this is the largest of its kernels.
  int64_t partial_rows(const Problem& problem, const Shape& shape) const {
    return flashattn::partial_rows(problem, shape, split_rule(problem, shape),
                                   kMostWaves * resident * tile_q);
  }
};

}  // namespace flashattn
