// Makes a table entry from the template arguments in a row of table.txt.
#pragma once

#include "cuda/kernels/sm80/bwd.cuh"
#include "cuda/kernels/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDim, int kMmaM, int kWarpPairs, int kTileQ, int kSlice, int kStages,
          int kMinCtasPerSm, class ScoreMod, int kDimSplit = 1>
constexpr BackwardEntry bwd_instance() {
  using Config = BwdConfig<T, kDim, kMmaM, kWarpPairs, kTileQ, kSlice, kStages, kMinCtasPerSm,
                           ScoreMod, kDimSplit>;
  return {kDtype<T>,           kDim,
          !ScoreMod::kIsPlain, Config::kTileQ,
          Config::kTileKv,     Config::kStages,
          Config::kThreads,    Config::kSharedBytes,
          &bwd_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
