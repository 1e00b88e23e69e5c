// The forward pass on Hopper with Q, K and V in E4M3: the kernel of fwd.cuh with another mainloop.
//
// WGMMA reads E4M3 operands only with k contiguous, so V must be transposed, in one of two ways.
// fp8_transpose_v.cu has written tiles of V^T to the workspace. Or, with kTransposesV, two warps
// transpose each tile in shared memory, anew for each Q tile (fwd_fp8_transposer.cuh). In each 16
// keys, position 4 c + 2 u + e of a row of V^T holds key 8 u + 2 c + e: the keys whose P a lane of
// a quad holds in the accumulator of Q K^T are then those that it must hold in the operand of P V.
// Both ways give the same bits.
//
// Two-level accumulation. A WGMMA adds products of E4M3 with some 14 bits, so P V of a KV tile, or
// of kPromoteEvery tiles, has accumulators of its own, which are added to O in fp32.
//
// Guarded softmax base. P = 2^(s - base) uses the range of E4M3, whose largest number is 448: the
// base is set by the first tile that a row sees and then stays. While the sum of a tile's P over a
// lane's columns is at most 448, no P is above it, and that sum is computed anyway; a warp that
// finds a larger sum lowers P, the row sums and O, outside the loops, and goes on. So a largest P
// of 2^4 leaves room for scores that grow; beside a token that outweighs the rest of its tile that
// would make the others subnormal or 0, and it gets 2^7.
//
// Softcap, ALiBi and descales by blocks of multiples of 64 tokens have kernels with the same
// structure (fwd_fp8_softmax.cuh, fwd_fp8_descales.cuh); other modifications and their combinations
// are asked at run time, for each element, with masks and a new base in every tile.
//
// Early Q K^T (kSplitsQk). While a warpgroup adds its last P V to O, it would have no work for the
// tensor cores, as Q K^T needs the registers of P V: so half of Q K^T, which needs half of them, is
// issued before. Gains: D = 256 2 to 4 %, D = 128 9 %, 2 to 5 % beside the transposition of V. The
// scheduler barrier passed earlier than after both halves costs up to 6 %, left out 4 to 16 %.
//
// Early conversion (kPacksFirst). ptxas merges two pairs of E4M3 as it converts the second, without
// an instruction for it, if no barrier, vote or branch stands between exponentials and conversion:
// so P is packed before its sums are checked. Gains: D = 256 1 %, D = 64 0 to 2 %.
//
// Shared memory: Q | K stages | V^T stages | V stages, with kTransposesV | O | SharedStorage.
#pragma once

#include "cuda/kernels/sm90/fwd.cuh"
#include "cuda/kernels/sm90/fwd_fp8_mainloop.cuh"

namespace flashattn::cuda::sm90 {

template <class O, int kDimQk_, int kDimV_, int kConsumers_, class ScoreMod_, bool kTransposesV_>
struct FwdFp8Config {
  using T = O;  // the type of O
  static constexpr bool kIsFp8 = true, kTransposesV = kTransposesV_;
  static constexpr bool kPacksHeads = false, kUseStreamK = ScoreMod_::kIsPlain;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_, kConsumers = kConsumers_;
  static constexpr int kTileQ = 64 * kConsumers, kTileKv = 128;
  using ScoreMod = ScoreMod_;
  static constexpr bool kIsRuntime = ScoreMod::kIsRuntime;
  static constexpr bool kHasSoftcap = !kIsRuntime && ScoreMod::template kHas<Softcap>;
  static constexpr bool kHasAlibi = !kIsRuntime && ScoreMod::template kHas<Alibi>;
  static constexpr bool kHasBlockDescales = !kIsRuntime && ScoreMod::template kHas<BlockDescales>;
  static constexpr bool kHasDropout = false, kHasDenseBias = false;
  static constexpr int kBiasStages = 1;
  static_assert(kIsRuntime || ScoreMod::kIsPlain || kHasSoftcap || kHasAlibi || kHasBlockDescales,
                "other modifications are asked at run time");
  static_assert(!kHasBlockDescales || !kTransposesV, "who transposes V prepares them");
  static constexpr bool kOnlineSoftmax = !ScoreMod::kBoundsGrowth;
  static constexpr bool kUseSchedulerBarrier = kConsumers > 1;
  // kSerial: P V of a tile is added to O 64 columns at a time, in registers that the scores leave
  // free, before the next Q K^T is issued. Otherwise both run together.
  static constexpr bool kSerial = kDimV > 64 || kOnlineSoftmax;
  // Q K^T is issued in two halves of the keys, the first before the last P V is added to O; P V
  // lies in the registers of the scores. Narrower WGMMAs read shared memory more often, which at D
  // = 256 is too busy beside the transposition of V.
  static constexpr bool kSplitsQk =
      kSerial && ScoreMod::kIsPlain && (kDimV == 128 || !kTransposesV);
  // P of tiles without masks is packed before its sums say whether it exceeds E4M3.
  static constexpr bool kPacksFirst = ScoreMod::kIsPlain && (kSplitsQk || !kSerial);
  static constexpr int kPvInFlight =  // x 64 columns
      kSplitsQk || (kConsumers == 2 && !kOnlineSoftmax) ? 2 : 1;
  static constexpr int kPromoteEvery = kSerial ? 1 : 4;  // KV tiles
  static constexpr int kThreads = 128 * (kConsumers + 1), kCtasPerSm = 1;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kOnlineSoftmax ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 1   ? 248
                                            : kConsumers == 3 ? 160
                                            : kOnlineSoftmax  ? 224
                                                              : 232;

