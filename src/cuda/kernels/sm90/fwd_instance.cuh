// Hopper forward: from a row of table.txt to an instance of the kernel and its table entry.
#pragma once

#include "cuda/kernels/sm90/fwd.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDimQk, int kDimV, int kConsumers, int kTileKv, class ScoreMod,
          int kCtasPerSm = 1>
constexpr ForwardEntry fwd_instance() {
  using Config = ForwardConfig<T, kDimQk, kDimV, kConsumers, kTileKv, ScoreMod, kCtasPerSm>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          kKind<ScoreMod>,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          Config::kCost,
          &fwd_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
