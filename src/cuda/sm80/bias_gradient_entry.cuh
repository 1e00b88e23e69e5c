// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm80/bias_gradient.cuh"
#include "cuda/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDim, int kTileKv>
constexpr BackwardEntry bias_gradient_entry() {
  using Config = BiasGradientConfig<T, kDim, kTileKv>;
  return {kDtype<T>,
          kDim,
          true,
          Config::kTileQ,
          Config::kTileKv,
          1,
          Config::kThreads,
          Config::kSharedBytes,
          &bias_gradient_kernel<Config>};
}

}  // namespace flashattn::cuda::sm80
