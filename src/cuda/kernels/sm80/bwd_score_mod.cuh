// The portable backward pass: its configuration, and the step of the P warps from S to P.
// Accumulators hold S^T: rows are keys, columns queries.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/bwd_work_tile.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/mma_gemm.cuh"

namespace flashattn::cuda::sm80 {

// ScoreMod: as in the forward pass. kDimSplit: the number of warp pairs that share their keys, see
// bwd.cuh.
template <class T_, int kDim_, int kMmaM_, int kWarpPairs_, int kTileQ_, int kSlice_, int kStages_,
          int kMinCtasPerSm_, class ScoreMod_, int kDimSplit_>
struct BwdConfig {
  using T = T_;
  static constexpr int kDim = kDim_;    // tile columns; smaller heads are padded
  static constexpr int kMmaM = kMmaM_;  // MMAs of 16 keys of a pair of warps
  static constexpr int kWarpPairs = kWarpPairs_, kDimSplit = kDimSplit_;
  static constexpr int kSlice = kSlice_;  // queries whose scores are held at once
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // limits registers
  using ScoreMod = ScoreMod_;
  static constexpr int kWarps = 2 * kWarpPairs, kThreads = 32 * kWarps;
  static constexpr int kTileQ = kTileQ_, kTileKv = 16 * kMmaM * kWarpPairs / kDimSplit;
  // Warps skip Q tiles that see none of their keys: another CTA on the multiprocessor makes use of
  // the time.
  static constexpr bool kSkipMaskedTiles = kMinCtasPerSm > 1 && kTileKv > kTileQ;
  // Whether own_pair() swaps keys; only where registers allow it.
  static constexpr bool kSwapKeys = kSkipMaskedTiles && kWarps == 4 && ScoreMod::kIsPlain;
  static constexpr bool kIsFp32 = std::is_same<T, float>::value;

  using KvTile = SmemTile<kTileKv, kDim, sizeof(T)>;
  using QTile = SmemTile<kTileQ, kDim, sizeof(T)>;
  // Rows are keys, of 128 bytes at the least.
  static constexpr int kScoreColumns = kTileQ * sizeof(T) < 128 ? 128 / sizeof(T) : kTileQ;
  using ScoreTile = SmemTile<kTileKv, kScoreColumns, sizeof(T)>;
  static constexpr int kRowStatBytes = 2 * kTileQ * 4;
  static constexpr int kStageBytes = 2 * QTile::kBytes;
  // One score tile per stage; with kDimSplit one more, of the P that two pairs read from each
  // other.
  static constexpr int kScoreTiles = kStages + kDimSplit - 1;
  static constexpr int kScoreTilesOffset = 2 * KvTile::kBytes + kStages * kStageBytes;
  static constexpr int kRowStatsOffset = kScoreTilesOffset + kScoreTiles * ScoreTile::kBytes;
  static constexpr int kWorkTileOffset = kRowStatsOffset + kStages * kRowStatBytes;
  static constexpr int kSharedBytes = kWorkTileOffset + sizeof(BwdWorkTile);
  // A warp computes scores of kWarpTileQ queries and accumulates kAccColumns columns.
  static constexpr int kWarpTileQ = kTileQ / kDimSplit, kAccColumns = kDim / kDimSplit;
  static_assert(kDimSplit == 1 ||
                    (kDimSplit == 2 && kWarpTileQ == kSlice && kAccColumns % 32 == 0 && !kIsFp32),
                "a slice, and whole groups of columns");
  static_assert(kDimSplit == 1 || !kSkipMaskedTiles, "two pairs wait for each other");
  // Named barriers: one per pair and slice; with kDimSplit one more per pair, for each role.
  static constexpr int kPairBarriers = kWarpPairs * (kWarpTileQ / kSlice);
  static_assert(kPairBarriers + (kDimSplit - 1) * kWarpPairs < 16, "as many barriers as there are");
  static_assert(kTileQ % 32 == 0 && 2 * kTileQ <= kThreads, "dQ: rows of warps, 32 queries each");
  static constexpr int kDqRowWarps = kTileQ / 32, kDqColumns = kDim * kDqRowWarps / kWarps;
  static_assert(kDqColumns % 16 == 0, "whole operands");
};

template <class Config>
class BwdScoreMod {
 protected:
  using T = typename Config::T;
  using ScoreMod = typename Config::ScoreMod;
  static constexpr int kMmaM = Config::kMmaM, kSlice = Config::kSlice;
  static constexpr int kTileQ = Config::kTileQ, kDimSplit = Config::kDimSplit;
  using ScoreTile = typename Config::ScoreTile;
  using ScoreFragment = float[kMmaM][kSlice / 8][4];
  using PackedFragment = PackedPair<T>[kMmaM][kSlice / 8][2];  // pairs of queries; rows g and g + 8

