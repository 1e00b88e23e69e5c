// From a row of table.txt to an instance of the kernel.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;  // as table.txt says
using f16 = __half;
constexpr Scores scaled = Scores::kScaled, shaped = Scores::kShaped, any = Scores::kAny;

template <class T, int kDimQk, int kDimV, int kConsumers, int kTileKv, bool kTurns, Scores kScores>
constexpr ForwardEntry forward_entry() {
  using Config = ForwardConfig<T, kDimQk, kDimV, kConsumers, kTileKv, kTurns, kScores>;
  return {std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16,
          kDimQk,
          kDimV,
          kScores,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          kSharedBytes<Config>,
          &forward_kernel<Config>};
}

}  // namespace flashattn::cuda::sm90
