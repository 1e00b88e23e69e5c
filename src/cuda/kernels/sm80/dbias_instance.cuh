// Makes a table entry from the template arguments in a row of table.txt.
#pragma once

#include "cuda/kernels/sm80/dbias.cuh"
#include "cuda/kernels/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDim, int kTileQ, int kTileKv, int kMmaM, int kKeyWarps, int kStages,
          int kMinCtasPerSm, class ScoreMod>
constexpr DbiasEntry dbias_instance() {
  using Config =
      DbiasConfig<T, kDim, kTileQ, kTileKv, kMmaM, kKeyWarps, kStages, kMinCtasPerSm, ScoreMod>;
  return {kDtype<T>,
          kDim,
          !Config::kIsDense,
          kTileQ,
          kTileKv,
          kStages,
          Config::kThreads,
          kDbiasSharedBytes<Config>,
          &dbias_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
