// Score modifications as chains of members: what happens to a product of Q and K on its way to P.
// A member is a type of a file of its own (softcap.cuh, alibi.cuh, dense_bias.cuh, block_mask.cuh,
// dropout.cuh), which says what it is in score_stage.cuh. A kernel is compiled for one chain, which
// a row of its table names; it makes each member for the place of a fragment (`make`), and applies
// the chain.
#pragma once

#include <type_traits>

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/alibi.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/dense_bias.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/mask.cuh"
#include "cuda/device/softcap.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// Names a member.
template <class Member>
struct Type {
  using type = Member;
};

// kAsked: a kernel asks at run time which members are on; otherwise all are.
template <bool kAsked, class... Members>
struct ScoreModMembers {
  static constexpr bool kIsRuntime = kAsked;
  static constexpr bool kIsPlain = sizeof...(Members) == 0;  // scale only
  static constexpr bool kBoundsGrowth = (Members::kBoundsGrowth && ...);
  static constexpr bool kReadsMemory = (Members::kReadsMemory || ...);
  template <class Member>
  static constexpr bool kHas = (std::is_same<Member, Members>::value || ...);
  template <ScoreStage kStage>
  static constexpr bool kHasStage = ((Members::kStage == kStage) || ...);
  // Whether scores differ from products by more than the scale.
  static constexpr bool kModifiesScores =
      kHasStage<ScoreStage::kProduct> || kHasStage<ScoreStage::kBias>;

  template <class Member>
  static __device__ __forceinline__ bool is_on(const Problem& problem) {
    if constexpr (!kHas<Member> || !kAsked) {
      return kHas<Member>;
    } else {
      return Member::is_on(problem);
    }
  }

  // Applies the members of one stage. factor: what elements are still to be multiplied with to be
  // scores; returns what is left of it. make(Type<Member>()): the member, as it stands to the
  // fragment.
  template <ScoreStage kStage, class Layout, int kCount, class Make>
  static __device__ __forceinline__ float forward_stage(Layout layout, float (&s)[kCount],
                                                        float factor, const Problem& problem,
                                                        const Make& make) {
    const auto apply = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == kStage) {
        if (is_on<Member>(problem)) factor = make(type).forward(layout, s, factor);
      }
    };
    (apply(Type<Members>()), ...);
    return factor;
  }

  // Products to scores, but for the factor that it returns.
  template <class Layout, int kCount, class Make>
  static __device__ __forceinline__ float forward(Layout layout, float (&s)[kCount], float factor,
                                                  const Problem& problem, const Make& make) {
    factor = forward_stage<ScoreStage::kProduct>(layout, s, factor, problem, make);
    return forward_stage<ScoreStage::kBias>(layout, s, factor, problem, make);
  }
};

// All members are on.
template <class... Members>
struct ScoreModChain : ScoreModMembers<false, Members...> {};

// Any members may be on.
template <class... Members>
struct RuntimeChain : ScoreModMembers<true, Members...> {};

// Every modification that there is.
using RuntimeScoreMod = RuntimeChain<Softcap, Alibi, DenseBias, BlockMask, Dropout>;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// How products become scores: tanh(product * inner), of a softcap; times `outer`; plus biases.
struct ScoreSteps {
  bool capped, sloped, biased;  // sloped, biased: by a step of its own, which applies `wide`, too
  float inner, outer, wide;     // outer in units of log2(e), wide in units of kWideUnit log2(e)

  __device__ __forceinline__ explicit ScoreSteps(const Problem& problem)
      : capped(problem.softcap != 0),
        // A negative scale is for the same step to apply, with a slope of 0. So is that of a block
        // mask: where it leaves a row one key, that key's weight is exactly 1.
        sloped((problem.bias & FLASHATTN_BIAS_ALIBI) || (problem.mask & FLASHATTN_MASK_BLOCKS) ||
               (!capped && problem.scale < 0)),
        biased(problem.bias & FLASHATTN_BIAS_DENSE),
        inner(capped ? problem.scale / problem.softcap : 0.0f),
        outer((capped ? problem.softcap : problem.scale) * kLog2E),
        wide((capped ? problem.softcap : problem.scale) * (kLog2E / kWideUnit)) {}

