// Makes a table entry from the template arguments in a row of table.txt.
#pragma once

#include "cuda/kernels/sm80/decode.cuh"
#include "cuda/kernels/sm80/types.cuh"

namespace flashattn::cuda::sm80 {

template <class T, int kDimQk, int kDimV, int kMmaM, int kTileKv, int kStages, int kMinCtasPerSm,
          Size kSize, int kRowWarps = 1, int kKeyWarps = 4, class ScoreMod = plain,
          int kDimSplit = 1>
constexpr ForwardEntry decode_instance() {
  using Config = DecodeConfig<T, kDimQk, kDimV, kMmaM, kTileKv, kStages, kMinCtasPerSm, kRowWarps,
                              kKeyWarps, ScoreMod, kDimSplit>;
  // Clusters merge few rows.
  constexpr bool kMayMerge = kSize == Size::kDeepPipeline && Config::kTileQ == 16;
  using Merging = DecodeConfig<T, kDimQk, kDimV, kMmaM, kTileKv, kStages, kMinCtasPerSm, kRowWarps,
                               kKeyWarps, ScoreMod, kDimSplit, kMayMerge>;
  return {kDtype<T>,
          kDimQk,
          kDimV,
          kSize,
          !ScoreMod::kIsPlain,
          Config::kTileQ,
          Config::kTileKv,
          Config::kStages,
          Config::kThreads,
          Config::kSharedBytes,
          true,
          &decode_kernel<Config>,
          kMayMerge ? &decode_kernel<Merging> : nullptr,
          Merging::kSharedBytes};
}

}  // namespace flashattn::cuda::sm80