  // Panels of Q and K have rows of kPanelBytes, those of O rows of 128 bytes.
  static constexpr int kPanelBytes = kDimQk < 128 ? 64 : 128, kPanelColumns = kPanelBytes;
  static constexpr int kPanelsQk = kDimQk / kPanelBytes, kPanelsV = kDimV / 64;
  static constexpr int kQBytes = kTileQ * kDimQk, kOBytes = kTileQ * kDimV * 2;
  static constexpr int kKBytes = kTileKv * kDimQk, kVBytes = kTileKv * kDimV;
  static constexpr int kMaxTensorBytes = 224 * 1024;  // beside SharedStorage
  static constexpr int kLeastRawVBytes = kTransposesV ? kVBytes : 0;
  static constexpr int kStages =
      kQBytes + kOBytes + kLeastRawVBytes + 4 * (kKBytes + kVBytes) <= kMaxTensorBytes ? 4 : 2;
  static constexpr int kKvBytes = kStages * (kKBytes + kVBytes);
  static constexpr int kSpareBytes = kMaxTensorBytes - kQBytes - kKvBytes;  // for raw V and O
  // Stages of V before it is transposed.
  static constexpr int kRawVStages = !kTransposesV                          ? 0
                                     : kOBytes + 2 * kVBytes <= kSpareBytes ? 2
                                                                            : 1;
  static constexpr int kTransposerWarps = 2;  // one of them would load Q otherwise
  // O has a buffer of its own. Where only half of O fits, it is stored in two subtiles.
  static constexpr bool kSeparateO = true;
  static constexpr int kOSubtiles = kOBytes + kLeastRawVBytes <= kSpareBytes ? 1 : 2;
  static constexpr int kQStages = 1;
  static constexpr bool kQProducerWarp = !kTransposesV;
  static constexpr int kTensorBytes =
      kQBytes + kKvBytes + kRawVStages * kVBytes + kOBytes / kOSubtiles;
  static_assert(kTensorBytes <= kMaxTensorBytes, "shared memory of a multiprocessor");
  static constexpr int kKOffset = kQBytes, kVtOffset = kKOffset + kStages * kKBytes;
  // The producer of V loads V^T here or, with kTransposesV, V.
  static constexpr int kVOffset = kTransposesV ? kVtOffset + kStages * kVBytes : kVtOffset;
  static constexpr int kOOffset = kVtOffset + kStages * kVBytes + kRawVStages * kVBytes;

  static constexpr TileCost kCost = hopper_cost(kTileQ, kTileKv, kDimV, kCtasPerSm);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fwd_fp8_kernel(const __grid_constant__ ForwardParams params) {
  run_forward<Config, FwdFp8Mainloop<Config>>(params);
}

}  // namespace flashattn::cuda::sm90
