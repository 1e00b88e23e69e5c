// Hopper forward: from a row of table.txt to an instance of the kernel and its table entry.
#pragma once

#include "cuda/kernels/sm90/fwd.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

template <class T, class Config>
constexpr ForwardEntry forward_entry() {
  return {kDtype<T>,
          Config::kDimQk,
          Config::kDimV,
          kKind<typename Config::ScoreMod>,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          Config::kCost,
          Config::kUseStreamK,
          Config::kTransposesV,
          &fwd_kernel<Config>};
}

template <class T, int kDimQk, int kDimV, int kConsumers, int kTileKv, class ScoreMod,
          int kCtasPerSm = 1>
constexpr ForwardEntry fwd_instance() {
  return forward_entry<
      T, ForwardConfig<T, kDimQk, kDimV, kConsumers, kTileKv, ScoreMod, kCtasPerSm>>();
}

template <class T, int kDim, int kConsumers, int kTileKv>
constexpr ForwardEntry fwd_packed_instance() {
  return forward_entry<T, PackedForwardConfig<T, kDim, kConsumers, kTileKv>>();
}

}  // namespace flashattn::cuda::sm90
