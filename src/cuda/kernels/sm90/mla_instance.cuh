// Hopper latent attention: from a row of table.txt to an instance of the kernel and its table
// entry.
#pragma once

#include "cuda/kernels/sm90/instance.cuh"
#include "cuda/kernels/sm90/mla.cuh"
#include "cuda/kernels/sm90/mla_transposed.cuh"

namespace flashattn::cuda::sm90 {

using e4m3 = ptx::E4m3;

template <class T, int kDimQk, int kDimV, class Cache = T>
constexpr MlaEntry mla_instance() {
  using Config = MlaConfig<T, kDimQk, kDimV, Cache>;
  return {kDtype<T>,
          Config::kIsLatent ? int32_t{FLASHATTN_DTYPE_F8E4M3} : kDtype<T>,
          kDimQk,
          kDimV,
          false,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          &mla_kernel<Config>};
}

template <class T, int kTileQ>
constexpr MlaEntry mla_transposed_instance() {
  using Config = MlaTransposedConfig<T, kTileQ>;
  return {kDtype<T>,
          FLASHATTN_DTYPE_F8E4M3,
          Config::kDimQk,
          Config::kDimV,
          true,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          &mla_transposed_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
