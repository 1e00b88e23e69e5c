// Score modifications of the Hopper forward pass: scale, softcap, ALiBi, dense bias, masks,
// dropout: the members in cuda/device, made for the rows of a consumer warpgroup. Scores are in
// units of log2(e). Runtime kernels and redone tiles, whose scores have no bound, keep a quarter of
// that, which is finite for every finite score; kernels for a dense bias keep natural units, which
// are so, too, and in which a bias is added as it is.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/kernels/sm90/fwd_consumer.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdScoreMod {
 public:
  using T = typename Config::T;
  using ScoreMod = typename Config::ScoreMod;
  static constexpr int kTileKv = Config::kTileKv;
  using ScoreAccum = float[kTileKv / 2];  // this lane's scores of a tile, as SLayout says

  __device__ __forceinline__ explicit FwdScoreMod(const FwdConsumer<Config>& consumer)
      : consumer_(consumer), params_(consumer.params_) {}

  // Scale that the exponent of P applies to scores as modify() leaves them.
  static __device__ __forceinline__ float exponent_scale(const ForwardParams& params) {
    return ScoreMod::kModifiesScores ? kScoreUnit : scale(params);
  }

  // modify() leaves scores in units of kScoreUnit log2(e).
  static constexpr float kScoreUnit = Config::kIsRuntime      ? kWideUnit
                                      : Config::kHasDenseBias ? kLog2E
                                                              : 1.0f;
  // Whether these units hold every finite score. If not, redone tiles use kWideUnit.
  static constexpr bool kHoldsAllScores = Config::kIsRuntime || Config::kHasDenseBias;
  static __device__ __forceinline__ float scale(const ForwardParams& params) {
    return params.problem.scale * (kLog2E / kScoreUnit);
  }

  // Turns Q K^T of the keys from `key` on into scores. If the scale is the only modification,
  // exponent_scale() applies it instead. redo: scores of a redone tile, rounded, in units of
  // kWideUnit log2(e).
  template <int kCount>
  __device__ __forceinline__ void modify(float (&s)[kCount], int32_t key, bool redo) const {
    const bool wide = redo && !kHoldsAllScores;
    const float unit = wide ? 1.0f / kWideUnit : 1.0f;
    const float left =
        ScoreMod::forward(SLayout(), s, scale(params_) * unit, params_.problem,
                          [&](auto member) { return this->make(member, key, unit); });
    if (Config::kIsRuntime ? left != 1.0f : wide && !Config::kHasAlibi) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = __fmul_rn(s[i], left);
    }
  }

  // The members of the score modification, for the keys from `key` on. unit: that of the scores, in
  // multiples of kScoreUnit log2(e).
  __device__ __forceinline__ FittedSoftcap make(Type<Softcap>, int32_t, float unit) const {
    return fitted_softcap(params_, unit);
  }
  static __device__ __forceinline__ FittedSoftcap fitted_softcap(const ForwardParams& params,
                                                                 float unit) {
    return {params.softcap, params.problem.softcap * (kLog2E / kScoreUnit), kScoreUnit, unit};
  }
  __device__ __forceinline__ Alibi make(Type<Alibi>, int32_t key, float) const {
    return {work_tile().alibi_slope,
            static_cast<float>(warpgroup_tile().diagonal + row() % 64 - key - lane() % 4 * 2)};
  }
  // The bias panels of a KV tile: a warp waits for each, and releases it once it has read it.
  struct TilePanels {
    const FwdConsumer<Config>& consumer;

    __device__ __forceinline__ PipelineState<Config::kBiasStages> state(int p) const {
      return {consumer.bias_state_.count + p};
    }
    __device__ __forceinline__ uint32_t wait(int p) const {
      consumer.storage_.bias.consumer_wait(state(p), consumer.warpgroup_);
      return consumer.shared_ + Config::kBiasOffset +
             (consumer.warpgroup_ * Config::kBiasStages + state(p).stage()) * kBiasPanelBytes;
    }
    __device__ __forceinline__ void release(int p) const {
      __syncwarp();
      if (consumer.lane() == 0)
        consumer.storage_.bias.consumer_release(state(p), consumer.warpgroup_);
    }
  };

  __device__ __forceinline__ auto make(Type<DenseBias>, int32_t key, float) const {
    if constexpr (Config::kHasDenseBias) {
      return DenseBiasPanels<kTileKv, T, TilePanels>{
          {consumer_}, params_.problem.dtype_bias, row() % 64 - lane() / 4, lane()};
    } else {
      return gathered_bias(key);
    }
  }
  __device__ __forceinline__ DenseBiasTile<false> gathered_bias(int32_t key) const {
    const int32_t i = work_tile().query + row(), j = key + lane() % 4 * 2;
    return {DenseBias::of(params_.problem, params_.args.inputs, work_tile().b, work_tile().h),
            i,
            j,
            work_tile().query_end - i,
            work_tile().len.kv - j,
            kLog2E / kScoreUnit,
            false};
  }

  __device__ __forceinline__ Dropout make(Type<Dropout>) const {
    return Dropout::of(params_.problem, params_.args.inputs, work_tile().b, work_tile().h);
  }

  // ALiBi of a work tile, for this lane.
  struct AlibiRows {
    float slope;
    int32_t diagonal;                  // key position of row(), minus the lane's first column
    int32_t linear_begin, linear_end;  // see WarpgroupTile
    bool paired_rows;                  // see paired_rows()
  };

  // Whether rows r and r + 8 of a lane are paired: base[r] - base[r + 8] = 8 * slope, the
  // difference of their biases for a key before both, so that one ALiBi addend serves both. One
  // base is then too high: by 8 * slope where the keys that matter lie before the rows or next to
  // them, by twice that where they lie behind, and by the difference of the rows' scores. fp16 has
  // too little range for that, bf16 seldom (see check_rows()). Redone tiles do not pair rows.
  __device__ __forceinline__ bool paired_rows() const {
    if (std::is_same<T, __half>::value || !Config::kHasAlibi) return false;
    return paired_base_gap() >= 0.0f && paired_base_gap() <= 32.0f && !work_tile().redo_online;
  }

  // base[r] - base[r + 8] of paired rows.
  __device__ __forceinline__ float paired_base_gap() const {
    return 8.0f * work_tile().alibi_slope;
  }

  __device__ __forceinline__ AlibiRows alibi_rows() const {
    return {work_tile().alibi_slope, warpgroup_tile().diagonal + row() % 64 - lane() % 4 * 2,
            warpgroup_tile().linear_begin, warpgroup_tile().linear_end, paired_rows()};
  }

  // ALiBi of a KV tile, beside the scale. Replaces modify() where the base is fixed.
  struct AlibiTile {
    float scale;
    Alibi alibi;
    LinearAlibi line;  // used if is_linear
    bool is_linear;    // all keys lie on one side of all rows
  };

  __device__ __forceinline__ AlibiTile alibi_tile(const AlibiRows& rows, int32_t n) const {
    const Alibi alibi{rows.slope, static_cast<float>(rows.diagonal - n * kTileKv)};
    return {scale(params_), alibi, LinearAlibi::of(alibi, n < rows.linear_begin),
            n < rows.linear_end || n >= rows.linear_begin};
  }

  // The largest ALiBi bias among the keys that a row sees. Scores grow by that much from a distant
  // tile to the row's own position, so the base is predicted from it.
  __device__ __forceinline__ void max_alibi_bias(float (&peak)[2]) const {
    const float slope = work_tile().alibi_slope;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& seen = consumer_.storage_.visible_kv[row() + mi * 8];
      const int32_t own = warpgroup_tile().diagonal + row() % 64 + mi * 8;
      const int32_t away = max(max(seen.begin - own, own - (seen.end - 1)), 0);
      peak[mi] = -slope * static_cast<float>(away);
    }
  }

  // Sets scores of invisible keys to -inf; s holds the keys from `key` on.
  template <int kCount>
  __device__ __forceinline__ void apply_mask(float (&s)[kCount], int32_t key) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const volatile Interval& visible = consumer_.storage_.visible_kv[row() + mi * 8];
      const int32_t first = key + lane() % 4 * 2;
      const int32_t begin = visible.begin - first;
      IntervalMask{begin, visible.end - first - begin}.forward(SRowLayout{mi}, s);
    }
  }

  // Sets scores to -inf that the bits of the tree hide or, for keys before the tree, other masks.
  __device__ __forceinline__ void apply_tree_mask(ScoreAccum& s, int32_t n) const {
    const Lengths len{work_tile().len.q, work_tile().len.kv};
    const TreeMask tree{params_.packed.tree, work_tile().b, len};
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t i = consumer_.query_of(work_tile().query + row() + mi * 8);
      tree.template shown_keys<kTileKv / 8>(min(i, len.q - 1), n * kTileKv, lane())
          .forward(SRowLayout{mi}, s);
    }
  }

  // Sets scores that the block mask hides to -inf.
  __device__ __forceinline__ void apply_block_mask(ScoreAccum& s, int32_t n) const {
    if constexpr (kMayHideTiles<Config>) {
      const BlockMask blocks =
          BlockMask::of(params_.problem, params_.args.inputs, work_tile().b, work_tile().h);
      BitMask shown;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        // Blocks of multiples of 16 queries hold both rows, but small CTAs lack registers for the
        // bits.
        if (mi == 0 || Config::kCtasPerSm == 3 || blocks.block_q % 16 != 0) {
          const int32_t i = min(work_tile().query + row() + mi * 8, work_tile().query_end - 1);
          shown = blocks.shown_keys<kTileKv / 8>(i, n * kTileKv, work_tile().len.kv, lane());
        }
        shown.forward(SRowLayout{mi}, s);
      }
    }
  }

  // Whether row mi sees a key that neither the block mask nor other masks hide.
  __device__ __forceinline__ bool block_mask_shows_key(int mi) const {
    if constexpr (ScoreMod::template kHas<BlockMask>) {
      const BlockMask blocks =
          BlockMask::of(params_.problem, params_.args.inputs, work_tile().b, work_tile().h);
      const int32_t i = min(work_tile().query + row() + mi * 8, work_tile().query_end - 1);
      const volatile Interval& visible = consumer_.storage_.visible_kv[row() + mi * 8];
      // Between the work tile's first and last KV tile lie all blocks that are shown.
      const int32_t begin = max(visible.begin, work_tile().kv_begin * kTileKv),
                    end = min(visible.end, work_tile().kv_end * kTileKv);
#pragma unroll 1
      for (int32_t j = begin; j < end; j += blocks.block_kv - j % blocks.block_kv) {
        if (blocks.shows(i, j)) return true;
      }
      return false;
    }
    return true;
  }

  // Clears dropped elements of P, in runtime kernels.
  __device__ __forceinline__ void apply_dropout(ScoreAccum& p, int32_t n) const {
    if constexpr (Config::kIsRuntime) {
      if (params_.dropout_threshold == 0) return;
      const Dropout dropout = make(Type<Dropout>());
      dropout.template visit_dropped<1, kTileKv / 8, false>(
          params_.dropout_threshold, warp_first_query(), n * kTileKv, lane(),
          [&](int, int g, int x) { p[4 * g + x] = 0.0f; });
    }
  }

  // Kernels compiled for dropout draw sign bits for pairs of P instead; pack_p() applies them.
  // ptxas draws after the exponentials; forced to draw before them, under the WGMMAs, it is 6 %
  // slower.
  using TileDropoutSigns = DropoutSigns<kTileKv / 4, false>;
  __device__ __forceinline__ void draw_dropout(TileDropoutSigns& signs, int32_t n) const {
    if constexpr (Config::kHasDropout) {
      const Dropout dropout = make(Type<Dropout>());
      dropout.template draw_signs<kTileKv / 8, false>(signs, params_.dropout_threshold,
                                                      warp_first_query(), n * kTileKv, lane());
    }
  }

  // Scale of the elements of P that dropout keeps.
  __device__ __forceinline__ float dropout_scale() const {
    if constexpr (!ScoreMod::template kHas<Dropout>) return 1.0f;
    return Dropout::keep_scale(params_.dropout_threshold);
  }

 private:
  __device__ __forceinline__ const volatile WorkTile<Config::kConsumers>& work_tile() const {
    return consumer_.work_tile();
  }
  __device__ __forceinline__ const volatile WarpgroupTile& warpgroup_tile() const {
    return consumer_.warpgroup_tile();
  }
  __device__ __forceinline__ int32_t lane() const { return consumer_.lane(); }
  __device__ __forceinline__ int32_t row() const { return consumer_.row(); }

  // The first query of this warp.
  __device__ __forceinline__ int32_t warp_first_query() const {
    return work_tile().query + row() - lane() / 4;
  }

  // The compiler allocates registers for the row sums differently with a copy of the consumer's
  // state and with a reference; these choices keep the code that was measured.
  std::conditional_t<Config::kHasSoftcap, const FwdConsumer<Config>, const FwdConsumer<Config>&>
      consumer_;
  const ForwardParams& params_;
};

}  // namespace flashattn::cuda::sm90
