// Sizes of a kernel of the portable forward pass, and its shared memory: Q | K | V | page numbers |
// factors of fp32 | statistics | the block's place. The output is staged where Q was, that of fp32
// goes out directly.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/fp32_block_scale.cuh"
#include "cuda/kernels/sm80/fwd_work_tile.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm80 {

// kModified: scores need more than a factor (softcap, biases, dropout, block masks, negative
// scale).
template <class T_, int kDimQk_, int kDimV_, int kMmaM_, int kTileKv_, int kMinCtasPerSm_,
          bool kModified_, int kWarps_ = 4>
struct FwdConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the tiles; smaller heads are padded
  static constexpr int kMmaM = kMmaM_;                    // of 16 rows, a warp
  static constexpr bool kModified = kModified_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kTileQ = 16 * kMmaM * kWarps;
  static constexpr int kTileKv = kTileKv_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // on a multiprocessor, as registers allow
  static constexpr bool kSkipEmptyWarps =
      kMmaM == 1 && kWarps > 1 && kDimV <= 128;  // decoding comes here

  static constexpr bool kIsFp32 = std::is_same<T, float>::value;
  // fp32 is multiplied as pairs of fp16, but where a row's largest weight may be dropped, or be
  // that of the sink: the others are then too small for fp16, not for tf32.
  static constexpr bool k3xFp16 = kIsFp32 && !kModified;
  // What only the softmax needs, and what the block works on, wait in shared memory while warps
  // multiply: where scores and O leave no registers.
  static constexpr bool kRowStatsInSmem =
      !kIsFp32 && (kMmaM == 2 ? kModified || kDimV == 128 || kTileKv == 128 : kMinCtasPerSm == 8);
  static constexpr bool kReloadWorkTile = k3xFp16 || kRowStatsInSmem;
  // Whose maxima are looked for together: latency; others have better use for the registers.
  static constexpr int kRowsAtOnce = kMmaM == 2 && !kIsFp32 ? 2 : 1;
  // What tiles are multiplied as.
  using Operand = std::conditional_t<k3xFp16, Fp16Pair, T>;

  using QTile = SmemTile<kTileQ, kDimQk, sizeof(T)>;
  using KTile = SmemTile<kTileKv, kDimQk, sizeof(T)>;
  using VTile = SmemTile<kTileKv, kDimV, sizeof(T)>;
  using VOperand = std::conditional_t<k3xFp16, SplitTile<VTile>, VTile>;
  using OTile = SmemTile<kTileQ, kIsFp32 ? 64 : kDimV>;  // fp32 goes out directly
  static constexpr int kQBytes = QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes;
  // Page numbers, a word a thread: of K's rows, and of V's where other threads copy them.
  static constexpr int kPagesOffset = kQBytes + KTile::kBytes + VTile::kBytes;
  static constexpr bool kSharePages = std::is_same<KTile, VTile>::value;
  static constexpr int kVPagesOffset = kSharePages ? kPagesOffset : kPagesOffset + kThreads * 4;
  static constexpr int kBlockScaleOffset = kVPagesOffset + kThreads * 4;
  static constexpr int kRowStatsOffset =
      kBlockScaleOffset + (k3xFp16 ? Fp32BlockScale<kThreads>::kBytes : 0);
  // A FwdWorkTile.
  static constexpr int kWorkTileOffset =
      kRowStatsOffset + (kRowStatsInSmem ? kThreads * 16 * kMmaM : 0);
  static constexpr int kSharedBytes = kWorkTileOffset + FwdWorkTile::kWords * 4;
  static_assert(kMinCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024, "of an H100's multiprocessor");
};

}  // namespace flashattn::cuda::sm80
