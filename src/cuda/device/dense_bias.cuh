// Dense bias: a number of an array for each query and key, added to the score; a boolean one hides
// the score where it is 0.
#pragma once

#include <type_traits>

#include "core/score_mod.h"
#include "cuda/params.h"
#include "cuda/device/fragment.cuh"
#include "cuda/device/score_stage.cuh"
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
    // Elements of a boolean bias are 0 or not 0.
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

  const char* first;  // element of query 0 and key 0
  int64_t row;        // stride of a query, in elements
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

  // Returns a score with its bias. factor: still to be applied to the score. log2e: log2(e) in the
  // units of the scores.
  template <class B>
  static __device__ __forceinline__ float apply(float score, float factor, float bias,
                                                float log2e) {
    if constexpr (sizeof(B) == 1) return bias != 0.0f ? score * factor : -INFINITY;
    return fmaf(score, factor, bias * log2e);
  }
  // For a score to which the factor has been applied.
  template <class B>
  static __device__ __forceinline__ float add(float score, float bias, float log2e) {
    if constexpr (sizeof(B) == 1) return bias != 0.0f ? score : -INFINITY;
    return fmaf(bias, log2e, score);
  }
};

// The address of the bias of a lane's elements of S^T. Each element is loaded into a word of its
// own, which is converted when it is added.
struct DenseBiasColumns {
  const char* first;      // element of the lane's first query and key
  int32_t queries, keys;  // left from the lane's first query and key on

  static __device__ __forceinline__ DenseBiasColumns of(const DenseBias& bias, int32_t i, int32_t j,
                                                        int32_t queries, int32_t keys) {
    return {bias.first + (i * bias.row + j) * dtype_size(bias.dtype), queries, keys};
  }

  // row: elements from one query to the next.
  template <int kBytes, class Layout, int kCount>
  __device__ __forceinline__ void load(Layout layout, uint32_t (&words)[kCount],
                                       int64_t row) const {
#pragma unroll
    for (int y = 0; y < kCount; ++y) {
      const int x = Layout::by_query(y, kCount);
      const int32_t query = layout.query(x), key = layout.key(x);
      words[x] =
          ptx::load_if<kBytes>(first + (query * row + key) * kBytes, query < queries && key < keys);
    }
  }
  template <class Layout, int kCount>
  __device__ __forceinline__ void load(Layout layout, uint32_t (&words)[kCount], int64_t row,
                                       int32_t dtype) const {
    switch (dtype) {
      case FLASHATTN_DTYPE_F32: return load<4>(layout, words, row);
      case FLASHATTN_DTYPE_F16:
      case FLASHATTN_DTYPE_BF16: return load<2>(layout, words, row);
      default: return load<1>(layout, words, row);
    }
  }
};

// The dense bias of a fragment of S^T whose words have been loaded.
template <int kCount>
struct DenseBiasWords {
  const uint32_t (&words)[kCount];
  int32_t dtype;
  float log2e;  // in the units of the scores

  template <class Layout>
  __device__ __forceinline__ void add(Layout, float (&s)[kCount]) const {
    DenseBias::with_type(dtype, [&](auto type) { add<decltype(type)>(s, words, log2e); });
  }
  template <class B>
  static __device__ __forceinline__ void add(float (&s)[kCount], const uint32_t (&words)[kCount],
                                             float log2e) {
    using One = typename BiasElement<B>::One;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = DenseBias::add<B>(s[i], BiasElement<B>::value(static_cast<One>(words[i])), log2e);
    }
  }
};

// The dense bias of a lane's elements. kPairs: neighbours of a row of S are read at once where they
// can be, and all before the first is used; otherwise one by one, in fewer registers.
template <bool kPairs>
struct DenseBiasTile {
  DenseBias bias;
  int32_t i, j;           // the lane's first query and key
  int32_t queries, keys;  // left from the lane's first query and key on
  float log2e;            // in the units of the scores
  bool paired;            // neighbours can be read at once

  // Whether rows of a bias of this alignment can be read in pairs.
  static __device__ __forceinline__ bool can_pair(const DenseBias& bias, const Inputs& in) {
    const int64_t strides = in.bias_stride_batch | in.bias_stride_head | in.bias_stride_row;
    return strides % 2 == 0 &&
           reinterpret_cast<uintptr_t>(bias.first) % (2 * dtype_size(bias.dtype)) == 0;
  }

  // factor: still to be applied to the scores. Elements past the last query or key become anything.
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

  // Adds the bias to scores to which the factor has been applied.
  template <class Layout, int kCount>
  __device__ __forceinline__ void add(Layout layout, float (&s)[kCount]) const {
    const DenseBiasColumns columns = DenseBiasColumns::of(bias, i, j, queries, keys);
    DenseBias::with_type(bias.dtype, [&](auto type) {
      using B = decltype(type);
      uint32_t words[kCount];
      columns.template load<sizeof(B)>(layout, words, bias.row);
      DenseBiasWords<kCount>::template add<B>(s, words, log2e);
    });
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
    if constexpr (!kPairs) {
#pragma unroll
      for (int x = 0; x < SRowLayout::count(kCount); ++x) {
        if (SRowLayout::key(x) < columns) apply(x, Element::value(from[SRowLayout::key(x)]));
      }
      return;
    }
    Two pairs[kCount / 4];
    // A last column without a neighbour is read alone.
    if (paired && (columns % 2 == 0 || columns >= kCount * 2)) {
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        pairs[n] = 0;
        if (n * 8 < columns) pairs[n] = *reinterpret_cast<const Two*>(from + n * 8);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        One x = 0, y = 0;
        if (n * 8 < columns) x = from[n * 8];
        if (n * 8 + 1 < columns) y = from[n * 8 + 1];
        pairs[n] = static_cast<Two>(x | static_cast<Two>(y) << 8 * sizeof(B));
      }
    }
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const float2 y = Element::pair(pairs[n]);
      apply(2 * n, y.x);
      apply(2 * n + 1, y.y);
    }
  }
};

}  // namespace flashattn::cuda
