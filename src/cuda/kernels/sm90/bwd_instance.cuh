// Hopper backward: from a row of table.txt to an instance of the kernel and its table entry.
#pragma once

#include "cuda/kernels/sm90/bwd.cuh"
#include "cuda/kernels/sm90/bwd_postprocess.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
constexpr BackwardEntry bwd_instance_of(int32_t dim_qk, int32_t dim_v, int32_t stages) {
  return {kDtype<typename Config::T>,
          dim_qk,
          dim_v,
          kKind<typename Config::ScoreMod>,
          Config::kTileQ,
          Config::kClusterTileKv,
          kClusterSize<Config>,
          Config::kConsumers,
          kPartialQuads<Config> * 16,
          Config::kOverlapPreprocess,
          Config::kWholeBlocks,
          stages,
          Config::kThreads,
          kBwdSharedBytes<Config>,
          &bwd_kernel<Config>,
          &bwd_postprocess_kernel<Config>,
          kPostprocessThreads<Config>};
}

template <class T, int kDim, int kTileQ, class ScoreMod>
constexpr BackwardEntry bwd_instance() {
  using Config = BwdConfig<T, kDim, kTileQ, ScoreMod>;
  return bwd_instance_of<Config>(kDim, kDim, Config::kStages);
}

template <class T, int kDim, class ScoreMod>
constexpr BackwardEntry bwd_two_warpgroup_instance() {
  using Config = BwdTwoWarpgroupConfig<T, kDim, ScoreMod>;
  return bwd_instance_of<Config>(kDim, kDim, Config::kStages);
}

template <class T, int kDimQk, int kDimV, class ScoreMod>
constexpr BackwardEntry bwd_latent_head_instance() {
  static_assert(kDimQk == 192 && kDimV == 128, "tiles and registers fit these heads only");
  using Config = BwdLatentHeadConfig<T, ScoreMod>;
  return bwd_instance_of<Config>(kDimQk, kDimV, Config::kStages);
}

template <class T, int kDimQk, int kDimV, class ScoreMod>
constexpr BackwardEntry bwd_large_head_instance() {
  using Config = BwdLargeHeadConfig<T, kDimQk, kDimV, ScoreMod>;
  return bwd_instance_of<Config>(kDimQk, kDimV, Config::kDoStages);
}

}  // namespace flashattn::cuda::sm90
