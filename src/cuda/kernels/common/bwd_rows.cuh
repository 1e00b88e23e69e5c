// Shared by the kernels before and after the backward pass: a lane loads eight elements of a row.
#pragma once

#include <type_traits>

#include "cuda/params.h"
#include "cuda/host/row_grid.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// Threads of a CTA of these kernels.
constexpr int kRowThreads = 128;

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

// Calls launch(lanes) with the number of lanes that share a row of `dim` elements, 8 a lane.
template <class Launch>
cudaError_t with_lanes(int32_t dim, Launch launch) {
  if (dim <= 64) return launch(std::integral_constant<int, 8>());
  return launch(std::integral_constant<int, 16>());
}

// The grid of a kernel whose CTAs take `steps` steps of rows at once.
inline dim3 grid_for(const BackwardParams& params, int steps, int lanes) {
  const Shape& shape = params.args.shape;
  return row_grid(shape.batch, params.problem.heads_q, shape.seqlen_q, steps * kRowThreads / lanes);
}

}  // namespace flashattn::cuda