  // What is left to multiply scores with when they meet their reference: not negative.
  __device__ __forceinline__ float factor() const { return sloped || biased ? kWideUnit : outer; }
};

template <int kCount>
__device__ __forceinline__ bool all_near_0(const float (&x)[kCount], float inner) {
  return Softcap{inner, 1.0f}.all_near_0(x);
}

template <int kCount>
__device__ __forceinline__ void cap(float (&s)[kCount], float inner) {
  Softcap{inner, 1.0f}.forward(SLayout(), s, 1.0f);
}

// kExact: to the last digits of fp32.
template <bool kExact, int kGroups>
__device__ __forceinline__ void cap(float (&s)[kGroups][4], float inner) {
  if constexpr (kExact) {
#pragma unroll
    for (int x = 0; x < kGroups * 4; ++x) s[x / 4][x % 4] = tanhf(s[x / 4][x % 4] * inner);
  } else {
    cap(reinterpret_cast<float (&)[kGroups * 4]>(s), inner);
  }
}

// LSE of a row: its base, in units of `unit` log2(e), beside the sum of its weights. One rounding
// where both nearly cancel; near FLT_MAX, which log2(e) takes past it, the sum adds nothing.
__device__ __forceinline__ float lse_of(float base, float unit, float sum) {
  const float lse = fmaf(base, unit, log2f(sum)) * kLn2;
  return sum == 0.0f ? -INFINITY : fabsf(lse) < INFINITY ? lse : base * (unit * kLn2);
}

__device__ __forceinline__ float slope_of(const Problem& problem, const Inputs& in, int32_t b,
                                          int32_t h) {
  if (!(problem.bias & FLASHATTN_BIAS_ALIBI)) return 0.0f;
  return in.alibi_slopes[b * in.alibi_stride_batch + h * in.alibi_stride_head];
}

// ALiBi. distance: of the lane's first column from its row; numbers below 2^24 are exact.
template <int kGroups>
__device__ __forceinline__ void add_slope(float (&s)[kGroups][4], int half, float outer,
                                          float slope, float distance) {
#pragma unroll
  for (int x = 0; x < kGroups * 2; ++x) {
    float& score = s[x / 2][half * 2 + x % 2];
    const float away = distance + static_cast<float>(x / 2 * 8 + x % 2);
    score = fmaf(score, outer, -slope * fabsf(away));
  }
}

// Neighbours of a row of a dense bias, as they lie in memory.
template <class B>
struct BiasPair {
  using One = std::conditional_t<sizeof(B) == 1, uint8_t, uint16_t>;
  using Two = std::conditional_t<sizeof(B) == 1, uint16_t, uint32_t>;
  static __device__ __forceinline__ float2 numbers(Two two) {
    // Of a boolean one it counts only whether they are 0.
    if constexpr (sizeof(B) == 1) return make_float2(two & 0xff, two >> 8);
    if constexpr (sizeof(B) == 2) return ptx::unpack<B>(two);
  }
  static __device__ __forceinline__ float number(One one) { return numbers(one).x; }
};

template <>
struct BiasPair<float> {
  using One = uint32_t;
  using Two = uint64_t;
  static __device__ __forceinline__ float2 numbers(Two two) {
    return make_float2(__uint_as_float(static_cast<uint32_t>(two)),
                       __uint_as_float(static_cast<uint32_t>(two >> 32)));
  }
  static __device__ __forceinline__ float number(One one) { return __uint_as_float(one); }
};

// A dense bias of one head of one sequence.
struct HeadBias {
  const char* at;  // of query 0 and key 0
  int64_t row;
  int32_t dtype;
  bool paired;  // neighbours can be read at once

