// The work tile of a CTA of the portable forward and decode kernels.
#pragma once

#include <cstring>

#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm80 {

struct FwdWorkTile {
  SeqlenInfo seqlen_;
  int32_t b_, kv_head_, split_idx_, first_head_, heads_, q_count_, rows_;
  bool is_split_;  // the sequence has several KV splits, which the combine kernel merges
  Interval queries_;
  Interval keys_, full_keys_;  // keys of the split that some queries see, and that all see
  const char *k_, *v_;         // row 0 of K and V; if paged, of page 0

  // kSize: bytes of an element of K and V. False: the CTA has no work.
  template <int kSize>
  __device__ __forceinline__ bool init(const ForwardParams& params) {
    const Problem& problem = params.problem;
    const L2Swizzle::Tile at = params.swizzle.tile(blockIdx.x);
    // The last Q tiles run first: with a causal mask they take longest.
    const int32_t q_tile_from_end = params.by_splits.quotient(at.tile_idx);
    const int32_t q_tile = params.q_tiles - 1 - q_tile_from_end;
    split_idx_ = at.tile_idx - q_tile_from_end * params.max_splits;
    const int32_t batch_kv_head = params.by_head_tiles.quotient(at.head_idx);
    const int32_t first =
        (at.head_idx - batch_kv_head * params.head_tiles) * params.cta_heads;  // in the GQA group
    b_ = params.by_heads_kv.quotient(batch_kv_head);
    kv_head_ = batch_kv_head - b_ * problem.heads_kv;
    seqlen_ = seqlen_info(problem, params.args.shape, params.args.inputs, b_);
    const Lengths len = seqlen_.len;
    queries_.begin = min(q_tile * params.cta_queries, len.q);
    q_count_ = min(params.cta_queries, len.q - queries_.begin);
    queries_.end = queries_.begin + q_count_;
    first_head_ = kv_head_ * params.q_heads_per_kv_head + first;
    heads_ = min(params.cta_heads, params.q_heads_per_kv_head - first);
    rows_ = heads_ * q_count_;
    keys_ = full_keys_ = {0, len.kv};
    if (params.max_splits > 1) keys_ = full_keys_ = split_range(params.split, len, split_idx_);
    const bool combined = params.log2_cluster == 0;  // in a cluster CTAs wait for each other
    is_split_ = combined && keys_.end - keys_.begin < len.kv;
    if (rows_ <= 0 || (combined && split_idx_ > 0 && keys_.begin == keys_.end)) return false;
    if (!sees_all(problem.mask_rule())) {
      const KeySpan span = key_span(problem.mask_rule(), queries_, len);
      keys_ = intersect(span.any, keys_);
      full_keys_ = intersect(span.all, keys_);
    }
    const bool paged = problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
    const Inputs& in = params.args.inputs;
    k_ = tensor_row(in.k, kSize, paged ? 0 : b_, kv_head_, paged ? 0 : seqlen_.offset_kv);
    v_ = tensor_row(in.v, kSize, paged ? 0 : b_, kv_head_, paged ? 0 : seqlen_.offset_kv);
    return true;
  }

  // The query head, relative to first_head_, and the query, relative to queries_.begin, of row r.
  struct Row {
    int32_t head, query;
  };
  __device__ __forceinline__ Row row(int32_t r) const {
    if (heads_ == 1) return {0, r};
    if (q_count_ == 1) return {r, 0};
    const int32_t head = r / q_count_;
    return {head, r - head * q_count_};
  }

  __device__ __forceinline__ int32_t query_of(int32_t r) const {
    return queries_.begin + row(r).query;
  }

  // Whether rows have one stride in a tensor: they belong to one head, or to one query.
  __device__ __forceinline__ bool has_uniform_stride() const {
    return heads_ == 1 || q_count_ == 1;
  }
  template <int kSize>
  __device__ __forceinline__ int64_t row_bytes(const flashattn_tensor& t) const {
    return (heads_ == 1 ? t.stride_seq : t.stride_head) * kSize;
  }

  template <int kSize>
  __device__ __forceinline__ char* query_row(const flashattn_tensor& t, int32_t r) const {
    const Row at = row(r);
    return tensor_row(t, kSize, b_, first_head_ + at.head,
                      seqlen_.offset_q + queries_.begin + at.query);
  }

  // base: k_ or v_.
  template <int kSize>
  __device__ __forceinline__ PagedRowView paged_rows(const ForwardParams& params,
                                                     const flashattn_tensor& tensor,
                                                     const char* base) const {
    const Inputs& in = params.args.inputs;
    return {{base, tensor.stride_seq * kSize},
            in.page_table + no_hoist(b_) * in.page_table_stride,
            params.problem.page_size,
            tensor.stride_batch * kSize,
            in.pages};
  }

