// Makes a table entry from the template arguments in a row of table.txt.
#pragma once

#include "cuda/kernels/sm80/dbias.cuh"
#include "cuda/kernels/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDim, int kTileKv>
constexpr BackwardEntry dbias_instance() {
  using Config = DbiasConfig<T, kDim, kTileKv>;
  return {kDtype<T>,
          kDim,
          true,
          Config::kTileQ,
          Config::kTileKv,
          1,
          Config::kThreads,
          Config::kSharedBytes,
          &dbias_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
