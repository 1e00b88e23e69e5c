// Hopper latent attention: from a row of table.txt to an instance of the kernel and its table
// entry.
#pragma once

#include "cuda/kernels/sm90/instance.cuh"
#include "cuda/kernels/sm90/mla.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDimQk, int kDimV>
constexpr MlaEntry mla_instance() {
  using Config = MlaConfig<T, kDimQk, kDimV>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          &mla_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
