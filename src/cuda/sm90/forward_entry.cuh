// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/entry.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDimQk, int kDimV, int kConsumers, int kTileKv, Scores kScores,
          int kBlocks = 1>
constexpr ForwardEntry forward_entry() {
  using Config = ForwardConfig<T, kDimQk, kDimV, kConsumers, kTileKv, kScores, kBlocks>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          kScores,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          Config::kCost,
          &forward_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
