// Hopper forward in E4M3: from a row of table.txt to an instance of the kernel and its table entry.
#pragma once

#include "cuda/kernels/sm90/fwd_fp8.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

// O: the type of O, which the entry has as its dtype.
template <class O, int kDimQk, int kDimV, int kConsumers, class ScoreMod, bool kTransposesV = false>
constexpr ForwardEntry fwd_fp8_instance() {
  using Config = FwdFp8Config<O, kDimQk, kDimV, kConsumers, ScoreMod, kTransposesV>;
  return {kDtype<O>,
          kDimQk,
          kDimV,
          kKind<ScoreMod>,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          Config::kCost,
          Config::kUseStreamK,
          Config::kTransposesV,
          &fwd_fp8_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
