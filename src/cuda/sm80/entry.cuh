// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/table.h"

namespace flashattn::cuda::sm80 {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T, int kDimQk, int kDimV, int kStrips, int kTileKv, int kMinBlocks, bool kModified>
constexpr ForwardEntry forward_entry() {
  using Config = ForwardConfig<T, kDimQk, kDimV, kStrips, kTileKv, kMinBlocks, kModified>;
  return {std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16,
          kDimQk,
          kDimV,
          kStrips,
          kModified,
          Config::kTileQ,
          Config::kTileKv,
          Config::kThreads,
          Config::kSharedBytes,
          &forward_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
