// Score modifications as chains of members: what happens to a product of Q and K on its way to P.
// A member is a type of a file of its own (softcap.cuh, alibi.cuh, dense_bias.cuh, block_mask.cuh,
// tree_mask.cuh, dropout.cuh), which says what it is in score_stage.cuh. A kernel is compiled for
// one chain, which a row of its table names; it makes each member for the place of a fragment
// (`make`), and applies the chain.
#pragma once

#include <type_traits>

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/alibi.cuh"
#include "cuda/device/block_descales.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/dense_bias.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/mask.cuh"
#include "cuda/device/softcap.cuh"
#include "cuda/device/tree_mask.cuh"
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

  // Applies the members of one stage. factor: still to be applied to the elements to make them
  // scores; returns the factor that remains. make(Type<Member>()): makes the member for the
  // position of the fragment.
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

  // Applies the member of the product stage if it is on, which stage_is_on() says outside of loops.
  // derivative: of a score with respect to product * scale; 1 before.
  template <int kCount, class Make>
  static __device__ __forceinline__ void forward_with_derivative(float (&s)[kCount],
                                                                 float (&derivative)[kCount],
                                                                 bool is_on, const Make& make) {
    static_assert(((Members::kStage == ScoreStage::kProduct) + ... + 0) <= 1,
                  "one member changes products");
    const auto apply = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == ScoreStage::kProduct) {
        if (is_on) make(type).forward_with_derivative(s, derivative);
      }
    };
    (apply(Type<Members>()), ...);
  }

  // Returns that derivative, computed from the modified product, if all members of the product
  // stage are on.
  static __device__ __forceinline__ float derivative_at(float value) {
    float derivative = 1.0f;
    const auto apply = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == ScoreStage::kProduct) {
        derivative *= Member::derivative_at(value);
      }
    };
    (apply(Type<Members>()), ...);
    return derivative;
  }

  // Returns the factor from products, which members of the product stage may have changed, to
  // scores.
  static __device__ __forceinline__ float product_factor(const Problem& problem) {
    float factor = problem.scale;
    const auto ask = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == ScoreStage::kProduct) {
        if (is_on<Member>(problem)) factor = Member::factor(problem);
      }
    };
    (ask(Type<Members>()), ...);
    return factor;
  }

  // Whether a member of the stage is on.
  template <ScoreStage kStage>
  static __device__ __forceinline__ bool stage_is_on(const Problem& problem) {
    bool any = false;
    const auto ask = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == kStage) any |= is_on<Member>(problem);
    };
    (ask(Type<Members>()), ...);
    return any;
  }

  // Adds biases to scores, to which the factor has been applied.
  template <class Layout, int kCount, class Make>
  static __device__ __forceinline__ void add_biases(Layout layout, float (&s)[kCount],
                                                    const Problem& problem, const Make& make) {
    const auto add = [&](auto type) {
      using Member = typename decltype(type)::type;
      if constexpr (Member::kStage == ScoreStage::kBias) {
        if (is_on<Member>(problem)) make(type).add(layout, s);
      }
    };
    (add(Type<Members>()), ...);
  }

  // Turns products into scores, except for the factor that it returns.
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
using RuntimeScoreMod = RuntimeChain<Softcap, Alibi, DenseBias, BlockMask, TreeMask, Dropout>;

// Makes members from the problem and its arrays, for scores in units of kWideUnit log2(e). kExact:
// to the last digits of fp32.
template <bool kExact>
struct WideMembers {
  const Problem& problem;
  const Inputs& in;
  int32_t b, h;
  Lengths len;
  int32_t i, j;       // the lane's first query and key
  int32_t query_end;  // end of the queries that count

  static __device__ __forceinline__ float product_factor(const Problem& problem) {
    return RuntimeScoreMod::product_factor(problem) * (kLog2E / kWideUnit);
  }
  // Whether scores must have that factor before their row maximum is taken, though no bias applies
  // it: the factor is negative, or a block mask, a tree or hidden pages may leave a row one key,
  // whose P is to be exactly 1.
  static __device__ __forceinline__ bool needs_product(const Problem& problem) {
    return (problem.mask & (FLASHATTN_MASK_BLOCKS | kKeyBitMasks)) ||
           RuntimeScoreMod::product_factor(problem) < 0;
  }
  // The part of product_factor() that is still to be applied once scores have been modified.
  static __device__ __forceinline__ float remaining_factor(const Problem& problem) {
    const bool is_applied =
        RuntimeScoreMod::stage_is_on<ScoreStage::kBias>(problem) || needs_product(problem);
    return is_applied ? 1.0f : product_factor(problem);
  }

  __device__ __forceinline__ auto operator()(Type<Softcap>) const {
    const Softcap softcap{problem.scale / problem.softcap, problem.softcap * (kLog2E / kWideUnit)};
    if constexpr (kExact) {
      return ExactSoftcap{softcap};
    } else {
      return softcap;
    }
  }
  __device__ __forceinline__ Alibi operator()(Type<Alibi>) const {
    return {Alibi::slope_of(problem, in, b, h) * (kLog2E / kWideUnit),
            static_cast<float>(i + diagonal_offset(problem.mask_rule(), len) - j)};
  }
  __device__ __forceinline__ DenseBiasTile<true> operator()(Type<DenseBias>) const {
    const DenseBias bias = DenseBias::of(problem, in, b, h);
    return {bias,
            i,
            j,
            query_end - i,
            len.kv - j,
            kLog2E / kWideUnit,
            DenseBiasTile<true>::can_pair(bias, in)};
  }
};

// LSE of a row. base: in units of `unit` log2(e). sum: of P relative to base. fmaf() rounds once
// where both terms nearly cancel. Near FLT_MAX, which the change to log2 units would exceed, the
// sum adds nothing and is left out.
__device__ __forceinline__ float lse_of(float base, float unit, float sum) {
  const float lse = fmaf(base, unit, log2f(sum)) * kLn2;
  return sum == 0.0f ? -INFINITY : fabsf(lse) < INFINITY ? lse : base * (unit * kLn2);
}

}  // namespace flashattn::cuda