  // Starts cp.async of a tile of K or V from row `first` on. smem_pages: page numbers, if K and V
  // are paged.
  template <int kThreads, class Tile>
  __device__ __forceinline__ void load_kv(const ForwardParams& params, Tile shared,
                                          uint32_t smem_pages, const flashattn_tensor& tensor,
                                          const char* base, int dim, int32_t first) const {
    if (params.problem.layout & FLASHATTN_LAYOUT_PAGED_KV) {
      const PagedRowView rows = paged_rows<Tile::kSize>(params, tensor, base);
      PagedCopy<kThreads, Tile>::load(shared, smem_pages, dim, rows, first, seqlen_.len.kv);
    } else {
      const RowView rows{base, tensor.stride_seq * Tile::kSize};
      load_tokens<kThreads>(shared, dim, rows, first, seqlen_.len.kv);
    }
  }

  // Turns Q K^T into scores in units of kWideUnit log2(e), except for
  // WideMembers::remaining_factor(). first_key: the lane's. row_of(mma_m, half): rows of the lane.
  template <class ScoreMod, bool kExact, int kMmaM, int kMmaN, class RowOf>
  __device__ __forceinline__ void modify_scores(const ForwardParams& params,
                                                float (&s)[kMmaM][kMmaN][4], int32_t first_key,
                                                RowOf row_of) const {
    if constexpr (ScoreMod::kModifiesScores) {
      using Members = WideMembers<kExact>;
      const Problem& problem = params.problem;
      const float factor = Members::product_factor(problem);
      const auto members = [&](int32_t i, int32_t h, int32_t j) {
        return Members{problem, params.args.inputs, b_, h, seqlen_.len, i, j, i + 1};
      };
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ScoreMod::template forward_stage<ScoreStage::kProduct>(SLayout(), flat(s[mma_m]), factor,
                                                               problem, members(0, 0, 0));
      }
      if (!ScoreMod::template stage_is_on<ScoreStage::kBias>(problem)) {
        if (!Members::needs_product(problem)) return;
#pragma unroll
        for (int x = 0; x < kMmaM * kMmaN * 4; ++x) {
          float& score = s[x / (kMmaN * 4)][x / 4 % kMmaN][x % 4];
          score = __fmul_rn(score, factor);
        }
        return;
      }
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) {
        // Heads of a work tile have different biases. Rows past the last use its bias.
        const Row at = row(min(no_hoist(row_of(x / 2, x % 2)), rows_ - 1));
        ScoreMod::template forward_stage<ScoreStage::kBias>(
            SRowLayout{x % 2}, flat(s[x / 2]), factor, problem,
            members(queries_.begin + at.query, first_head_ + at.head, first_key));
      }
    }
  }

  // Sets the scores of keys that PAGES or TREE hides to -inf; TREE also applies the other masks to
  // keys before the tree. row_of(mma_m, half): rows of the lane.
  template <int kMmaM, int kMmaN, class RowOf>
  __device__ __forceinline__ void hide_by_bits(const ForwardParams& params,
                                               float (&s)[kMmaM][kMmaN][4], Interval columns,
                                               int lane, RowOf row_of) const {
    const Problem& problem = params.problem;
    if (problem.mask & FLASHATTN_MASK_PAGES) {
      const PageMask pages{problem, params.args.inputs, b_, seqlen_.len.kv};
      const BitMask shown = pages.shown_keys<kMmaN>(columns.begin, lane);
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) shown.forward(SRowLayout{x % 2}, flat(s[x / 2]));
    }
    if (!(problem.mask & FLASHATTN_MASK_TREE)) return;
    const TreeMask tree{params.tree, b_, seqlen_.len};
    if (tree.full(queries_, columns)) return;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int32_t i = query_of(min(row_of(x / 2, x % 2), rows_ - 1));
      tree.shown_keys<kMmaN>(i, columns.begin, lane).forward(SRowLayout{x % 2}, flat(s[x / 2]));
    }
  }

  // Words of this struct.
  static constexpr int kWords = 24;

  __device__ __forceinline__ void store_to_smem(uint32_t to) const {
    uint32_t words[kWords];
    memcpy(words, this, sizeof words);
#pragma unroll
    for (int x = 0; x < kWords; x += 4) {
      ptx::store_shared_16(to + x * 4, words[x], words[x + 1], words[x + 2], words[x + 3]);
    }
  }

  __device__ __forceinline__ void load_from_smem(uint32_t from) {
    int4 words[kWords / 4];
#pragma unroll
    for (int x = 0; x < kWords / 4; ++x) words[x] = ptx::load_shared_16(from + x * 16);
    memcpy(this, words, sizeof words);
  }

  static __device__ __forceinline__ const char* load_pointer(uint32_t from) {
    return reinterpret_cast<const char*>(ptx::load_shared_8(from));
  }
};
static_assert(sizeof(FwdWorkTile) == FwdWorkTile::kWords * 4, "words are copied");

}  // namespace flashattn::cuda::sm80