  __device__ __forceinline__ BwdScoreMod(const BackwardParams& params, BwdWorkTile& work_tile,
                                         uint32_t shared)
      : params_(params),
        work_tile_(work_tile),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_key_(own_pair(work_tile.roles_swapped) / kDimSplit * 16 * kMmaM) {}

  // Four warps run on four schedulers. If some keys are masked, the busy warps of two CTAs on a
  // multiprocessor should not run on the same two.
  static __device__ __forceinline__ int own_pair(int32_t roles_swapped) {
    const int warp = threadIdx.x / 32;
    return (Config::kSwapKeys ? warp ^ roles_swapped : warp) % Config::kWarpPairs;
  }

  // The warp's share of a tile's queries and of the accumulators' columns.
  static __device__ __forceinline__ int dim_split_idx() {
    return kDimSplit == 1 ? 0 : no_hoist(threadIdx.x) / 32 % kDimSplit;
  }

  // Score tile kStages holds the P that two pairs share.
  __device__ __forceinline__ ScoreTile score_tile(int stage) const {
    return {shared_ + Config::kScoreTilesOffset + stage * ScoreTile::kBytes};
  }

  // Address of a stage's lse; delta follows.
  __device__ __forceinline__ uint32_t row_stats(int stage) const {
    return shared_ + Config::kRowStatsOffset + stage * Config::kRowStatBytes;
  }

  // Address of the lane's pairs of queries from column `slice` on in a score tile, for row 0 of the
  // warp.
  __device__ __forceinline__ uint32_t pairs_address(int stage, int slice) const {
    return ScoreTile::advance(score_tile(stage).element(warp_key_ + lane_ / 4, lane_ % 4 * 2),
                              slice / ScoreTile::kChunkElements);
  }

  // Address, from there, of the pair 8 n columns further in row `half` (0: g, 1: g + 8) of MMA
  // mma_m.
  static __device__ __forceinline__ uint32_t pair_address(uint32_t pairs, int n, int mma_m,
                                                          int half) {
    return ScoreTile::advance(pairs, n * 8 / ScoreTile::kChunkElements) +
           (mma_m * 16 + half * 8) * ScoreTile::kRowBytes;
  }

  // The score tile in which the dS warp finds P: without score modifications it is the one that the
  // other pair reads, too.
  static __device__ __forceinline__ int p_tile(int stage) {
    return kDimSplit == 2 && ScoreMod::kIsPlain ? Config::kStages : stage;
  }

  // The key that accumulator row `half` (0: g, 1: g + 8) of MMA mma_m stands for.
  __device__ __forceinline__ int32_t key_of(int mma_m, int half) const {
    return work_tile_.keys.begin + warp_key_ + mma_m * 16 + half * 8 + lane_ / 4;
  }

  // Whether a query of the tile may see a key of the warp; without block masks.
  __device__ __forceinline__ bool sees_some(Interval queries) const {
    const int32_t j = work_tile_.keys.begin + warp_key_;
    if (j >= work_tile_.keys.end) return false;
    const Interval seen =
        relative_queries(params_.problem.mask_rule(), j, work_tile_.sequence.len, queries.begin);
    return seen.begin < kTileQ && seen.end + kMmaM * 16 > 1;
  }

