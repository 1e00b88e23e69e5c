// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDimQk, int kDimV, int kStrips, int kTileKv, int kMinBlocks, bool kModified,
          int kWarps = 4>
constexpr ForwardEntry forward_entry() {
  using Config = ForwardConfig<T, kDimQk, kDimV, kStrips, kTileKv, kMinBlocks, kModified, kWarps>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          kModified,
          Config::kTileQ,
          Config::kTileKv,
          1,
          Config::kThreads,
          Config::kSharedBytes,
          &forward_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
