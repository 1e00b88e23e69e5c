// The kernels of append_kv.cu work on vecs of rows, see AppendOperand, and on rows of the cache.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/device/elements.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/common/append_kv.h"

namespace flashattn::cuda {

// Where the elements of a vec lie in its row. c: the vec's first pair.
template <int kPairs>
struct VecPlace {
  VecPlace() = default;
  __device__ __forceinline__ VecPlace(const AppendOperand& operand, int32_t c)
      : c(c), rotates(c < operand.pairs) {
    const bool apart = c < operand.split;
    first = apart ? c : 2 * c;
    second = apart ? operand.split + c : 2 * c + kPairs;
    has_second = second < operand.dim;
  }

  int32_t c, first, second;
  bool rotates, has_second;
};

// The elements of a vec as they lie in memory.
template <class T, int kPairs>
struct RawVec {
  using Word =
      std::conditional_t<kPairs == 1, T, std::conditional_t<kPairs * sizeof(T) == 8, uint2, uint4>>;
  static constexpr int kWords = kPairs * sizeof(T) / sizeof(Word);

  __device__ __forceinline__ void load(const VecPlace<kPairs>& at, const char* row) {
    const T* const from = reinterpret_cast<const T*>(row);
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      x[n] = reinterpret_cast<const Word*>(from + at.first)[n];
      if (at.has_second) y[n] = reinterpret_cast<const Word*>(from + at.second)[n];
    }
  }
  __device__ __forceinline__ void store(const VecPlace<kPairs>& at, char* row) const {
    T* const to = reinterpret_cast<T*>(row);
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      reinterpret_cast<Word*>(to + at.first)[n] = x[n];
      if (at.has_second) reinterpret_cast<Word*>(to + at.second)[n] = y[n];
    }
  }

  Word x[kWords], y[kWords];
};

// Cosines and sines of half of a vec's pairs. Half 0: its first pairs or, where the two elements
// of a pair are neighbours, the pairs in x. Half 1: the others. A vec of one pair has one half.
template <int kPairs>
struct VecAngles {
  static constexpr int kHalf = kPairs == 1 ? 1 : kPairs / 2;
  float cos[kHalf], sin[kHalf];
};

// The elements of a vec in fp32.
template <int kPairs>
struct Vec {
  template <class T>
  __device__ __forceinline__ explicit Vec(const RawVec<T, kPairs>& raw) {
    load_elements(reinterpret_cast<const T*>(raw.x), x);
    load_elements(reinterpret_cast<const T*>(raw.y), y);
  }

  // angles_of(half) returns VecAngles.
  template <class Angles>
  __device__ __forceinline__ void rotate(bool interleaved, const Angles& angles_of) {
    const auto rotate = [](float& a, float& b, float cosine, float sine) {
      const float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
      b = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
      a = first;
    };
    constexpr int kHalf = VecAngles<kPairs>::kHalf;
#pragma unroll
    for (int half = 0; half < kPairs / kHalf; ++half) {
      const VecAngles<kPairs> angles = angles_of(half);
      const auto& cos = angles.cos;
      const auto& sin = angles.sin;
      if (kPairs == 1 || !interleaved) {
#pragma unroll
        for (int n = 0; n < kHalf; ++n) {
          rotate(x[half * kHalf + n], y[half * kHalf + n], cos[n], sin[n]);
        }
      } else {
        float (&z)[kPairs] = half ? y : x;
#pragma unroll
        for (int n = 0; n < kHalf; ++n) rotate(z[2 * n], z[2 * n + 1], cos[n], sin[n]);
      }
    }
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      x[n] *= factor;
      y[n] *= factor;
    }
  }
  // The largest magnitude. Neither an infinity nor a NaN counts.
  __device__ __forceinline__ float largest(const VecPlace<kPairs>& at) const {
    float most = 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (fabsf(x[n]) <= FLT_MAX) most = fmaxf(most, fabsf(x[n]));
      if (at.has_second && fabsf(y[n]) <= FLT_MAX) most = fmaxf(most, fabsf(y[n]));
    }
    return most;
  }
  template <class T>
  __device__ __forceinline__ void store(const VecPlace<kPairs>& at, T* to) const {
    store_elements(to + at.first, x);
    if (at.has_second) store_elements(to + at.second, y);
  }

  float x[kPairs], y[kPairs];
};

__device__ __forceinline__ float table_entry(const flashattn_tensor& table, int32_t dtype,
                                             int64_t position, int32_t pair) {
  const int64_t at = position * table.stride_seq + pair;
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return to_float(static_cast<const __half*>(table.data)[at]);
    case FLASHATTN_DTYPE_BF16: return to_float(static_cast<const __nv_bfloat16*>(table.data)[at]);
    default: return static_cast<const float*>(table.data)[at];
  }
}

__device__ __forceinline__ CosSin angle_of(const AppendArgs& args, int64_t position, int32_t pair) {
  if (!args.rotary_cos.data)
    return cos_sin_of_turns(args.turns[pair] * static_cast<uint64_t>(position));
  return {table_entry(args.rotary_cos, args.dtype_rotary, position, pair),
          table_entry(args.rotary_sin, args.dtype_rotary, position, pair)};
}

// Angles of some tokens in shared memory. The entries of a token are ordered so that vecs read
// theirs without bank conflicts: first the first half of each vec's, then the second halves.
template <int kPairs>
struct AngleRows {
  static constexpr int kHalf = VecAngles<kPairs>::kHalf;
  float *cos, *sin;
  int32_t pairs;
  bool interleaved;

  __device__ __forceinline__ void set(int32_t token, int32_t pair, CosSin x) const {
    int32_t at = token * pairs + pair;
    if (kPairs > 1 && !interleaved) {
      const int32_t half = pair / kHalf;
      at += (half & 1 ? pairs / 2 : 0) + (half / 2 - half) * kHalf;
    }
    cos[at] = x.cos;
    sin[at] = x.sin;
  }
  __device__ __forceinline__ VecAngles<kPairs> of(int32_t token, int32_t c, int half) const {
    const int32_t at = token * pairs + c / (kPairs / kHalf) + half * (pairs / 2);
    if constexpr (kPairs == 1) {
      return {{cos[at]}, {sin[at]}};
    } else {
      static_assert(kHalf == 4);
      const float4 a = *reinterpret_cast<const float4*>(cos + at);
      const float4 b = *reinterpret_cast<const float4*>(sin + at);
      return {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
    }
  }
};

// A row of the cache. entry: the batch index or the page. row: the row in that entry.
struct CacheIndex {
  int32_t entry;
  int64_t row;
};

__device__ __forceinline__ CacheIndex cache_index(const AppendParams& params,
                                                  const SeqlenInfo& sequence, int32_t b,
                                                  int32_t j) {
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  if (in.page_table != nullptr) {
    const int32_t n = params.by_page.quotient(j);
    // A page number out of range is clamped: the result is wrong, but no other memory is written.
    return {clamp_index(in.page_table[b * in.page_table_stride + n],
                        clamp_index(in.pages - 1, INT32_MAX)),
            j - n * problem.page_size};
  }
  return {problem.layout & FLASHATTN_LAYOUT_VARLEN_KV ? 0 : b, sequence.offset_kv + j};
}

}  // namespace flashattn::cuda
