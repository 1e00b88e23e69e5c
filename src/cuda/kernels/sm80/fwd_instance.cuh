// Makes a table entry from the template arguments in a row of table.txt.
#pragma once

#include "cuda/kernels/sm80/fwd.cuh"
#include "cuda/kernels/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

constexpr Size size_of(int32_t tile_q, int32_t tile_kv, int32_t dim_split) {
  if (tile_q >= 64 || dim_split > 1) return tile_q > 64 ? Size::kLarge : Size::kMedium;
  return tile_kv < 64 ? Size::kTiny : Size::kSmall;
}

template <class T, int kDimQk, int kDimV, int kMmaM, int kTileKv, int kMinCtasPerSm, class ScoreMod,
          int kWarps = 4, int kDimSplit = 1>
constexpr ForwardEntry fwd_instance() {
  using Config =
      FwdConfig<T, kDimQk, kDimV, kMmaM, kTileKv, kMinCtasPerSm, ScoreMod, kWarps, kDimSplit>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          size_of(Config::kTileQ, Config::kTileKv, kDimSplit),
          !ScoreMod::kIsPlain,
          Config::kTileQ,
          Config::kTileKv,
          1,
          Config::kThreads,
          Config::kSharedBytes,
          false,
          &fwd_kernel<Config>,
          nullptr,
          0};
}

}  // namespace flashattn::cuda::sm80
