// Softmax of a consumer warpgroup of the Hopper forward pass: base and sum of each row, and the
// exponentials that turn scores into P.
#pragma once

#include <cfloat>

#include "cuda/kernels/sm90/fwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

enum class KvHalf { kBoth, kLower, kUpper };  // the part of a KV tile whose scores are computed

template <class Config>
class FwdSoftmax : public FwdConsumer<Config> {
  using Base = FwdConsumer<Config>;

 public:
  using Base::storage_, Base::params_;
  using Base::work_tile, Base::lane, Base::row, Base::warpgroup_tile;
  using ScoreMod = FwdScoreMod<Config>;
  using AlibiRows = typename ScoreMod::AlibiRows;
  using AlibiTile = typename ScoreMod::AlibiTile;
  using T = typename Config::T;
  static constexpr int kTileKv = Config::kTileKv;
  // A maximum may exceed the base by this much, in log2, before the base rises; 0 in a redone tile.
  static constexpr float kBaseSlack = 8.0f;
  // log2 by which the base lies above the maximum of the first tile visited. bf16 has the range of
  // fp32: a first token 105 nats above it, visited last, leaves sums below kMaxRowSum, and products
  // with V are normal numbers down to |V| = 2^-86. Three CTAs per SM would lose 7 %.
  static constexpr bool kHasHeadroom = std::is_same<T, __nv_bfloat16>::value &&
                                       !Config::kHasAlibi && !Config::kOnlineSoftmax &&
                                       !Config::kIsFp8 && Config::kCtasPerSm < 3;
  static constexpr float kHeadroom = kHasHeadroom ? 40.0f : 0.0f;
  static constexpr float kScoreUnit = ScoreMod::kScoreUnit;
  // Scores of redone tiles are in these units.
  static constexpr float kRedoUnit = ScoreMod::kHoldsAllScores ? kScoreUnit : kWideUnit;

  __device__ __forceinline__ FwdSoftmax(const ForwardParams& params, uint32_t shared,
                                        SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup) {}

  __device__ __forceinline__ ScoreMod score_mod() const { return ScoreMod(*this); }

  // The first key of a half, relative to the tile.
  template <KvHalf kHalf>
  static constexpr int kFirstKey = kHalf == KvHalf::kUpper ? kTileKv / 2 : 0;

  // Waits for K of a stage and returns its KV tile: n, unless a block mask may hide tiles.
  __device__ __forceinline__ int32_t wait_k(const PipelineState<Config::kStages>& state,
                                            int32_t n) {
    storage_.k.consumer_wait(state);
    if constexpr (kMayHideTiles<Config>) {
      const volatile uint32_t& word = storage_.stage_tiles[state.stage()];
      const StageTile<Config::kConsumers> tile{word};
      block_mask_hides_keys_ = !tile.full(this->warpgroup_);
      block_mask_hides_tile_ = Config::kConsumers > 1 && !tile.visible(this->warpgroup_);
      n = tile.n();
    }
    return n;
  }

