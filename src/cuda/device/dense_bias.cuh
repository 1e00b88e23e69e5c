// Dense bias: a number of an array for each query and key, added to the score; a boolean one hides
// the score where it is 0.
#pragma once

#include <type_traits>

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/fragment.cuh"
#include "cuda/device/score_stage.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// One element of a bias, and two neighbours of a row, as they lie in memory. B: float, __half,
// __nv_bfloat16, or uint8_t for a boolean one.
template <class B>
struct BiasElement {
  using One = std::conditional_t<sizeof(B) == 1, uint8_t, uint16_t>;
  using Two = std::conditional_t<sizeof(B) == 1, uint16_t, uint32_t>;
  static __device__ __forceinline__ float2 pair(Two two) {
    // Of a boolean one it counts only whether they are 0.
    if constexpr (sizeof(B) == 1) return make_float2(two & 0xff, two >> 8);
    if constexpr (sizeof(B) == 2) return ptx::unpack<B>(two);
  }
  static __device__ __forceinline__ float value(One one) { return pair(one).x; }
};

template <>
struct BiasElement<float> {
  using One = uint32_t;
  using Two = uint64_t;
  static __device__ __forceinline__ float2 pair(Two two) {
    return make_float2(__uint_as_float(static_cast<uint32_t>(two)),
                       __uint_as_float(static_cast<uint32_t>(two >> 32)));
  }
  static __device__ __forceinline__ float value(One one) { return __uint_as_float(one); }
};

// The dense bias of one head of one sequence.
struct DenseBias {
  static constexpr ScoreStage kStage = ScoreStage::kBias;
  static constexpr bool kBoundsGrowth = false, kReadsMemory = true;
  static __device__ __forceinline__ bool is_on(const Problem& problem) {
    return problem.bias & FLASHATTN_BIAS_DENSE;
  }

  const char* first;  // of query 0 and key 0
  int64_t row;        // elements
  int32_t dtype;

  static __device__ __forceinline__ DenseBias of(const Problem& problem, const Inputs& in,
                                                 int32_t b, int32_t h) {
    return {
        static_cast<const char*>(in.bias) +
            (b * in.bias_stride_batch + h * in.bias_stride_head) * dtype_size(problem.dtype_bias),
        in.bias_stride_row, problem.dtype_bias};
  }

  // Calls use(B()) for the type of the elements.
  template <class Use>
  static __device__ __forceinline__ auto with_type(int32_t dtype, Use use) {
    switch (dtype) {
      case FLASHATTN_DTYPE_F32: return use(float());
      case FLASHATTN_DTYPE_F16: return use(__half());
      case FLASHATTN_DTYPE_BF16: return use(__nv_bfloat16());
      default: return use(uint8_t());
    }
  }

  // A score with a bias. factor: not yet applied to the score. log2e: log2(e) in the units of the
  // scores.
  template <class B>
  static __device__ __forceinline__ float apply(float score, float factor, float bias,
                                                float log2e) {
    if constexpr (sizeof(B) == 1) return bias != 0.0f ? score * factor : -INFINITY;
    return fmaf(score, factor, bias * log2e);
  }
  // The same where the factor has been applied.
  template <class B>
  static __device__ __forceinline__ float add(float score, float bias, float log2e) {
    if constexpr (sizeof(B) == 1) return bias != 0.0f ? score : -INFINITY;
    return fmaf(bias, log2e, score);
  }

  // The bias of query i and key j, added to a score.
  __device__ __forceinline__ float add_to(float score, int32_t i, int32_t j, float log2e) const {
    return with_type(dtype, [&](auto type) {
      using B = decltype(type);
      using One = typename BiasElement<B>::One;
      const One bias = reinterpret_cast<const One*>(first)[i * row + j];
      return add<B>(score, BiasElement<B>::value(bias), log2e);
    });
  }
};

// The dense bias of a lane's elements of S.
struct DenseBiasRows {
  DenseBias bias;
  int32_t i, j;           // the lane's first query and key
  int32_t queries, keys;  // left from there on
  float log2e;            // in the units of the scores
  bool paired;            // neighbours can be read at once

