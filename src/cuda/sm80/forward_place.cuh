// What a block of the portable forward pass works on.
#pragma once

#include <cstring>

#include "cuda/tile/scores.cuh"
#include "cuda/tile/shared.cuh"

namespace flashattn::cuda::sm80 {

struct BlockPlace {
  Sequence sequence_;
  int32_t b_, kv_head_, part_, parts_, first_head_, heads_, count_, rows_;
  Interval queries_;
  Interval keys_, full_;  // that some, all queries of the block see, of its part

  // False: nothing to do.
  __device__ __forceinline__ bool locate(const ForwardParams& params) {
    const Problem& problem = params.problem;
    const int32_t per_section = params.section * params.query_blocks * params.parts;
    const int32_t section = blockIdx.x / per_section, rest = blockIdx.x % per_section;
    const int32_t width =
        min(params.section, static_cast<int32_t>(params.units()) - section * params.section);
    const int32_t unit = section * params.section + rest % width;
    // Late queries first: under a causal mask they take longest.
    const int32_t query_block = params.query_blocks - 1 - rest / (width * params.parts);
    part_ = rest / width % params.parts;
    const int32_t head_block = unit % params.head_blocks;
    kv_head_ = unit / params.head_blocks % problem.heads_kv;
    b_ = unit / params.head_blocks / problem.heads_kv;
    sequence_ = sequence_of(problem, params.args.shape, params.args.inputs, b_);
    const Lengths len = sequence_.len;
    parts_ = part_count(params.split, len);
    queries_.begin = clamp_index(static_cast<int64_t>(query_block) * params.queries, len.q);
    queries_.end = clamp_index(queries_.begin + static_cast<int64_t>(params.queries), len.q);
    first_head_ = kv_head_ * problem.group() + head_block * params.heads;
    heads_ = min(params.heads, problem.group() - head_block * params.heads);
    count_ = queries_.end - queries_.begin;
    rows_ = heads_ * count_;
    if (rows_ <= 0 || part_ >= parts_) return false;
    const KeySpan span = key_span(problem.mask_rule(), queries_, len);
    keys_ = intersect(span.any, part_range(params.split, len, part_));
    full_ = intersect(span.all, keys_);
    return true;
  }

  template <int kSize>
  __device__ __forceinline__ Rows rows_of(const ForwardParams& params,
                                          const flashattn_tensor& tensor) const {
    return kv_rows<kSize>(params.problem, params.args.inputs, tensor, opaque(b_), opaque(kv_head_),
                          sequence_.first_kv);
  }

  // words: the page numbers of the rows, where keys are paged.
  template <int kThreads, class Tile>
  __device__ __forceinline__ void load_keys(const ForwardParams& params, Tile shared,
                                            uint32_t words, const flashattn_tensor& tensor, int dim,
                                            int32_t first) const {
    const Rows rows = rows_of<Tile::kSize>(params, tensor);
    if (rows.pages) {
      PagedCopy<kThreads, Tile>::load(shared, words, dim, rows, first, sequence_.len.kv);
    } else {
      load_tokens<kThreads>(shared, dim, rows, first, sequence_.len.kv);
    }
  }

  // To shared memory and back.
  static constexpr int kWords = 20;

  __device__ __forceinline__ void store(uint32_t to) const {
    uint32_t words[kWords];
    memcpy(words, this, sizeof words);
#pragma unroll
    for (int x = 0; x < kWords; x += 4) {
      ptx::store_shared_16(to + x * 4, words[x], words[x + 1], words[x + 2], words[x + 3]);
    }
  }

  __device__ __forceinline__ void load(uint32_t from) {
    int4 words[kWords / 4];
#pragma unroll
    for (int x = 0; x < kWords / 4; ++x) words[x] = ptx::load_shared_16(from + x * 16);
    memcpy(this, words, sizeof words);
  }
};
static_assert(sizeof(BlockPlace) == BlockPlace::kWords * 4, "all of it");

}  // namespace flashattn::cuda::sm80
