// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm80/forward_few.cuh"
#include "cuda/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDimQk, int kDimV, int kTileKv, int kStages, int kMinBlocks, Size kSize>
constexpr ForwardEntry forward_few_entry() {
  using Config = FewConfig<T, kDimQk, kDimV, kTileKv, kStages, kMinBlocks>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          kSize,
          false,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          &forward_few_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
