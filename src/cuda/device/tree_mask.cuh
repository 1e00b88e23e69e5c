// Masks with a bit for each key. Trees of drafted tokens: a bit says whether a query sees one of
// the last keys. The problem of the kernel has a mask that hides nothing that a query may see
// (tree_hull()); this one hides the rest. Hidden pages: the sign of a page number is the bit.
#pragma once

#include "cuda/params.h"
#include "cuda/device/mask.cuh"
#include "cuda/device/score_stage.cuh"

namespace flashattn::cuda {

// The tree mask of one sequence.
struct TreeMask {
  static constexpr ScoreStage kStage = ScoreStage::kMask;
  static constexpr bool kBoundsGrowth = false, kReadsMemory = true;

  const TreeParams& params;
  int32_t b;
  Lengths len;

  // Whether every query sees every key.
  __device__ __forceinline__ bool full(Interval queries, Interval keys) const {
    return keys.end <= tree_begin(params.rule, len) &&
           (sees_all(params.rule) ||
            classify(key_span(params.rule, queries, len), keys) == TileKind::kFull);
  }

  __device__ __forceinline__ bool shows(int32_t query, int32_t key) const {
    const TreeRow row{params.bits + b * params.stride_batch + query * params.stride_row,
                      len.kv - params.rule.tree};
    const Interval before = keys_before_tree(params.rule, query, len);
    return key < tree_begin(params.rule, len) ? key >= before.begin && key < before.end
                                              : key < len.kv && row.shows(key);
  }

  // Bit 2 n + e says whether the lane's column 8 n + 2 (lane % 4) + e is shown. Columns are the
  // keys from `first` on.
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_keys(int32_t query, int32_t first, int32_t lane) const {
    static_assert(kMmaN <= 16, "the bits of a word");
    const Interval before = keys_before_tree(params.rule, query, len);
    const int32_t begin = tree_begin(params.rule, len);
    const TreeRow row{params.bits + b * params.stride_batch + query * params.stride_row,
                      len.kv - params.rule.tree};
    uint32_t bits = 0;
#pragma unroll 1
    for (int x = 0; x < 2 * kMmaN; ++x) {
      const int32_t j = first + x / 2 * 8 + lane % 4 * 2 + x % 2;
      const bool shown =
          j < begin ? j >= before.begin && j < before.end : j < len.kv && row.shows(j);
      bits |= static_cast<uint32_t>(shown) << x;
    }
    return {bits};
  }
};

// The hidden pages (PAGES) of one sequence, the same for all queries.
struct PageMask {
  const Problem& problem;
  const Inputs& in;
  int32_t b, keys;

  // As TreeMask::shown_keys().
  template <int kMmaN>
  __device__ __forceinline__ BitMask shown_keys(int32_t first, int32_t lane) const {
    const int32_t* const pages = in.page_table + b * in.page_table_stride;
    uint32_t bits = ~0u;
#pragma unroll 1
    for (int x = 0; x < 2 * kMmaN; ++x) {
      const int32_t j = first + x / 2 * 8 + lane % 4 * 2 + x % 2;
      if (j < keys && pages[j / problem.page_size] < 0) bits &= ~(1u << x);
    }
    return {bits};
  }
};

}  // namespace flashattn::cuda
