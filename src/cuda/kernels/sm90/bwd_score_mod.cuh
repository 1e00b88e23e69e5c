// What the consumer warpgroups of the Hopper backward kernels do to products: weights, and dS.
// ScoreModKind are in units of log2(e).
#pragma once

#include <type_traits>

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/sm90/bwd_prefetch.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardScores : protected BackwardAhead<Config> {
  using Base = BackwardAhead<Config>;
  using T = typename Config::T;

 protected:
  using Base::control_, Base::params_, Base::shared_;
  using Base::fetch_bias, Base::kFetched;
  using Base::item, Base::kPartQ, Base::kTileQ, Base::lane, Base::row;
  using typename Base::Ahead, typename Base::Operand, typename Base::Tile;
  // Columns of 8 queries that are worked on at once, as registers allow.
  static constexpr int kStep = Config::kAny ? 1 : 2;
  __device__ __forceinline__ BackwardScores(const BackwardParams& params, uint32_t shared,
                                            BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  // LSE of the queries of a part, in units of log2(e), where registers are left for it: not where
  // scores are modified, nor beside a dropout of heads of 128.
  static constexpr bool kReadsLse = !Config::kModified && !(Config::kDropped && Config::kParked);
  using Lse = float2[kReadsLse ? kPartQ / 8 : 1];

  __device__ __forceinline__ void read_lse(Lse& lse, uint32_t slot, int part = 0) const {
    if constexpr (kReadsLse) {
      const uint32_t from = this->template numbers<Config::kLse>(slot, part);
#pragma unroll
      for (int n = 0; n < kPartQ / 8; ++n) lse[n] = ptx::load_shared_pair(from + n * 32);
    }
  }

  // ScoreModKind to weights p, as operands; and, where scores are modified, to these times the
  // derivative of a score by its product, for dS; of a dropout, negative where it drops. Parked:
  // what dS needs goes to where dS will lie.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(Tile& s, const Lse& lse, Operand& p, Operand& derived,
                                        Ahead& ahead, int32_t place, uint32_t kind, uint32_t slot,
                                        uint32_t count, int part = 0) const {
    if constexpr (Config::kModified) {
      modify<kMasked>(s, p, derived, ahead, place, kind, slot, count);
    } else {
      const float factor = params_.common.problem.scale * kLog2E;
      if (kMasked && item().far) {
        const volatile float* const bases = this->bases_at(place, count, part);
#pragma unroll
        for (int i = 0; i < kPartQ / 2; ++i) {
          s[i] = subtract_base(s[i], bases[i / 4 * 8 + i % 2], factor);
        }
      }
      // Here, or registers do not suffice.
      if constexpr (Config::kParked && Config::kDropped) this->await_ds({count});
#pragma unroll
      for (int n = 0; n < kPartQ / 8; ++n) {
        float2 reference;
        if constexpr (kReadsLse) {
          reference = lse[n];
        } else {
          reference =
              ptx::load_shared_pair(this->template numbers<Config::kLse>(slot, part) + n * 32);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = &s[4 * n + 2 * half];
          p[2 * n + half] = ptx::pack<T>(ptx::exp2(fmaf(x[0], factor, -reference.x)),
                                         ptx::exp2(fmaf(x[1], factor, -reference.y)));
        }
      }
      if constexpr (kMasked) mask(p, this->tile_of(place) * kTileQ + part * kPartQ);
      const uint32_t ds_slot = PipelineState<Config::kDsStages>{count}.slot();
      if constexpr (Config::kDropped) {
        const uint32_t park = this->ds_place(ds_slot, part);
#pragma unroll
        for (int m = 0; m < kPartQ / 16; ++m) {
#pragma unroll
          for (int i = 4 * m; i < 4 * m + 4; ++i) {
            const uint32_t signs = ahead[i];
            derived[i] = p[i] | (signs & 0x80008000u);
            p[i] &= ~ptx::spread_signs(signs);
          }
          if constexpr (Config::kParked) {
            const uint32_t* quad = &derived[4 * m];
            ptx::stmatrix_x4_trans(park + m * 2048, quad[0], quad[1], quad[2], quad[3]);
          }
        }
      } else if constexpr (Config::kParked) {
        this->await_ds({count});
        this->store_ds(p, ds_slot);
      }
    }
  }

  // Weights, as they were rounded for dV, or what was derived from them, and dP to dS, as operands.
  // count: tiles done.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate(const Operand& weights, const Tile& dp, Operand& ds,
                                                uint32_t slot, uint32_t count, int part = 0) const {
    const uint32_t delta = this->template numbers<Config::kDelta>(slot, part);
    const uint32_t parked = this->ds_place(PipelineState<Config::kDsStages>{count}.slot(), part);
    const bool parks = this->parks();
    if (parks) __syncwarp();  // they were other lanes'
    const float kept = kept_factor();
#pragma unroll
    for (int m = 0; m < kPartQ / 16; ++m) {
      uint32_t quad[4];
      if (parks) {
        ptx::ldmatrix_x4_trans(quad, parked + m * 2048);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) quad[i] = weights[4 * m + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * m + i / 2;
        const float2 d = ptx::load_shared_pair(delta + n * 32);
        const float* y = &dp[4 * n + 2 * (i % 2)];
        const float2 weight = ptx::unpack<T>(quad[i]);
        ds[4 * m + i] = ptx::pack<T>(gradient<kMasked>(weight.x, y[0], d.x, kept),
                                     gradient<kMasked>(weight.y, y[1], d.y, kept));
      }
    }
  }

  // Whether what dS needs waits where dS will lie: not where it is the weights themselves, of the
  // same consumer.
  __device__ __forceinline__ bool parks() const {
    if constexpr (!Config::kParked || Config::kWide || Config::kDropped) return Config::kParked;
    return params_.common.problem.softcap != 0 || params_.common.dropout_threshold != 0;
  }

  // What kept weights are multiplied with.
  __device__ __forceinline__ float kept_factor() const {
    if constexpr (!Config::kAny && !Config::kDropped) return 1.0f;
    return 65536.0f / (65536.0f - static_cast<float>(params_.common.dropout_threshold));
  }

 private:
  template <bool kMasked>
  static __device__ __forceinline__ float gradient(float weight, float dp, float delta,
                                                   float kept) {
    float x;
    if constexpr (Config::kAny || Config::kDropped) {
      x = fabsf(weight) * (weight > 0.0f ? fmaf(dp, kept, -delta) : -delta);
    } else {
      x = weight * (dp - delta);
    }
    // What is hidden may be NaN.
    if ((kMasked || Config::kAny) && weight == 0.0f) x = 0.0f;
    return x;
  }

  // What is done to products. A way of its own each where all the rest is known not to be: branches
  // for a few numbers at a time leave latencies uncovered.
  enum class Way { kNear0, kFar, kSloped, kAll };

  template <bool kMasked>
  __device__ __forceinline__ void modify(const Tile& s, Operand& p, Operand& derived, Ahead& ahead,
                                         int32_t place, uint32_t kind, uint32_t slot,
                                         uint32_t count) const {
    static_assert(kPartQ == kTileQ || !Config::kModified, "parts of plain scores only");
    const Problem& problem = params_.common.problem;
    const bool capped = problem.softcap != 0, sloped = problem.bias & FLASHATTN_BIAS_ALIBI;
    const bool near_0 = capped && all_near_0(s, params_.to_cap);
    const auto by = [&](auto way) {
      modify_by<kMasked, decltype(way)::value>(s, p, derived, ahead, place, kind, slot, count,
                                               near_0);
    };
    if (!Config::kAny && !sloped && near_0) {
      by(std::integral_constant<Way, Way::kNear0>());
    } else if (!Config::kAny && !sloped) {
      by(std::integral_constant<Way, Way::kFar>());
    } else if (!Config::kAny && !capped) {
      by(std::integral_constant<Way, Way::kSloped>());
    } else {
      by(std::integral_constant<Way, Way::kAll>());
    }
  }

  template <bool kMasked, Way kWay>
  __device__ __forceinline__ void modify_by(const Tile& s, Operand& p, Operand& derived,
                                            Ahead& ahead, int32_t place, uint32_t kind,
                                            uint32_t slot, uint32_t count, bool tile_near_0) const {
    const Problem& problem = params_.common.problem;
    constexpr bool kEvery = kWay == Way::kAll;
    const bool capped = kEvery ? problem.softcap != 0 : kWay != Way::kSloped;
    const bool near_0 = kEvery ? tile_near_0 : kWay == Way::kNear0;
    const bool sloped = kEvery ? problem.bias & FLASHATTN_BIAS_ALIBI : kWay == Way::kSloped;
    const uint32_t lse = this->template numbers<Config::kLse>(slot, 0);
    const int32_t tile = this->tile_of(place);
    const float slope = static_cast<const volatile float&>(control_.slopes[slot]);
    const int32_t off = diagonal_offset(problem.mask_rule(), {item().len.q, item().len.kv});
    // Of this lane's first query and upper key; numbers below 2^24 are exact.
    const float distance =
        static_cast<float>(tile * kTileQ + lane() % 4 * 2 + off - item().key - row());
    const uint32_t park = this->ds_place(PipelineState<Config::kDsStages>{count}.slot(), 0);
    const bool parks = this->parks();
    if (parks) this->await_ds({count});
    // Where rows have bases, scores are in units of kWideUnit log2(e), and meet lse behind them.
    const bool far = kMasked && item().far;
    const float unit = far ? 1.0f / kWideUnit : 1.0f, factor = params_.factor * unit;
    uint32_t weights[kTileQ / 4];
#pragma unroll
    for (int n = 0; n < kTileQ / 8; n += kStep) {
      float x[4 * kStep], change[4 * kStep];
      if constexpr (Config::kAny) {
        if (n + kFetched < kTileQ / 8) fetch_bias(ahead, n + kFetched);
      }
#pragma unroll
      for (int i = 0; i < 4 * kStep; ++i) {
        x[i] = s[4 * n + i];
        change[i] = 1.0f;
      }
      if (capped) {
#pragma unroll
        for (int i = 0; i < 4 * kStep; ++i) x[i] *= params_.to_cap;
        if (near_0) {
#pragma unroll
          for (int i = 0; i < 4 * kStep; ++i) x[i] = tanh_near_0(x[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4 * kStep; ++i) x[i] = scaled_tanh(x[i], 1.0f);
        }
#pragma unroll
        for (int i = 0; i < 4 * kStep; ++i) change[i] = fmaf(-x[i], x[i], 1.0f);
      }
#pragma unroll
      for (int i = 0; i < 4 * kStep; i += 4) {
        const float2 reference = ptx::load_shared_pair(lse + (n + i / 4) * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float own = e % 2 == 0 ? reference.x : reference.y;
          x[i + e] = fmaf(x[i + e], factor, far ? 0.0f : -own);
        }
      }
      if (sloped) {
#pragma unroll
        for (int i = 0; i < 4 * kStep; ++i) {
          const float away =
              distance + static_cast<float>(8 * n + i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
          x[i] = fmaf(-slope * unit, fabsf(away), x[i]);
        }
      }
      if constexpr (Config::kAny) add_bias(x, ahead.bias[n], kLog2E * unit);
      if (far) {
        const volatile float* const bases = this->bases_at(place, count, 0) + n * 8;
#pragma unroll
        for (int i = 0; i < 4 * kStep; ++i) {
          const float2 own = ptx::load_shared_pair(lse + (n + i / 4) * 32);
          x[i] = fmaf(subtract_base(x[i], bases[i / 4 * 8 + i % 2], 1.0f), kWideUnit,
                      -(i % 2 == 0 ? own.x : own.y));
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kStep; ++i) x[i] = ptx::exp2(x[i]);
      if constexpr (Config::kAny) {
        if (params_.common.dropout_threshold != 0) {
#pragma unroll
          for (int i = 0; i < 4 * kStep; ++i) {
            const uint32_t sign = ~ahead.keep << (31 - 4 * n - i) & 0x80000000u;
            x[i] = __uint_as_float(__float_as_uint(x[i]) | sign);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kStep; ++i) {
        p[2 * n + i] = Config::kAny ? ptx::pack_positive<T>(x[2 * i], x[2 * i + 1])
                                    : ptx::pack<T>(x[2 * i], x[2 * i + 1]);
      }
      if (capped) {
#pragma unroll
        for (int i = 0; i < 4 * kStep; ++i) x[i] *= change[i];
      }
#pragma unroll
      for (int i = 0; i < 2 * kStep; ++i) {
        weights[2 * n + i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
      }
      if constexpr (kMasked) {
        if (!Config::kAny || !(kind & Base::kFull)) {
          mask(tile, n, [&](int i, uint32_t seen) {
            p[2 * n + i] &= seen;
            weights[2 * n + i] &= seen;
          });
        }
      }
      if constexpr (Config::kAny) {
        if (problem.mask & FLASHATTN_MASK_BLOCKS) {
#pragma unroll
          for (int i = 0; i < 2 * kStep; ++i) {
            const uint32_t pair = ahead.seen >> (4 * n + 2 * i);
            const uint32_t seen = (pair & 1 ? 0xffffu : 0) | (pair & 2 ? 0xffff0000u : 0);
            p[2 * n + i] &= seen;
            weights[2 * n + i] &= seen;
          }
        }
      }
      if constexpr (!Config::kParked) {
#pragma unroll
        for (int i = 0; i < 2 * kStep; ++i) derived[2 * n + i] = weights[2 * n + i];
      } else if ((n + kStep) % 2 == 0 && parks) {
        const uint32_t* quad = &weights[2 * (n + kStep - 2)];
        ptx::stmatrix_x4_trans(park + n / 2 * 2048, quad[0], quad[1], quad[2], quad[3]);
      }
    }
  }

  __device__ __forceinline__ void add_bias(float (&x)[4], const uint32_t (&bias)[4],
                                           float unit) const {
    const Problem& problem = params_.common.problem;
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) return;
    switch (problem.dtype_bias) {
      case FLASHATTN_DTYPE_F32:
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaf(__uint_as_float(bias[i]), unit, x[i]);
        break;
      case FLASHATTN_DTYPE_F16:
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaf(ptx::unpack<__half>(bias[i]).x, unit, x[i]);
        break;
      case FLASHATTN_DTYPE_BF16:
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaf(ptx::unpack<__nv_bfloat16>(bias[i]).x, unit, x[i]);
        break;
      default:
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = bias[i] ? x[i] : -INFINITY;
    }
  }

  // apply(i, bits) for pair i of kStep columns, all bits of a number set where the query sees the
  // key.
  template <class Apply>
  __device__ __forceinline__ void mask(int32_t tile, int n, Apply apply) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t begin = visible.begin - tile * kTileQ - lane() % 4 * 2;
      const uint32_t count = visible.end - visible.begin;
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        const uint32_t place = static_cast<uint32_t>((n + k) * 8 - begin);
        apply(2 * k + half, (place < count ? 0xffffu : 0) | (place + 1 < count ? 0xffff0000u : 0));
      }
    }
  }

  // 0 where a query does not see a key.
  __device__ __forceinline__ void mask(Operand& p, int32_t query) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const volatile Interval& visible = control_.visible[row() + half * 8];
      // As seen from this lane's first column.
      const int32_t begin = visible.begin - query - lane() % 4 * 2;
      const uint32_t count = visible.end - visible.begin;
#pragma unroll
      for (int n = 0; n < kPartQ / 8; ++n) {
        const uint32_t place = static_cast<uint32_t>(n * 8 - begin);
        if (place >= count) p[2 * n + half] &= 0xffff0000u;
        if (place + 1 >= count) p[2 * n + half] &= 0x0000ffffu;
      }
    }
  }
};

}  // namespace flashattn::cuda::sm90
