// Softmax and score modifications of the Hopper backward kernels: P from S, then dS from P and dP.
// Scores are in units of log2(e).
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/bwd_dense_bias.cuh"
#include "cuda/kernels/sm90/bwd_exponents.cuh"
#include "cuda/kernels/sm90/bwd_prefetch.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdScoreMod : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using T = typename Config::T;
  using ScoreMod = typename Config::ScoreMod;
  using Base::kLacksRegisters, Base::kHasSlicedDropout;
  using Base::storage_, Base::params_;
  using Base::work_tile, Base::kSliceQ, Base::kTileQ, Base::lane, Base::row;
  using Operand = typename Base::PFragment;
  using Tile = typename Base::SAccum;
  static constexpr int kBiasColumnsAhead = BwdPrefetch<Config>::kBiasColumnsAhead;

 public:
  using TilePrefetch = typename BwdPrefetch<Config>::TilePrefetch;
  using Exponents = BwdExponents<Config>;
  static constexpr int kColumnsAtOnce = Exponents::kColumnsAtOnce;
  __device__ __forceinline__ BwdScoreMod(const BackwardParams& params, uint32_t shared,
                                         BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer),
        exponents_(params, shared, storage, consumer),
        prefetch_(params, shared, storage, consumer),
        bias_(params, shared, storage, consumer) {}

  // Issues the loads, and draws the dropout, of a Q tile before its S is complete.
  __device__ __forceinline__ void prefetch(TilePrefetch& prefetched, int32_t q_coord) const {
    prefetch_.prefetch(prefetched, q_coord);
  }

  // Releases the bias of Q tile `count` unread.
  __device__ __forceinline__ void skip_bias(uint32_t count) const {
    if constexpr (Config::kHasDenseBias) bias_.of_tile(count).skip();
  }

  // LSE of a slice's queries, in units of log2(e), is preloaded where registers allow: not with
  // score modifications.
  static constexpr bool kPreloadsLse = !Config::kHasScoreMod && !kLacksRegisters;
  using Lse = float2[kPreloadsLse ? kSliceQ / 8 : 1];

  __device__ __forceinline__ void load_lse(Lse& lse, uint32_t slot, int slice = 0) const {
    if constexpr (kPreloadsLse) {
      const uint32_t from = this->template row_stat_address<Config::kLse>(slot, slice);
#pragma unroll
      for (int n = 0; n < kSliceQ / 8; ++n) lse[n] = ptx::load_shared_pair(from + n * 32);
    }
  }

  // Whether polynomials may compute the softcap.
  static constexpr bool kHasPolynomials = ScoreMod::template kHas<Softcap> && !Config::kIsRuntime;
  // Whether compute_p() updates the range for a Q tile; otherwise its caller has done so.
  static constexpr bool kFindsRange = kHasPolynomials && kSliceQ == kTileQ;

  // Updates the range by S of two slices.
  __device__ __forceinline__ void update(SoftcapRange& range, const Tile& s,
                                         const Tile& other) const {
    exponents_.update(range, fmaxf(max_abs(s), max_abs(other)));
  }

  // Turns S into P, as a register operand, and into p_for_ds, which dS needs: P times the
  // derivative of the score modification; with dropout, negative where it drops. kStagePInDs:
  // p_for_ds goes to the buffer of dS.
  template <bool kMasked, bool kMayBeLargeLse = kMasked>
  __device__ __forceinline__ void compute_p(Tile& s, const Lse& lse, Operand& p, Operand& p_for_ds,
                                            TilePrefetch& prefetched, int32_t q_coord,
                                            uint32_t kind, uint32_t slot, uint32_t count,
                                            SoftcapRange& range, int slice = 0) const {
    if constexpr (Config::kHasScoreMod) {
      if (this->stages_p()) storage_.ds.producer_acquire({count});
      apply_score_mod<kMasked, kMayBeLargeLse>(s, p, p_for_ds, prefetched, q_coord, kind, slot,
                                               count, slice, range);
    } else {
      // Both are the same number. The product would take a register.
      const float factor =
          kHasSlicedDropout ? params_.score_scale : params_.common.problem.scale * kLog2E;
      if (!Config::kHasDenseBias && kMayBeLargeLse && (kind & Base::kLargeLse)) {
        exponents_.subtract_bases(s, this->bases_at(q_coord, count, slice));
      }
      // Waits here: at other places registers do not suffice.
      if constexpr (Config::kStagePInDs && Config::kIsDropout)
        storage_.ds.producer_acquire({count});
      if constexpr (Config::kHasDenseBias) {
        add_dense_bias<kMasked>(s, lse, q_coord, kind, count);
#pragma unroll
        for (int i = 0; i < kSliceQ / 4; ++i)
          p[i] = ptx::pack<T>(ptx::exp2(s[2 * i]), ptx::exp2(s[2 * i + 1]));
      }
#pragma unroll
      for (int n = 0; n < (Config::kHasDenseBias ? 0 : kSliceQ / 8); ++n) {
        float2 row_lse;
        if constexpr (kPreloadsLse) {
          row_lse = lse[n];
        } else {
          row_lse = ptx::load_shared_pair(
              this->template row_stat_address<Config::kLse>(slot, slice) + n * 32);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = &s[4 * n + 2 * half];
          p[2 * n + half] = ptx::pack<T>(ptx::exp2(fmaf(x[0], factor, -row_lse.x)),
                                         ptx::exp2(fmaf(x[1], factor, -row_lse.y)));
        }
      }
      if constexpr (kMasked) mask(p, this->q_tile_of(q_coord) * kTileQ + slice * kSliceQ);
      if constexpr (kMasked && Config::kSplitsBlockMask) {
        if (kind & Base::kPartlyMasked) apply_block_mask(p, prefetched.visible_bits);
      }
      const uint32_t ds_slot = PipelineState<Config::kDsStages>{count}.stage();
      if constexpr (Config::kIsDropout) {
        const uint32_t staged_p = this->ds_address(ds_slot, slice);
#pragma unroll
        for (int m = 0; m < kSliceQ / 16; ++m) {
#pragma unroll
          for (int i = 4 * m; i < 4 * m + 4; ++i) {
            const uint32_t signs = prefetched[slice * (kSliceQ / 4) + i];
            p_for_ds[i] = p[i] | (signs & 0x80008000u);
            p[i] &= ~ptx::sign_mask(signs);
          }
          if constexpr (Config::kStagePInDs) {
            const uint32_t* quad = &p_for_ds[4 * m];
            ptx::stmatrix_x4_trans(staged_p + m * 2048, quad[0], quad[1], quad[2], quad[3]);
          }
        }
      } else if constexpr (Config::kStagePInDs) {
        if (!Config::kBiasInDs) storage_.ds.producer_acquire({count});  // else the producer did
        this->store_ds(p, ds_slot);
      }
    }
  }

  // Turns dP and P (as rounded for dV, or p_for_ds) into dS, as a register operand. count: Q tiles
  // done.
  template <bool kMasked>
  __device__ __forceinline__ void compute_ds(const Operand& p_words, const Tile& dp, Operand& ds,
                                             uint32_t slot, uint32_t count, int32_t q_coord,
                                             int slice = 0) const {
    const uint32_t delta = this->template row_stat_address<Config::kDelta>(slot, slice);
    const uint32_t staged_p =
        this->ds_address(PipelineState<Config::kDsStages>{count}.stage(), slice);
    const bool stages_p = this->stages_p();
    if (stages_p) __syncwarp();  // other lanes stored this P
    float p_scale = this->p_scale();
    // Otherwise ptxas loads it anew for each element. Without a softcap input_scale is +0.
    if constexpr (kHasSlicedDropout)
      p_scale = ptx::order_after(p_scale, dp[0], __float_as_uint(params_.softcap.input_scale));
    typename BwdDenseBias<Config>::DbiasColumns dbias;
    if constexpr (kAddsDbias) dbias = bias_.dbias_columns(q_coord, count);
#pragma unroll
    for (int m = 0; m < kSliceQ / 16; ++m) {
      uint32_t quad[4];
      if (stages_p) {
        ptx::ldmatrix_x4_trans(quad, staged_p + m * 2048);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) quad[i] = p_words[4 * m + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * m + i / 2;
        const float2 d = ptx::load_shared_pair(delta + n * 32);
        const float* y = &dp[4 * n + 2 * (i % 2)];
        const float2 p = ptx::unpack<T>(quad[i]);
        const float first = ds_of<kMasked>(p.x, y[0], d.x, p_scale),
                    second = ds_of<kMasked>(p.y, y[1], d.y, p_scale);
        ds[4 * m + i] = ptx::pack<T>(first, second);
        if constexpr (kAddsDbias) {
          if (params_.adds_dbias) dbias.add(n, i % 2, first, second);
        } else if constexpr (kMayBeNan<kMasked>) {
          ds[4 * m + i] &= ptx::nonzero_mask(quad[i]);
        }
      }
    }
  }

  // Whether the kernel can add dbias to global memory. Large heads lack registers for it.
  static constexpr bool kAddsDbias = Config::kHasDenseBias && !Config::kSplitRoles;

  // Whether a bias lies in the peer's half of a stage of dS before the peer's dS arrives there.
  __device__ __forceinline__ bool bias_shares_peer_ds() const {
    if constexpr (Config::kBiasInDs) return bias_.shares_peer_ds();
    return false;
  }

  // Whether p_for_ds is staged in the buffer of dS: not if it equals P and the same consumer
  // computes dS.
  __device__ __forceinline__ bool stages_p() const {
    if constexpr (!Config::kStagePInDs || Config::kSplitRoles || !Config::kIsRuntime)
      return Config::kStagePInDs;
    return ScoreMod::template stage_is_on<ScoreStage::kProduct>(params_.common.problem) ||
           params_.common.dropout_threshold != 0;
  }

 private:
  template <bool kMasked>
  static __device__ __forceinline__ float ds_of(float p, float dp, float delta, float p_scale) {
    float x;
    if constexpr (Config::kIsRuntime || Config::kIsDropout) {
      x = fabsf(p) * (p > 0.0f ? fmaf(dp, p_scale, -delta) : -delta);
    } else {
      x = p * subtract_delta<T>(dp, delta);
    }
    if (kAddsDbias && kMayBeNan<kMasked> && p == 0.0f) x = 0.0f;  // dbias adds it up
    return x;
  }
  // Where P is 0, as masked elements are, dS is 0, but dP may be NaN.
  template <bool kMasked>
  static constexpr bool kMayBeNan = kMasked || Config::kIsRuntime;

  // Score modifications of a slice. Softcap alone, in the range of a polynomial, and ALiBi alone
  // have few instructions; all else is computed by the chain.
  template <bool kMasked, bool kMayBeLargeLse>
  __device__ __forceinline__ void apply_score_mod(const Tile& s, Operand& p, Operand& p_for_ds,
                                                  TilePrefetch& prefetched, int32_t q_coord,
                                                  uint32_t kind, uint32_t slot, uint32_t count,
                                                  int slice, SoftcapRange& range) const {
    const bool large_lse = kMayBeLargeLse && (kind & Base::kLargeLse);
    const auto finish = [&](bool has_derivative, const auto& exponents) {
      make_p<kMasked>(s, p, p_for_ds, prefetched, q_coord, kind, count, slice, has_derivative,
                      exponents);
    };
    if constexpr (Exponents::kMayBeAlibiAlone) {
      if (!large_lse && !exponents_.has_derivative())
        return finish(false, exponents_.alibi(q_coord, slot, slice));
    }
    if constexpr (kHasPolynomials) {
      if (kFindsRange) exponents_.update(range, max_abs(s));
      // Masked tiles are few, and the instruction cache is small: no cubic polynomial.
      if (!kMasked && range.cubic) return finish(true, exponents_.template softcap<3>(slot, slice));
      if (!large_lse && range.quintic)
        return finish(true, exponents_.template softcap<5>(slot, slice));
    }
    finish(exponents_.has_derivative(),
           exponents_.chain(s, prefetched, q_coord, slot, count, slice, large_lse));
  }

  // Turns S into exponents of P. The panels of the bias are those of Q tile `count`.
  template <bool kMasked>
  __device__ __forceinline__ void add_dense_bias(Tile& s, const Lse& lse, int32_t q_coord,
                                                 uint32_t kind, uint32_t count) const {
    const Problem& problem = params_.common.problem;
    // As BwdExponents::chain() does, in the same order of operations as lse_recompute.cuh.
    const bool large_lse = kMasked && (kind & Base::kLargeLse);
    const float log2e = large_lse ? kLog2E / kWideUnit : kLog2E, factor = problem.scale * log2e;
#pragma unroll
    for (int i = 0; i < kSliceQ / 2; ++i) {
      const float own = i % 2 == 0 ? lse[i / 4].x : lse[i / 4].y;
      s[i] = fmaf(s[i], factor, large_lse ? 0.0f : -own);
    }
    bias_.add(s, log2e, count);
    if (!large_lse) return;
    exponents_.subtract_bases(s, this->bases_at(q_coord, count, 0));
#pragma unroll
    for (int i = 0; i < kSliceQ / 2; ++i)
      s[i] = fmaf(s[i], kWideUnit, -(i % 2 == 0 ? lse[i / 4].x : lse[i / 4].y));
  }

  // Turns S into P and p_for_ds. exponents: see BwdExponents.
  template <bool kMasked, class Function>
  __device__ __forceinline__ void make_p(const Tile& s, Operand& p, Operand& p_for_ds,
                                         TilePrefetch& prefetched, int32_t q_coord, uint32_t kind,
                                         uint32_t count, int slice, bool has_derivative,
                                         const Function& exponents) const {
    const Problem& problem = params_.common.problem;
    const int32_t query = this->q_tile_of(q_coord) * kTileQ + slice * kSliceQ;
    const uint32_t staged_p =
        this->ds_address(PipelineState<Config::kDsStages>{count}.stage(), slice);
    const bool stages_p = this->stages_p();
    uint32_t p_words[kSliceQ / 4];
#pragma unroll
    for (int n = 0; n < kSliceQ / 8; n += kColumnsAtOnce) {
      float x[4 * kColumnsAtOnce], derivative[4 * kColumnsAtOnce];
      if constexpr (Config::kIsRuntime) {
        if (n + kBiasColumnsAhead < kSliceQ / 8)
          prefetch_.fetch_bias(prefetched, n + kBiasColumnsAhead);
      }
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i) {
        x[i] = s[4 * n + i];
        derivative[i] = 1.0f;
      }
      exponents(n, x, derivative);
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i) x[i] = ptx::exp2(x[i]);
      if constexpr (Config::kIsRuntime) {
        if (params_.common.dropout_threshold != 0) {
#pragma unroll
          for (int i = 0; i < 4 * kColumnsAtOnce; ++i) {
            const uint32_t sign = ~prefetched.keep_bits << (31 - 4 * n - i) & 0x80000000u;
            x[i] = __uint_as_float(__float_as_uint(x[i]) | sign);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kColumnsAtOnce; ++i) {
        p[2 * n + i] = Config::kIsRuntime ? ptx::pack_relu<T>(x[2 * i], x[2 * i + 1])
                                          : ptx::pack<T>(x[2 * i], x[2 * i + 1]);
      }
      if (has_derivative) {
#pragma unroll
        for (int i = 0; i < 4 * kColumnsAtOnce; ++i) x[i] *= derivative[i];
      }
#pragma unroll
      for (int i = 0; i < 2 * kColumnsAtOnce; ++i) {
        p_words[2 * n + i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
      }
      if constexpr (kMasked) {
        if (!Config::kIsRuntime || !(kind & Base::kFull)) {
          mask(query, n, [&](int i, uint32_t seen) {
            p[2 * n + i] &= seen;
            p_words[2 * n + i] &= seen;
          });
        }
      }
      if constexpr (Config::kIsRuntime) {
        if (problem.mask & FLASHATTN_MASK_BLOCKS) {
#pragma unroll
          for (int i = 0; i < 2 * kColumnsAtOnce; ++i) {
            const BitMask mask{prefetched.visible_bits >> i % 2 * 16};
            const uint32_t seen = mask.pair(n + i / 2);
            p[2 * n + i] &= seen;
            p_words[2 * n + i] &= seen;
          }
        }
      }
      if constexpr (!Config::kStagePInDs) {
#pragma unroll
        for (int i = 0; i < 2 * kColumnsAtOnce; ++i) p_for_ds[2 * n + i] = p_words[2 * n + i];
      } else if ((n + kColumnsAtOnce) % 2 == 0 && stages_p) {
        const uint32_t* quad = &p_words[2 * (n + kColumnsAtOnce - 2)];
        ptx::stmatrix_x4_trans(staged_p + n / 2 * 2048, quad[0], quad[1], quad[2], quad[3]);
      }
    }
  }

  // Calls apply(i, bits) for pair i of kColumnsAtOnce columns; all bits of an element are set if
  // the query sees the key. query: the slice's first.
  template <class Apply>
  __device__ __forceinline__ void mask(int32_t query, int n, Apply apply) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = storage_.visible_queries[row() + half * 8];
      // Relative to this lane's first column.
      const int32_t begin = visible.begin - query - lane() % 4 * 2;
      const IntervalMask mask{begin, visible.end - visible.begin};
#pragma unroll
      for (int k = 0; k < kColumnsAtOnce; ++k) apply(2 * k + half, mask.pair((n + k) * 8));
    }
  }

  // Zeros P that the block mask hides.
  static __device__ __forceinline__ void apply_block_mask(Operand& p, uint32_t visible_bits) {
#pragma unroll
    for (int i = 0; i < kSliceQ / 4; ++i) p[i] &= BitMask{visible_bits >> i % 2 * 16}.pair(i / 2);
  }

  // Zeros P where a query does not see a key.
  __device__ __forceinline__ void mask(Operand& p, int32_t query) const {
    using Mask = std::conditional_t<kLacksRegisters, IntervalMask, PairMasks<kSliceQ>>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = storage_.visible_queries[row() + half * 8];
      // Relative to this lane's first column.
      const int32_t begin = visible.begin - query - lane() % 4 * 2;
      const Mask shown{begin, visible.end - visible.begin};
#pragma unroll
      for (int n = 0; n < kSliceQ / 8; ++n) shown.zero_hidden(p[2 * n + half], n * 8);
    }
  }

  const Exponents exponents_;
  const BwdPrefetch<Config> prefetch_;
  const BwdDenseBias<Config> bias_;
};

}  // namespace flashattn::cuda::sm90