  // Whether rows of a bias of this alignment can be read in pairs.
  static __device__ __forceinline__ bool can_pair(const DenseBias& bias, const Inputs& in) {
    const int64_t strides = in.bias_stride_batch | in.bias_stride_head | in.bias_stride_row;
    return strides % 2 == 0 &&
           reinterpret_cast<uintptr_t>(bias.first) % (2 * dtype_size(bias.dtype)) == 0;
  }

  // factor: not yet applied to the scores. Elements past the last query or key become anything.
  template <int kCount>
  __device__ __forceinline__ float forward(SLayout, float (&s)[kCount], float factor) const {
    DenseBias::with_type(bias.dtype, [&](auto type) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        add_row<decltype(type)>(SRowLayout{half}, s, factor, i + half * 8,
                                half * 8 < queries ? keys : 0);
      }
    });
    return 1.0f;
  }
  template <int kCount>
  __device__ __forceinline__ float forward(SRowLayout layout, float (&s)[kCount],
                                           float factor) const {
    DenseBias::with_type(bias.dtype, [&](auto type) {
      add_row<decltype(type)>(layout, s, factor, i, 0 < queries ? keys : 0);
    });
    return 1.0f;
  }

 private:
  template <class B, int kCount>
  __device__ __forceinline__ void add_row(SRowLayout layout, float (&s)[kCount], float factor,
                                          int32_t query, int32_t columns) const {
    using Element = BiasElement<B>;
    using One = typename Element::One;
    using Two = typename Element::Two;
    const One* from = reinterpret_cast<const One*>(bias.first) + (query * bias.row + j);
    const auto apply = [&](int x, float y) {
      float& score = s[layout.element(x)];
      score = DenseBias::apply<B>(score, factor, y, log2e);
    };
    // A last column without a neighbour is read alone.
    if (paired && (columns % 2 == 0 || columns >= kCount * 2)) {
      Two pairs[kCount / 4];
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        pairs[n] = 0;
        if (n * 8 < columns) pairs[n] = *reinterpret_cast<const Two*>(from + n * 8);
      }
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        const float2 y = Element::pair(pairs[n]);
        apply(2 * n, y.x);
        apply(2 * n + 1, y.y);
      }
    } else {
#pragma unroll
      for (int x = 0; x < SRowLayout::count(kCount); ++x) {
        if (SRowLayout::key(x) < columns) apply(x, Element::value(from[SRowLayout::key(x)]));
      }
    }
  }
};

// The dense bias of a lane's elements of S^T, read ahead of its use: as a word an element, which is
// not converted.
struct DenseBiasColumns {
  const char* first;      // of the lane's first query and key
  int32_t queries, keys;  // left from there on

  static __device__ __forceinline__ DenseBiasColumns of(const DenseBias& bias, int32_t i, int32_t j,
                                                        int32_t queries, int32_t keys) {
    return {bias.first + (i * bias.row + j) * dtype_size(bias.dtype), queries, keys};
  }

  // Loads those of group n of 8 queries. row: elements from one query to the next.
  template <int kBytes>
  __device__ __forceinline__ void load(uint32_t (&words)[4], int n, int64_t row) const {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int32_t query = StLayout{8 * n}.query(x), key = StLayout().key(x);
      // no_hoist: otherwise addresses are computed before the mainloop and held in registers.
      words[x] = ptx::load_if<kBytes>(first + (no_hoist(query) * row + key) * kBytes,
                                      query < queries && key < keys);
    }
  }
  __device__ __forceinline__ void load(uint32_t (&words)[4], int n, int64_t row,
                                       int32_t dtype) const {
    switch (dtype) {
      case FLASHATTN_DTYPE_F32: return load<4>(words, n, row);
      case FLASHATTN_DTYPE_F16:
      case FLASHATTN_DTYPE_BF16: return load<2>(words, n, row);
      default: return load<1>(words, n, row);
    }
  }

  // Adds what was loaded to the scores of a group.
  template <int kCount>
  static __device__ __forceinline__ void add(float (&s)[kCount], const uint32_t (&words)[kCount],
                                             int32_t dtype, float log2e) {
    DenseBias::with_type(dtype, [&](auto type) {
      using B = decltype(type);
      using One = typename BiasElement<B>::One;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] = DenseBias::add<B>(s[i], BiasElement<B>::value(static_cast<One>(words[i])), log2e);
      }
    });
  }
};

}  // namespace flashattn::cuda
