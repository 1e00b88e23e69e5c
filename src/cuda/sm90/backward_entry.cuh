// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_convert.cuh"
#include "cuda/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;  // as table.txt says
using f16 = __half;

template <class Config>
constexpr BackwardEntry backward_entry_of(int32_t dim_qk, int32_t dim_v, int32_t stages) {
  return {
      std::is_same<typename Config::T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16,
      dim_qk,
      dim_v,
      Config::kModified,
      Config::kTileQ,
      Config::kTileKv,
      stages,
      Config::kThreads,
      kBackwardSharedBytes<Config>,
      &backward_kernel<Config>,
      &convert_dq_kernel<Config>,
      kConvertThreads<Config>};
}

template <class T, int kDim, int kTileQ, bool kDqGroup, bool kTurns, bool kModified>
constexpr BackwardEntry backward_entry() {
  using Config = BackwardConfig<T, kDim, kTileQ, kDqGroup, kTurns, kModified>;
  return backward_entry_of<Config>(kDim, kDim, Config::kStages);
}

template <class T, int kDimQk, int kDimV, bool kModified>
constexpr BackwardEntry backward_wide_entry() {
  using Config = BackwardWideConfig<T, kDimQk, kDimV, kModified>;
  return backward_entry_of<Config>(kDimQk, kDimV, Config::kDoStages);
}

}  // namespace flashattn::cuda::sm90
