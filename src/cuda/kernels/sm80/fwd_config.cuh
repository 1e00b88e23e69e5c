// Configuration of a portable forward kernel, and its shared memory: Q | K | V | page numbers |
// scales of fp32 tensors | row statistics | FwdWorkTile. 16-bit O is staged in the buffer of Q;
// fp32 O is stored directly.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/fp32_block_scale.cuh"
#include "cuda/kernels/sm80/fwd_work_tile.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm80 {

// ScoreMod: empty, where scores are only scaled, and not by a negative scale. kDimSplit: warps that
// share rows. A warp has registers for 256 columns of O of 16 rows; where V is wider each of the
// warps computes all scores of the rows, and its part of the columns.
template <class T_, int kDimQk_, int kDimV_, int kMmaM_, int kTileKv_, int kMinCtasPerSm_,
          class ScoreMod_, int kWarps_ = 4, int kDimSplit_ = 1>
struct FwdConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // tile columns; smaller heads are padded
  static constexpr int kMmaM = kMmaM_;                    // m16 operands per warp
  using ScoreMod = ScoreMod_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kDimSplit = kDimSplit_, kAccColumns = kDimV / kDimSplit;
  static_assert(kDimSplit == 1 || kAccColumns % 32 == 0, "whole groups of columns");
  static constexpr int kTileQ = 16 * kMmaM * kWarps / kDimSplit;
  static constexpr int kTileKv = kTileKv_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // limits registers
  // Whether warps without rows skip their GEMMs: few queries that no decode kernel takes run here.
  static constexpr bool kSkipEmptyWarps = kMmaM == 1 && kWarps > 1 &&
                                          (kDimV <= 128 || kDimSplit > 1);

  static constexpr bool kIsFp32 = std::is_same<T, float>::value;
  // fp32 uses 3xFP16, except where a row's largest weight may be dropped or belong to the sink: the
  // other weights may then be too small for fp16, but not for tf32.
  static constexpr bool k3xFp16 = kIsFp32 && ScoreMod::kIsPlain;
  // Row statistics and the work tile lie in shared memory during GEMMs if S and O leave no
  // registers.
  static constexpr bool kRowStatsInSmem =
      !kIsFp32 &&
      (kMmaM == 2 ? !ScoreMod::kIsPlain || kDimV == 128 || kTileKv == 128 : kMinCtasPerSm == 8);
  static constexpr bool kReloadWorkTile = k3xFp16 || kRowStatsInSmem;
  // Rows whose maxima are reduced together, to hide latency, where registers allow.
  static constexpr int kRowsAtOnce = kMmaM == 2 && !kIsFp32 ? 2 : 1;
  // The type of the GEMM functions' operands.
  using Operand = std::conditional_t<k3xFp16, Fp16Pair, T>;

  using QTile = SmemTile<kTileQ, kDimQk, sizeof(T)>;
  using KTile = SmemTile<kTileKv, kDimQk, sizeof(T)>;
  using VTile = SmemTile<kTileKv, kDimV, sizeof(T)>;
  using VOperand = std::conditional_t<k3xFp16, SplitTile<VTile>, VTile>;
  using OTile = SmemTile<kTileQ, kIsFp32 ? 64 : kDimV>;  // fp32 is not staged
  static constexpr int kQBytes = QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes;
  // Page numbers, a word a thread. V has its own if other threads load its rows than K's.
  static constexpr int kPagesOffset = kQBytes + KTile::kBytes + VTile::kBytes;
  static constexpr bool kSharePages = std::is_same<KTile, VTile>::value;
  static constexpr int kVPagesOffset = kSharePages ? kPagesOffset : kPagesOffset + kThreads * 4;
  static constexpr int kBlockScaleOffset = kVPagesOffset + kThreads * 4;
  static constexpr int kRowStatsOffset =
      kBlockScaleOffset + (k3xFp16 ? Fp32BlockScale<kThreads>::kBytes : 0);
  static constexpr int kWorkTileOffset =
      kRowStatsOffset + (kRowStatsInSmem ? kThreads * 16 * kMmaM : 0);
  static constexpr int kSharedBytes = kWorkTileOffset + FwdWorkTile::kWords * 4;
  static_assert(kMinCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024,
                "an H100's shared memory holds the CTAs");
};

}  // namespace flashattn::cuda::sm80