  // Begins a work tile: resets base and sum of each row, and finds the keys that it sees.
  __device__ __forceinline__ void reset_rows() {
    const Lengths len{work_tile().len.q, work_tile().len.kv};
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      softmax_base_[mi] = -INFINITY;
      row_sum_[mi] = 0.0f;
    }
    if (lane() < 16) {
      const int32_t r = row() - lane() / 4 + lane();
      storage_.visible_kv[r] =
          visible_keys(params_.problem.mask_rule(), this->query_of(work_tile().query + r), len);
      if constexpr (Config::kPacksHeads) {  // keys of the split; registers are scarce
        volatile Interval& keys = storage_.visible_kv[r];
        keys.begin = max(keys.begin, this->packed_tile().keys.begin);
        keys.end = min(keys.end, this->packed_tile().keys.end);
      }
    }
    __syncwarp();
  }

  // Whether a mask, other than a block mask, hides a key of tile n from a row.
  __device__ __forceinline__ bool is_masked(int32_t n) const {
    return n < warpgroup_tile().full_begin || n >= warpgroup_tile().full_end;
  }
  // For kernels without a block mask that ask is_masked() early: later its latency is exposed.
  __device__ __forceinline__ void apply_mask_if(bool is_masked, int32_t n) {
    if (is_masked) score_mod().apply_mask(s_, n * kTileKv);
  }

  __device__ __forceinline__ void apply_masks(int32_t n) {
    // is_masked(), written out: a call changes the code of all kernels.
    if (n < warpgroup_tile().full_begin || n >= warpgroup_tile().full_end) {
      score_mod().apply_mask(s_, n * kTileKv);
      if constexpr (Config::kPacksHeads) {
        if (params_.problem.mask & FLASHATTN_MASK_TREE) score_mod().apply_tree_mask(s_, n);
      }
    }
    if (kMayHideTiles<Config> && block_mask_hides_keys_) score_mod().apply_block_mask(s_, n);
  }

  // Raises each row's base to the tile's maximum, max(s) * c + base_bias, if that exceeds it by
  // more than the slack; paired rows rise together. o_scale: factor for O and the row sum.
  template <int kCount>
  __device__ __forceinline__ void update_base(const float (&s)[kCount], float c,
                                              const float (&base_bias)[2], bool redo,
                                              float (&o_scale)[2]) {
    float row_max[2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      constexpr int kChains = kCount < 16 ? kCount / 4 : 4;  // four chains hide latency
      float top[kChains];
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float x = fmaxf(s[4 * i + 2 * mi], s[4 * i + 2 * mi + 1]);
        top[i % kChains] = i < kChains ? x : fmaxf(top[i % kChains], x);
      }
#pragma unroll
      for (int x = kChains / 2; x > 0; x /= 2) {
#pragma unroll
        for (int i = 0; i < x; ++i) top[i] = fmaxf(top[i], top[i + x]);
      }
      float all = top[0];
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      row_max[mi] = fmaf(all, c, base_bias[mi] + (redo ? 0.0f : kHeadroom / kScoreUnit));
    }
    // In a redone tile P is at most 1, as O may have overflowed.
    const float slack = redo ? 0.0f : kBaseSlack / kScoreUnit;
    const float unit = log2_unit(redo);
    bool keep[2] = {!(row_max[0] > softmax_base_[0] + slack),
                    !(row_max[1] > softmax_base_[1] + slack)};
    if (score_mod().paired_rows()) {
      const float gap = score_mod().paired_base_gap();
      // A row past the last query must not change the bits of the row it is paired with.
      if (work_tile().query + row() + 8 >= work_tile().query_end) row_max[1] = -INFINITY;
      const float top = fmaxf(row_max[0], row_max[1] + gap);
      const bool is_paired = softmax_base_[1] == softmax_base_[0] - gap;
      keep[0] = keep[1] = is_paired && !(top > softmax_base_[0] + slack);
      row_max[0] = fmaxf(top, fmaxf(softmax_base_[0], softmax_base_[1] + gap));
      row_max[1] = row_max[0] - gap;
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float before = softmax_base_[mi];
      softmax_base_[mi] = keep[mi] ? before : row_max[mi];
      o_scale[mi] = keep[mi] ? 1.0f : ptx::exp2((before - row_max[mi]) * unit);
      row_sum_[mi] *= o_scale[mi];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void update_base(const float (&s)[kCount], float c,
                                              const float (&base_bias)[2]) {
    float o_scale[2];
    update_base(s, c, base_bias, false, o_scale);
  }

  // Turns scores into P = 2^exponent(score, i) and adds them to the row sums. The sum of a tile
  // comes first, so that a large row sum is rounded once per tile. In one chain per row, after the
  // exponentials: otherwise ptxas waits for P V before most of them (D = 64 with more chains: -4 %,
  // D = 128 with both in one loop: -2 %).
  template <int kCount, class Exponent>
  __device__ __forceinline__ void exp2_and_sum(float (&s)[kCount], Exponent exponent) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = ptx::exp2(exponent(s[i], i));
    float total[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& t = total[i / 2 % 2];
      t = i < 4 && i % 2 == 0 ? s[i] : t + s[i];
    }
    row_sum_[0] += total[0];
    row_sum_[1] += total[1];
  }

  template <int kCount>
  __device__ __forceinline__ void exp2_scaled(float (&s)[kCount], const float (&bases)[2]) {
    const float c = ScoreMod::exponent_scale(params_);
    exp2_and_sum(s, [&](float x, int i) { return fmaf(x, c, -bases[i / 2 % 2]); });
  }

  // P of a step that has updated the base.
  template <int kCount>
  __device__ __forceinline__ void exp2_online(float (&s)[kCount]) {
    exp2_scaled(s, {base(0), base(1)});
  }

  // P in a redone tile: the base is subtracted exactly.
  __device__ __forceinline__ void exp2_redo() {
    // base() would overflow near FLT_MAX.
    const float top[2] = {softmax_base_[0] == -INFINITY ? 0.0f : softmax_base_[0],
                          softmax_base_[1] == -INFINITY ? 0.0f : softmax_base_[1]};
    exp2_and_sum(s_, [&](float x, int i) { return __fsub_rn(x, top[i / 2 % 2]) * kRedoUnit; });
  }

  // P with ALiBi for keys on either side of the rows.
  template <int kCount>
  __device__ __forceinline__ void exp2_alibi_abs(float (&s)[kCount], const AlibiTile& tile) {
    exp2_and_sum(s, [&](float x, int i) {
      return fmaf(x, tile.scale, tile.alibi.add_to(-base(i / 2 % 2), SLayout(), i));
    });
  }

  template <int kCount>
  __device__ __forceinline__ void exp2_alibi(float (&s)[kCount], const AlibiTile& tile) {
    if (!tile.is_linear) return exp2_alibi_abs(s, tile);
    const LinearAlibi line = tile.line.plus({-base(0), -base(1)});
    exp2_and_sum(s, [&](float x, int i) { return fmaf(x, tile.scale, line.at(i)); });
  }

  // P with ALiBi of paired rows, all keys before them: one addend serves both rows. Each addend is
  // computed from the first column: a running sum is 2 to 3 % faster, but rounds too often for an
  // exact LSE. o is a result of P V, which small heads wait for: otherwise ptxas packs P after its
  // last element (-3 %).
  __device__ __forceinline__ void exp2_alibi_paired(const AlibiRows& alibi, int32_t n, float o) {
    const float c = ScoreMod::scale(params_);
    float first =
        fmaf(alibi.slope, static_cast<float>(n * kTileKv - alibi.diagonal), -softmax_base_[0]);
    // An ALiBi kernel has no softcap: input_scale is +0, which ptxas does not know.
    if (Config::kDimV < 128)
      first = ptx::order_after(first, o, __float_as_uint(params_.softcap.input_scale));
    const LinearAlibi line{alibi.slope, {first, first}};
    exp2_and_sum(s_, [&](float x, int i) { return fmaf(x, c, line.at(i)); });
  }

  // Softcap: by the polynomial of degree 3, fused into the exponent, if its range suffices for the
  // whole warp.
  __device__ __forceinline__ void exp2_softcap() {
    const FittedSoftcap softcap = ScoreMod::fitted_softcap(params_, 1.0f);
    if (softcap.cubic_serves(s_)) {
      exp2_and_sum(s_, [&](float x, int i) { return softcap.cubic(x, -softmax_base_[i / 2 % 2]); });
    } else {
      softcap.forward(SLayout(), s_, 1.0f);
      exp2_scaled(s_, softmax_base_);
    }
  }

  // The base in units of log2(e); in a redone tile, in the units of its scores. It is 0 for a row
  // that has seen no key, so that P is 0 and not NaN.
  __device__ __forceinline__ float base(int mi) const {
    return softmax_base_[mi] == -INFINITY ? 0.0f : softmax_base_[mi] * kScoreUnit;
  }

  // Factor from differences of scores to units of log2(e). redo: in a redone tile.
  static __device__ __forceinline__ float log2_unit(bool redo) {
    return redo && !Config::kIsFp8 ? kRedoUnit : kScoreUnit;
  }

  // Base, in natural units, and sum of row mi, to be merged with those of other keys. The sum is
  // brought into [1, 2): bases, which are not maxima, may differ by so much that weights made of
  // them alone would be 0.
  __device__ __forceinline__ PartialSum partial_sum(int32_t mi, bool redo) const {
    const float base = mi == 0 ? softmax_base_[0] : softmax_base_[1];
    const float sum = mi == 0 ? row_sum_[0] : row_sum_[1], unit = log2_unit(redo) * kLn2;
    if (!(sum >= FLT_MIN && sum <= FLT_MAX)) return {base * unit, sum};
    constexpr uint32_t kOne = 0x3f800000, kMantissa = 0x007fffff;
    const uint32_t bits = __float_as_uint(sum);
    const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;
    return {fmaf(base, unit, exponent * kLn2), __uint_as_float((bits & kMantissa) | kOne)};
  }

  // Reduces the row sums over the quad. P V has P rounded to T: where one key has a row's weight
  // (the only visible one, or one far above the first tile visited), excess_ is how far its rounded
  // P exceeds l. Divided by l + excess, O is V of that key, and dS = P (dP - delta) vanishes.
  __device__ __forceinline__ void total_rows(bool redo) {
    float top[2] = {row_sum_[0], row_sum_[1]};  // the largest sum of a lane
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        row_sum_[mi] += __shfl_xor_sync(~0u, row_sum_[mi], mask);
        if (kRoundsSingleKeys) top[mi] = fmaxf(top[mi], __shfl_xor_sync(~0u, top[mi], mask));
      }
    }