  // Turns S into P, as operands, and stores it for the other warps. The dS warp gets P times the
  // derivative of the score modification, negative where dropout drops it.
  __device__ __forceinline__ void compute_p(ScoreFragment& s, PackedFragment& p, Step step,
                                            Interval queries, bool full, int stage,
                                            int slice) const {
    const uint32_t lse = row_stats(stage) + (slice + lane_ % 4 * 2) * 4;
    const uint32_t to = pairs_address(p_tile(stage), slice);
    if constexpr (ScoreMod::kModifiesScores) {
      modify(s, p, step, queries, full, lse, to, slice);
      if constexpr (kDimSplit == 2) {
        const uint32_t shared = pairs_address(Config::kStages, slice);
        visit_scores([&](int mma_m, int n, int x) {
          if (x % 2 == 0) p[mma_m][n][x / 2].store_shared(pair_address(shared, n, mma_m, x / 2));
        });
      }
      return;
    }
    // fp32 with large heads computes the factor each time: registers are scarce.
    constexpr bool kRecomputeFactor = Config::kIsFp32 && Config::kDim > 128;
    const uint32_t scale = __float_as_uint(params_.problem.scale);
    const float factor = __uint_as_float(kRecomputeFactor ? no_hoist(scale) : scale) * kLog2E;
    if (has_large_lse()) subtract_bases(s, step, queries, slice);
    if (!full) mask(s, queries, slice);
    float2 next = ptx::load_shared_pair(lse);
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
      const float2 row = next;
      if (n + 1 < kSlice / 8) next = ptx::load_shared_pair(lse + (n + 1) * 32);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = &s[mma_m][n][half * 2];
          p[mma_m][n][half] = PackedPair<T>::of(ptx::exp2(fmaf(x[0], factor, -row.x)),
                                                ptx::exp2(fmaf(x[1], factor, -row.y)));
          p[mma_m][n][half].store_shared(pair_address(to, n, mma_m, half));
        }
      }
    }
  }

 private:
  // Whether rows have a softmax base. Read each time: registers are scarce.
  __device__ __forceinline__ bool has_large_lse() const {
    return static_cast<const volatile int32_t&>(work_tile_.large_lse);
  }

  // Subtracts the bases of rows that have one; the unit of the scores is positive.
  __device__ __forceinline__ void subtract_bases(ScoreFragment& s, Step step, Interval queries,
                                                 int slice) const {
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t i = queries.begin + slice + no_hoist(threadIdx.x) % 4 * 2 + n * 8 + e;
        const RowBase base(params_.softmax_base[params_.row(no_hoist(work_tile_.b), step.head,
                                                            work_tile_.sequence.offset_q) +
                                                min(i, queries.end - 1)]);
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          float& score = s[x / 2][n][x % 2 * 2 + e];
          score = base.subtract_from(score);
        }
      }
    }
  }

  // Sets scores that the mask hides to -inf; without block masks.
  __device__ __forceinline__ void mask(ScoreFragment& s, Interval queries, int slice) const {
    MaskRule rule = params_.problem.mask_rule();
    const Lengths len = work_tile_.sequence.len;
    const int32_t first = queries.begin + slice + lane_ % 4 * 2, j = no_hoist(key_of(0, 0));
    const Interval seen = relative_queries(rule, j, len, first);
    rule.mask &= FLASHATTN_MASK_CHUNK | FLASHATTN_MASK_TOP_LEFT;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      Interval own = intersect({seen.begin + x * 8, seen.end + x * 8},
                               {queries.begin - first, queries.end - first});
      if (rule.mask & FLASHATTN_MASK_CHUNK) {
        const Interval chunk = visible_queries(rule, j + x * 8, len);
        own = intersect(own, {chunk.begin - first, chunk.end - first});
      }
      if (j + x * 8 >= work_tile_.keys.end) own.end = own.begin;
      IntervalMask{own.begin, own.end - own.begin}.forward(SRowLayout{x % 2}, flat(s[x / 2]));
    }
  }

  // Sets scores that the block mask hides to -inf.
  __device__ __forceinline__ void apply_block_mask(ScoreFragment& s, Step step, Interval queries,
                                                   int slice) const {
    const BlockMask blocks =
        BlockMask::of(params_.problem, params_.args.inputs, work_tile_.b, step.head);
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int32_t j = min(no_hoist(key_of(x / 2, x % 2)), work_tile_.keys.end - 1);
      blocks.shown_queries<kSlice / 8>(j, queries.begin + slice, queries.end, lane_)
          .forward(SRowLayout{x % 2}, flat(s[x / 2]));
    }
  }

  // Turns S into P by way of modified scores, in units of kWideUnit log2(e), from which the base of
  // the row, if it has one, and lse are subtracted. A hidden score is -inf, whatever it was.
  __device__ __forceinline__ void modify(ScoreFragment& s, PackedFragment& p, Step step,
                                         Interval queries, bool full, uint32_t lse, uint32_t to,
                                         int slice) const {
    const auto make_members = [&] {
      return WideMembers<Config::kIsFp32>{params_.problem,
                                          params_.args.inputs,
                                          work_tile_.b,
                                          step.head,
                                          work_tile_.sequence.len,
                                          queries.begin + slice + lane_ % 4 * 2,
                                          key_of(0, 0),
                                          queries.end};
    };
    const auto members = make_members();
    const float factor = members.product_factor(params_.problem);
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      ScoreMod::template forward_stage<ScoreStage::kProduct>(StLayout<>(), flat(s[mma_m]), factor,
                                                             params_.problem, members);
    }
    ScoreFragment addend;
    visit_scores([&](int mma_m, int n, int x) { addend[mma_m][n][x] = s[mma_m][n][x] * factor; });
    // The members are made again or kept, whichever takes fewer registers.
    ScoreMod::add_biases(StLayout<kSlice / 2>(), flat(addend), params_.problem,
                         kDimSplit == 2 ? make_members() : members);
    if (!full) mask(addend, queries, slice);
    if (!step.block_mask_full) apply_block_mask(addend, step, queries, slice);

    if (has_large_lse()) subtract_bases(addend, step, queries, slice);
    visit_scores([&](int mma_m, int n, int x) {
      const float2 row = ptx::load_shared_pair(lse + n * 32);
      addend[mma_m][n][x] = fmaf(addend[mma_m][n][x], kWideUnit, x % 2 == 0 ? -row.x : -row.y);
    });
    // From here on the addend is P times the derivative of the score modification.
    const bool differs = ScoreMod::template stage_is_on<ScoreStage::kProduct>(params_.problem);
    visit_scores([&](int mma_m, int n, int x) {
      const float t = s[mma_m][n][x], p = ptx::exp2(addend[mma_m][n][x]);
      s[mma_m][n][x] = p;
      // A hidden score may be anything: its derivative is not used.
      addend[mma_m][n][x] = differs && p != 0.0f ? p * ScoreMod::derivative_at(t) : p;
    });
    if (params_.dropout_threshold != 0) {
      const Dropout dropout =
          Dropout::of(params_.problem, params_.args.inputs, work_tile_.b, step.head);
      dropout.visit_dropped<kMmaM, kSlice / 8, true>(
          params_.dropout_threshold, work_tile_.keys.begin + warp_key_, queries.begin + slice,
          lane_, [&](int mma_m, int n, int x) {
            s[mma_m][n][x] = 0.0f;
            addend[mma_m][n][x] = -addend[mma_m][n][x];
          });
    }
    visit_scores([&](int mma_m, int n, int x) {
      if (x % 2 != 0) return;
      p[mma_m][n][x / 2] = PackedPair<T>::of(s[mma_m][n][x], s[mma_m][n][x + 1]);
      PackedPair<T>::of(addend[mma_m][n][x], addend[mma_m][n][x + 1])
          .store_shared(pair_address(to, n, mma_m, x / 2));
    });
  }

  template <class Visit>
  static __device__ __forceinline__ void visit_scores(Visit visit) {
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
#pragma unroll
      for (int x = 0; x < kMmaM * 4; ++x) visit(x / 4, n, x % 4);
    }
  }

 protected:
  const BackwardParams& params_;
  BwdWorkTile& work_tile_;
  const uint32_t shared_;
  const int lane_, warp_key_;
};

}  // namespace flashattn::cuda::sm80
