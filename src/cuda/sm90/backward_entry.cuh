// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_convert.cuh"
#include "cuda/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;  // as table.txt says
using f16 = __half;

template <class T, int kDim, int kTileQ, bool kDqGroup, bool kTurns>
constexpr BackwardEntry backward_entry() {
  using Config = BackwardConfig<T, kDim, kTileQ, kDqGroup, kTurns>;
  return {std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16,
          kDim,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kBackwardSharedBytes<Config>,
          &backward_kernel<Config>,
          &convert_dq_kernel<Config>,
          kConvertThreads<Config>};
}

}  // namespace flashattn::cuda::sm90
