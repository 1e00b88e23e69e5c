// Turns products of Q and K into exponents of P, in the Hopper backward kernels with score
// modifications. Scores are in units of log2(e).
#pragma once

#include <type_traits>

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/sm90/bwd_prefetch.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

// SoftcapRange says which softcap polynomials are accurate for all products of a warp. cubic holds
// for all Q tiles of the work tile so far: a warp keeps to one path, as a change fetches code.
struct SoftcapRange {
  bool cubic, quintic;
};

// Each function returns a functor exponents(n, x, derivative) for kColumnsAtOnce columns of a
// slice, 8 queries each, from column n on. The functor turns products x into exponents of P, and
// sets the derivative of the score by product * scale if the chain has one.
template <class Config>
class BwdExponents : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using ScoreMod = typename Config::ScoreMod;
  using Base::storage_, Base::params_;
  using Base::work_tile, Base::kSliceQ, Base::kTileQ, Base::lane, Base::row;
  using Tile = typename Base::SAccum;
  using TilePrefetch = typename BwdPrefetch<Config>::TilePrefetch;

 public:
  // Columns that are computed at once, as registers allow.
  static constexpr int kColumnsAtOnce = Config::kIsRuntime ? 1 : 2;
  using Columns = float[4 * kColumnsAtOnce];
  // Small heads have a kernel for ALiBi alone.
  static constexpr bool kMayBeAlibiAlone =
      ScoreMod::template kHas<Alibi> && !Config::kIsRuntime &&
      (Config::kSplitRoles || !ScoreMod::template kHas<Softcap>);

  __device__ __forceinline__ BwdExponents(const BackwardParams& params, uint32_t shared,
                                          BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  // Whether the score has a derivative by product * scale other than 1.
  __device__ __forceinline__ bool has_derivative() const {
    if constexpr (kMayBeAlibiAlone || Config::kIsRuntime)
      return ScoreMod::template stage_is_on<ScoreStage::kProduct>(params_.common.problem);
    return Config::kHasDerivative;
  }

  // Updates the range for a Q tile. largest: the largest magnitude of this lane's products.
  __device__ __forceinline__ void update(SoftcapRange& range, float largest) const {
    const SoftcapWithDerivative& fit = params_.softcap;
    range.cubic = range.cubic && __all_sync(~0u, !(largest >= fit.poly3_limit));
    range.quintic = range.cubic || __all_sync(~0u, !(largest >= fit.poly5_limit));
  }

  // Softcap alone, by the polynomial of degree kDegree, 3 or 5.
  template <int kDegree>
  __device__ __forceinline__ auto softcap(uint32_t slot, int slice) const {
    return [lse = lse_address(slot, slice), &fit = params_.softcap](int n, Columns& x,
                                                                    Columns& derivative) {
      const ColumnsLse own(lse, n);
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i) {
        const float square = x[i] * x[i];
        if constexpr (kDegree == 3) {
          x[i] = softcap_cubic(fit, x[i], -own.of(i));
          derivative[i] = fmaf(fit.derivative3[1], square, fit.derivative3[0]);
        } else {
          x[i] = fmaf(x[i], softcap_quintic_factor(fit.poly5, square), -own.of(i));
          derivative[i] = fmaf(fmaf(fit.derivative5[2], square, fit.derivative5[1]), square,
                               fit.derivative5[0]);
        }
      }
    };
  }

  // ALiBi alone. Elements of one diagonal share a bias.
  __device__ __forceinline__ auto alibi(int32_t q_coord, uint32_t slot, int slice) const {
    const float slope = alibi_slope(slot);
    return [lse = lse_address(slot, slice),
            scaled = ScaledAlibi{slope, slope * distance(q_coord, slice)},
            factor = params_.score_scale](int n, Columns& x, Columns&) {
      const ColumnsLse own(lse, n);
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i) {
        x[i] = fmaf(x[i], factor, -scaled.away(StLayout<>{8 * n}, i) - own.of(i));
      }
    };
  }

  // Any chain. large_lse: rows may have bases; then scores are in units of kWideUnit log2(e), and
  // lse is subtracted after the base. count: Q tiles done.
  __device__ __forceinline__ auto chain(const Tile& s, const TilePrefetch& prefetched,
                                        int32_t q_coord, uint32_t slot, uint32_t count, int slice,
                                        bool large_lse) const {
    const Problem& problem = params_.common.problem;
    // Small code: without ALiBi its slope is 0.
    using Chain = std::conditional_t<std::is_same<ScoreMod, RuntimeChain<Softcap, Alibi>>::value,
                                     ScoreModChain<Softcap, Alibi>, ScoreMod>;
    const Softcap softcap{params_.softcap_inner, 1.0f};
    const bool has_derivative = this->has_derivative();
    // Rows past the last query may be cleared while S is computed, so their S must not choose the
    // path: results are reproducible.
    const bool near_0 = Config::kIsRuntime && has_derivative &&
                        !this->has_q_tail(this->q_tile_of(q_coord)) && softcap.all_near_0(s);
    const float unit = large_lse ? 1.0f / kWideUnit : 1.0f, factor = params_.score_scale * unit;
    const Alibi alibi{alibi_slope(slot) * unit, distance(q_coord, slice)};
    const uint32_t lse = lse_address(slot, slice);
    return [=, &problem, &prefetched](int n, Columns& x, Columns& derivative) {
      const auto make = [&](auto member) {
        if constexpr (std::is_same<decltype(member), Type<Softcap>>::value) {
          return RangedSoftcap{softcap, near_0};
        } else if constexpr (std::is_same<decltype(member), Type<Alibi>>::value) {
          return alibi;
        } else {
          return prefetched_bias(member, prefetched, n, kLog2E * unit);
        }
      };
      Chain::forward_with_derivative(x, derivative, has_derivative, make);
      const ColumnsLse own(lse, n);
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i)
        x[i] = fmaf(x[i], factor, large_lse ? 0.0f : -own.of(i));
      Chain::add_biases(StLayout<>{8 * n}, x, problem, make);
      if (!large_lse) return;
      subtract_bases(x, this->bases_at(q_coord, count, slice) + n * 8);
#pragma unroll
      for (int i = 0; i < 4 * kColumnsAtOnce; ++i) x[i] = fmaf(x[i], kWideUnit, -own.of(i));
    };
  }

  // Subtracts each query's softmax base. bases: those of the lane's queries.
  template <int kCount>
  static __device__ __forceinline__ void subtract_bases(float (&s)[kCount],
                                                        const volatile float* bases) {
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RowBase base(bases[8 * n + e]);
        s[4 * n + e] = base.subtract_from(s[4 * n + e]);
        s[4 * n + 2 + e] = base.subtract_from(s[4 * n + 2 + e]);
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t lse_address(uint32_t slot, int slice) const {
    return this->template row_stat_address<Config::kLse>(slot, slice);
  }
  // lse of the queries of kColumnsAtOnce columns, from column n on.
  struct ColumnsLse {
    float2 pair[kColumnsAtOnce];

    __device__ __forceinline__ ColumnsLse(uint32_t lse, int n) {
#pragma unroll
      for (int k = 0; k < kColumnsAtOnce; ++k) pair[k] = ptx::load_shared_pair(lse + (n + k) * 32);
    }
    // Returns lse of the query of element i.
    __device__ __forceinline__ float of(int i) const {
      return i % 2 == 0 ? pair[i / 4].x : pair[i / 4].y;
    }
  };

  __device__ __forceinline__ float alibi_slope(uint32_t slot) const {
    return static_cast<const volatile float&>(storage_.alibi_slopes[slot]);
  }
  // Distance from this lane's first key to its first query of a slice; exact below 2^24.
  __device__ __forceinline__ float distance(int32_t q_coord, int slice) const {
    const int32_t off = diagonal_offset(params_.common.problem.mask_rule(),
                                        {work_tile().len.q, work_tile().len.kv});
    return static_cast<float>(this->q_tile_of(q_coord) * kTileQ + slice * kSliceQ + lane() % 4 * 2 +
                              off - work_tile().key - row());
  }

  template <class Member>
  __device__ __forceinline__ auto prefetched_bias(Member, const TilePrefetch& prefetched, int n,
                                                  float log2e) const {
    return DenseBiasWords<4 * kColumnsAtOnce>{prefetched.bias[n], params_.common.problem.dtype_bias,
                                              log2e};
  }
};

}  // namespace flashattn::cuda::sm90