  static __device__ __forceinline__ HeadBias of(const Problem& problem, const Inputs& in, int32_t b,
                                                int32_t h) {
    const int32_t size = dtype_size(problem.dtype_bias);
    const int64_t strides = in.bias_stride_batch | in.bias_stride_head | in.bias_stride_row;
    const char* at = static_cast<const char*>(in.bias) +
                     (b * in.bias_stride_batch + h * in.bias_stride_head) * size;
    return {at, in.bias_stride_row, problem.dtype_bias,
            strides % 2 == 0 && reinterpret_cast<uintptr_t>(at) % (2 * size) == 0};
  }

  // Calls visit(score, bias) for the `columns` first of one half, as seen from the lane's first
  // column, which is key j of query i; elsewhere with some bias.
  template <class B, int kGroups, class Visit>
  __device__ __forceinline__ void visit_row(float (&s)[kGroups][4], int half, int32_t i, int32_t j,
                                            int32_t columns, Visit visit) const {
    using Pair = BiasPair<B>;
    using One = typename Pair::One;
    using Two = typename Pair::Two;
    Two bias[kGroups];
    const One* from = reinterpret_cast<const One*>(at) + (i * row + j);
    // A last column without a neighbour is read alone.
    if (paired && (columns % 2 == 0 || columns >= kGroups * 8)) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        bias[n] = 0;
        if (n * 8 < columns) bias[n] = *reinterpret_cast<const Two*>(from + n * 8);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        One x = 0, y = 0;
        if (n * 8 < columns) x = from[n * 8];
        if (n * 8 + 1 < columns) y = from[n * 8 + 1];
        bias[n] = static_cast<Two>(x | static_cast<Two>(y) << 8 * sizeof(B));
      }
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float2 numbers = Pair::numbers(bias[n]);
      visit(s[n][half * 2], numbers.x);
      visit(s[n][half * 2 + 1], numbers.y);
    }
  }

  // Calls visit(strip, n, x, bias) for numbers [strip][n][x] of strips whose rows are keys, from j
  // on, `rows` of them, and whose columns are queries, from i on, of which there are `columns`; i
  // and j as the lane sees them. Elsewhere with some bias.
  template <class B, int kMmaM, int kGroups, class Visit>
  __device__ __forceinline__ void visit_transposed(int32_t i, int32_t j, int32_t columns,
                                                   int32_t rows, Visit visit) const {
    using One = typename BiasPair<B>::One;
    One bias[kMmaM][kGroups][4];
    const One* from = reinterpret_cast<const One*>(at) + (i * row + j);
#pragma unroll
    for (int n = 0; n < kGroups; ++n, from += 8 * row) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t keys = n * 8 + e < columns ? rows : 0;
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          One& own = bias[x / 2][n][x % 2 * 2 + e];
          own = 0;
          if (x * 8 < keys) own = from[e * row + x * 8];
        }
      }
    }
#pragma unroll
    for (int x = 0; x < kMmaM * kGroups * 4; ++x) {
      const int strip = x / (kGroups * 4), n = x / 4 % kGroups;
      visit(strip, n, x % 4, BiasPair<B>::number(bias[strip][n][x % 4]));
    }
  }

  // To scores times `wide`. A boolean one hides, whatever the score was.
  template <int kGroups>
  __device__ __forceinline__ void add_row(float (&s)[kGroups][4], int half, float wide, int32_t i,
                                          int32_t j, int32_t columns) const {
    const auto add = [&](float& x, float y) { x = fmaf(x, wide, y * (kLog2E / kWideUnit)); };
    switch (dtype) {
      case FLASHATTN_DTYPE_F32: return visit_row<float>(s, half, i, j, columns, add);
      case FLASHATTN_DTYPE_F16: return visit_row<__half>(s, half, i, j, columns, add);
      case FLASHATTN_DTYPE_BF16: return visit_row<__nv_bfloat16>(s, half, i, j, columns, add);
      default:
        visit_row<uint8_t>(s, half, i, j, columns,
                           [&](float& x, float y) { x = y != 0.0f ? x * wide : -INFINITY; });
    }
  }
};

}  // namespace flashattn::cuda