#pragma unroll
    for (int mi = 0; kRoundsSingleKeys && mi < 2; ++mi) {
      const bool single =
          Config::kHasAlibi ? this->visible_keys_of(mi) == 1 : !redo && top[mi] >= 1.0f;
      excess_[mi] =
          single && top[mi] == row_sum_[mi] ? __fsub_rn(round_to_type(top[mi]), top[mi]) : 0.0f;
    }
  }
  static constexpr bool kRoundsSingleKeys = (Config::kHasAlibi && !Config::kIsFp8) || kHasHeadroom;

  // Multiplies each row of O by its factor.
  template <int kCount>
  static __device__ __forceinline__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int x = 0; x < kCount; ++x) o[x] *= factor[x / 2 % 2];
  }

  // Rounds as pack_p() rounds P.
  static __device__ __forceinline__ float round_to_type(float x) {
    return ptx::unpack<T>(ptx::pack<T>(x, 0.0f)).x;
  }

  // The block mask hides a key, or all keys, of wait_k()'s last KV tile from this warpgroup.
  bool block_mask_hides_keys_ = false, block_mask_hides_tile_ = false;
  float softmax_base_[2];  // in the units of the scores: see log2_unit()
  float row_sum_[2];       // over this lane's columns
  float excess_[2];        // see total_rows()
  float s_[kTileKv / 2];
  float s_half_[kTileKv / 4];  // the scores of half a tile
};

}  // namespace flashattn::cuda::sm90
