// Hopper forward with packed heads: from a row of table.txt to an instance of the kernel and its
// table entry.
#pragma once

#include "cuda/kernels/sm90/fwd.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDim, int kConsumers, int kTileKv>
constexpr ForwardEntry fwd_packed_instance() {
  using Config = PackedForwardConfig<T, kDim, kConsumers, kTileKv>;
  return {kDtype<T>,
          kDim,
          kDim,
          ScoreModKind::kPlain,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          Config::kCost,
          &fwd_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
