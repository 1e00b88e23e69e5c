// Softmax of a consumer warpgroup of the Hopper forward pass: base and sum of each row, and the
// exponentials that turn scores into P.
#pragma once

#include <cfloat>

#include "cuda/kernels/sm90/fwd_epilogue.cuh"
#include "cuda/kernels/sm90/fwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

enum class KvHalf { kBoth, kLower, kUpper };  // the part of a KV tile whose scores are computed

template <class Config, class Epilogue = FwdEpilogue<Config>>
class FwdSoftmax : protected FwdConsumer<Config> {
  using Base = FwdConsumer<Config>;

 protected:
  using Base::storage_, Base::params_;
  using Base::work_tile, Base::lane, Base::row, Base::warpgroup_tile;
  using ScoreMod = FwdScoreMod<Config>;
  using AlibiRows = typename ScoreMod::AlibiRows;
  using AlibiTile = typename ScoreMod::AlibiTile;
  using OAccum = typename Epilogue::OAccum;
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

  __device__ __forceinline__ void apply_masks(int32_t n) {
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

  // Adds the sink, of any size, to bases and row sums. o_scale: factor for the sum of the keys.
  // Returns whether the sink is finite but overflows these units.
  __device__ __forceinline__ bool add_sink(bool redo, float (&o_scale)[2]) {
    const float unit = log2_unit(redo);
    const auto add = [&](int mi, float sink) {
      const float keys = row_sum_[mi] == 0.0f ? -INFINITY : softmax_base_[mi];
      const float top = fmaxf(keys, sink);
      o_scale[mi] = keys == top ? 1.0f : ptx::exp2((keys - top) * unit);
      row_sum_[mi] *= o_scale[mi];
      if (top != -INFINITY) row_sum_[mi] += ptx::exp2((sink - top) * unit);
      softmax_base_[mi] = top;
    };
    if (!this->is_first_part()) return false;
    if constexpr (Config::kPacksHeads) {
      bool overflows = false;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        const int32_t i = row() + mi * 8;
        const float natural = this->has_head(i) ? params_.args.inputs.sink[this->head_of(i)] : 0.0f;
        const float sink = natural * (kLog2E / unit);
        add(mi, sink);
        overflows |= sink == INFINITY && natural < INFINITY;
      }
      return overflows;
    } else {
      const float natural = params_.args.inputs.sink[work_tile().h],
                  sink = natural * (kLog2E / unit);
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) add(mi, sink);
      return sink == INFINITY && natural < INFINITY;
    }
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
  static constexpr bool kRoundsSingleKeys = Config::kHasAlibi || kHasHeadroom;

