// The kernels of append_kv.cu work on units, which are elements of a row that turn together, and on
// rows of the cache.
#pragma once

#include "cuda/device/elements.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/common/append_kv.h"

namespace flashattn::cuda {

template <int kCount, class T>
__device__ __forceinline__ void copy_elements(const T* from, T* to) {
  if constexpr (kCount == 1) {
    *to = *from;
  } else {
#pragma unroll
    for (int n = 0; n < static_cast<int>(kCount * sizeof(T)); n += 16) {
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(to) + n) =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(from) + n);
    }
  }
}

// Row `position` of cosines or sines, from pair c on.
template <int kPairs>
__device__ __forceinline__ void load_table(const flashattn_tensor& table, int32_t dtype,
                                           int64_t position, int32_t c, float (&x)[kPairs]) {
  const int64_t at = position * table.stride_seq + c;
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return load_elements(static_cast<const __half*>(table.data) + at, x);
    case FLASHATTN_DTYPE_BF16:
      return load_elements(static_cast<const __nv_bfloat16*>(table.data) + at, x);
    default: return load_elements(static_cast<const float*>(table.data) + at, x);
  }
}

// Turns pair n of a unit: (x[n], y[n]), or neighbours of x and y.
template <int kPairs>
__device__ __forceinline__ void rotate(const AppendArgs& args, int64_t position, int32_t c,
                                       float (&x)[kPairs], float (&y)[kPairs]) {
  float cos[kPairs], sin[kPairs];
  if (args.rotary_cos.data) {
    load_table(args.rotary_cos, args.dtype_rotary, position, c, cos);
    load_table(args.rotary_sin, args.dtype_rotary, position, c, sin);
  } else {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const CosSin angle = cos_sin_of_turns(args.turns[c + n] * static_cast<uint64_t>(position));
      cos[n] = angle.cos;
      sin[n] = angle.sin;
    }
  }
  const auto turn = [](float& a, float& b, float cosine, float sine) {
    const float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    b = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
    a = first;
  };
  if (kPairs == 1 || args.rotary == FLASHATTN_ROTARY_HALVES) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) turn(x[n], y[n], cos[n], sin[n]);
  } else {
    constexpr int kHalf = kPairs / 2;
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
      turn(x[2 * n], x[2 * n + 1], cos[n], sin[n]);
      turn(y[2 * n], y[2 * n + 1], cos[kHalf + n], sin[kHalf + n]);
    }
  }
}

// Elements of a row that a thread works on: kPairs pairs that turn together, from pair c on.
// rotary_dim: 0 for v.
template <int kPairs>
struct Unit {
  __device__ __forceinline__ Unit(const AppendArgs& args, int32_t c, int32_t dim,
                                  int32_t rotary_dim)
      : c(c), turns(c < rotary_dim / 2) {
    const bool halves = args.rotary == FLASHATTN_ROTARY_HALVES;
    first = turns && halves ? c : 2 * c;
    second = turns && halves ? c + rotary_dim / 2 : 2 * c + kPairs;
    has_second = second < dim;
  }

  template <class T>
  __device__ __forceinline__ void copy(const T* from, T* to) const {
    copy_elements<kPairs>(from + first, to + first);
    if (has_second) copy_elements<kPairs>(from + second, to + second);
  }
  template <class T>
  __device__ __forceinline__ void load(const T* from) {
    load_elements(from + first, x);
    if (has_second) load_elements(from + second, y);
  }
  template <class T>
  __device__ __forceinline__ void load_new(const AppendArgs& args, int64_t position,
                                           const T* from) {
    load(from);
    if (turns) rotate(args, position, c, x, y);
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      x[n] *= factor;
      y[n] *= factor;
    }
  }
  template <class T>
  __device__ __forceinline__ void store(T* to) const {
    store_elements(to + first, x);
    if (has_second) store_elements(to + second, y);
  }

  int32_t c, first, second;
  bool turns, has_second;
  float x[kPairs], y[kPairs] = {};
};

// A row of the cache: its first index, and which row of that.
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
