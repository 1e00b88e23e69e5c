// Shared by the kernels before and after the backward pass: a lane loads eight elements of a row.
#pragma once

#include <type_traits>

#include "cuda/kernels/common/bwd_rows.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// Rows of up to so many elements are those of 8 lanes, longer ones of 16.
constexpr int kNarrowRow = 64;

struct Vec8 {
  float x[8];
};

template <class T>
__device__ __forceinline__ Vec8 load_vec8(const char* row, int32_t c) {
  const int4 words = ptx::load_nc_no_allocate(row + c * 2);
  const int32_t pairs[4] = {words.x, words.y, words.z, words.w};
  Vec8 r;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = ptx::unpack<T>(pairs[n]);
    r.x[2 * n] = pair.x;
    r.x[2 * n + 1] = pair.y;
  }
  return r;
}

template <>
__device__ __forceinline__ Vec8 load_vec8<float>(const char* row, int32_t c) {
  Vec8 r;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = reinterpret_cast<const float2*>(row + c * 4)[n];
    r.x[2 * n] = pair.x;
    r.x[2 * n + 1] = pair.y;
  }
  return r;
}

template <class T>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> store_vec8(char* row, int32_t c,
                                                                       const Vec8& e) {
  int4 words;
  words.x = static_cast<int32_t>(ptx::pack<T>(e.x[0], e.x[1]));
  words.y = static_cast<int32_t>(ptx::pack<T>(e.x[2], e.x[3]));
  words.z = static_cast<int32_t>(ptx::pack<T>(e.x[4], e.x[5]));
  words.w = static_cast<int32_t>(ptx::pack<T>(e.x[6], e.x[7]));
  *reinterpret_cast<int4*>(row + c * 2) = words;
}

template <class T>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4> store_vec8(char* row, int32_t c,
                                                                       const Vec8& e) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    reinterpret_cast<float2*>(row + c * 4)[n] = make_float2(e.x[2 * n], e.x[2 * n + 1]);
  }
}

}  // namespace flashattn::cuda