  // Computes the factor of O per row, and adds the sink to the row sums. Returns whether the sink
  // is finite but overflows these units.
  template <bool kShort>
  __device__ __forceinline__ bool o_factors(bool redo, float (&factor)[2]) {
    bool sink_overflows = false;
    float o_scale[2] = {1.0f, 1.0f};
    if (!kShort && params_.problem.features & FLASHATTN_FEATURE_SINK)
      sink_overflows = add_sink(redo, o_scale);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float sum =
          kRoundsSingleKeys ? fmaf(excess_[mi], o_scale[mi], row_sum_[mi]) : row_sum_[mi];
      factor[mi] =
          sum == 0.0f ? 0.0f : ptx::reciprocal(sum) * o_scale[mi] * score_mod().dropout_scale();
    }
    return sink_overflows;
  }

  // Queues the tile for a redo if a sum l (without the sink) or a base is out of range, if O is not
  // finite, or if a row of a single key may differ from V of that key.
  template <bool kShort>
  __device__ __forceinline__ void check_rows(const float (&l)[2], const float (&base)[2],
                                             const bool (&nonfinite)[2], bool sink_overflows,
                                             bool redo) {
    const bool fp32 = !kShort && params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    // A NaN in a sum or base is in O, too.
    const bool usual = !Config::kHasAlibi && fminf(l[0], l[1]) >= kMinRowSum &&
                       fmaxf(l[0], l[1]) <= kMaxRowSum && !nonfinite[0] && !nonfinite[1] &&
                       fmaxf(fabsf(base[0]), fabsf(base[1])) <= kLargeScore / kScoreUnit;
    if (__all_sync(~0u, usual) && !sink_overflows && !fp32) return;
    bool base_overflowed = sink_overflows;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      int32_t keys = this->visible_keys_of(mi);
      // Bits of a tree may leave one key.
      if (Config::kPacksHeads && params_.problem.mask & FLASHATTN_MASK_TREE) keys = min(keys, 1);
      bool bad = !(l[mi] <= kMaxRowSum) || nonfinite[mi];
      // In a redo P of a single key is exactly 1. Else the residue of a large score is in P.
      const float largest = keys == 1 ? fminf(kLargeScore, kLargestBase) : kLargestBase;
      bad |= base[mi] != -INFINITY && !(fabsf(base[mi]) <= largest / kScoreUnit);
      if (!ScoreMod::kHoldsAllScores) {
        // The sum is too small for visible keys; it is 0 where finite scores are -inf in log2
        // units.
        bad |= !(l[mi] >= kMinRowSum) && keys > 0 && score_mod().block_mask_shows_key(mi);
        bad |= fp32 && keys == 1;  // O is V of that key to the last digit
      }
      if constexpr (Config::kPacksHeads) bad &= this->has_head(row() + mi * 8);
      base_overflowed |= bad && work_tile().query + row() + mi * 8 < work_tile().query_end;
    }
    if (__any_sync(~0u, base_overflowed) && !redo && lane() == 0) {
      storage_.redo_queue[work_tile().redo_slot] = work_tile().work_idx + 1;
      storage_.base_overflowed = 1;
    }
  }

  static __device__ __forceinline__ void scale_rows(OAccum& o, const float (&factor)[2]) {
#pragma unroll
    for (int x = 0; x < Config::kDimV / 2; ++x) o[x] *= factor[x / 2 % 2];
  }

  // The first two lanes of a quad store one row each.
  __device__ __forceinline__ void store_lse(bool redo) const {
    const int32_t mi = lane() % 4;
    const int32_t i = row() + mi * 8;
    if (Config::kPacksHeads) return store_packed_lse(redo);
    if (mi > 1 || params_.args.lse == nullptr) return;
    if (work_tile().query + i >= work_tile().query_end) return;
    const float l = mi == 0 ? row_sum_[0] : row_sum_[1];
    params_.args.lse[work_tile().lse_row + i] =
        lse_of(mi == 0 ? softmax_base_[0] : softmax_base_[1], log2_unit(redo), l);
  }

  __device__ __forceinline__ void store_partial_sum(bool redo) const {
    if constexpr (Base::kMayBePartial) {
      const int32_t mi = lane() % 4, i = work_tile().query + row() + mi * 8;
      if (mi > 1 || i >= work_tile().query_end || !this->has_head(i)) return;
      const float base = mi == 0 ? softmax_base_[0] : softmax_base_[1];
      params_.partial_sums[this->partial_row(i)] = {base * (log2_unit(redo) * kLn2),
                                                    mi == 0 ? row_sum_[0] : row_sum_[1]};
    }
  }

  __device__ __forceinline__ void store_packed_lse(bool redo) const {
    if constexpr (Config::kPacksHeads) {
      const int32_t mi = lane() % 4, i = work_tile().query + row() + mi * 8;
      if (mi > 1 || i >= work_tile().query_end || !this->has_head(i)) return;
      const float base = mi == 0 ? softmax_base_[0] : softmax_base_[1], unit = log2_unit(redo);
      const float l = mi == 0 ? row_sum_[0] : row_sum_[1];
      if (params_.args.lse) {
        const RowLayout layout = row_layout(params_.problem, params_.args.shape);
        params_.args
            .lse[work_tile().b * layout.batch_stride + this->head_of(i) * layout.head_stride +
                 work_tile().offset_q + this->query_of(i)] = lse_of(base, unit, l);
      }
    }
  }

  // Stores O times `unit` and LSE, and queues the tile for a redo if its base overflowed. Nothing
  // hides these latencies: the check comes last, as its branch would delay the store. kShort: there
  // is no sink, and TMA stores O. That code is contiguous: after each jump instructions must be
  // fetched (D = 64, 1k keys, causal: 2 % faster).
  template <bool kShort>
  __device__ __forceinline__ void finish_tile(OAccum& o, float unit, bool redo) {
    if constexpr (!kHasHeadroom) total_rows(redo);
    const float l[2] = {row_sum_[0], row_sum_[1]},
                base[2] = {softmax_base_[0], softmax_base_[1]};  // without the sink
    float factor[2];
    const bool sink_overflows = o_factors<kShort>(redo, factor);
    scale_rows(o, {factor[0] * unit, factor[1] * unit});
    bool nonfinite[2];
    Epilogue(*this).template store<kShort>(o, redo, nonfinite);
    if (!kShort && this->is_partial()) {
      store_partial_sum(redo);
    } else {
      store_lse(redo);
    }
    check_rows<kShort>(l, base, nonfinite, sink_overflows, redo);
  }
  __device__ __forceinline__ void finish_tile(OAccum& o, float unit, bool redo) {
    if (params_.o_by_tma && !(params_.problem.features & FLASHATTN_FEATURE_SINK) &&
        !this->is_partial()) {
      finish_tile<true>(o, unit, redo);
    } else {
      finish_tile<false>(o, unit, redo);
    }
  }

  // A larger base causes a redo. A dense bias may leave a row one key, whose weight must be 1: in
  // these units the product of base and log2(e) is rounded.
  static constexpr float kLargestBase = Config::kHasDenseBias ? kLargeScore : kRedoScore;

  // Rounds as pack_p() rounds P.
  static __device__ __forceinline__ float round_to_type(float x) {
    return ptx::unpack<T>(ptx::pack<T>(x, 0.0f)).x;
  }

  // Bounds of a row sum. A base that is predicted, or set by the paired row, may make it too small.
  static constexpr float kMaxRowSum = 0x1p120f;  // the combine kernels add up to 128 of them
  static constexpr float kMinRowSum = !Config::kHasAlibi               ? FLT_MIN
                                      : std::is_same<T, __half>::value ? 0x1p-2f
                                                                       : 0x1p-60f;

  // The block mask hides a key, or all keys, of wait_k()'s last KV tile from this warpgroup.
  bool block_mask_hides_keys_ = false, block_mask_hides_tile_ = false;
  float softmax_base_[2];  // in the units of the scores: see log2_unit()
  float row_sum_[2];       // over this lane's columns
  float excess_[2];        // see total_rows()
  float s_[kTileKv / 2];
  float s_half_[kTileKv / 4];  // the scores of half a tile
};

}  // namespace flashattn::cuda::sm90
