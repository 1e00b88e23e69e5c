// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_convert.cuh"
#include "cuda/sm90/entry.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
constexpr BackwardEntry backward_entry_of(int32_t dim_qk, int32_t dim_v, int32_t stages) {
  return {kDtype<typename Config::T>,
          dim_qk,
          dim_v,
          Config::kScores,
          Config::kTileQ,
          Config::kItemKv,
          kBlocks<Config>,
          Config::kConsumers,
          kPieceQuads<Config> * 16,
          Config::kStartsEarly,
          stages,
          Config::kThreads,
          kBackwardSharedBytes<Config>,
          &backward_kernel<Config>,
          &convert_dq_kernel<Config>,
          kConvertThreads<Config>};
}

template <class T, int kDim, int kTileQ, Scores kScores>
constexpr BackwardEntry backward_entry() {
  using Config = BackwardConfig<T, kDim, kTileQ, kScores>;
  return backward_entry_of<Config>(kDim, kDim, Config::kStages);
}

template <class T, int kDim, Scores kScores>
constexpr BackwardEntry backward_long_entry() {
  using Config = BackwardLongConfig<T, kDim, kScores>;
  return backward_entry_of<Config>(kDim, kDim, Config::kStages);
}

template <class T, int kDimQk, int kDimV, Scores kScores>
constexpr BackwardEntry backward_wide_entry() {
  using Config = BackwardWideConfig<T, kDimQk, kDimV, kScores>;
  return backward_entry_of<Config>(kDimQk, kDimV, Config::kDoStages);
}

}  // namespace flashattn::cuda::sm90
