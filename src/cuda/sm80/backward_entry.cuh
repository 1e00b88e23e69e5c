// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDim, int kStrips, int kPairs, int kTileQ, int kSlice, int kStages,
          int kMinBlocks, bool kModified, int kHalves = 1>
constexpr BackwardEntry backward_entry() {
  using Config = BackwardConfig<T, kDim, kStrips, kPairs, kTileQ, kSlice, kStages, kMinBlocks,
                                kModified, kHalves>;
  return {kDtype<T>,
          kDim,
          kModified,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          &backward_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
