// The configuration of a Hopper forward kernel and what its warps share.
#pragma once

#include <algorithm>

#include "cuda/host/schedule/heuristics.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/kernels/sm90/pipeline_state.cuh"
#include "cuda/kernels/sm90/work_tile.cuh"

namespace flashattn::cuda::sm90 {

template <class T_, int kDimQk_, int kDimV_, int kConsumers_, int kTileKv_, ScoreModKind kScores_,
          int kCtasPerSm_>
struct ForwardConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the products; smaller heads: zeros
  static constexpr int kConsumers = kConsumers_;          // warpgroups of 64 rows
  static constexpr int kTileQ = 64 * kConsumers, kTileKv = kTileKv_;
  static constexpr bool kUseSchedulerBarrier =
      kConsumers > 1;  // warpgroups issue their products in turn
  static constexpr ScoreModKind kScoreMod = kScores_;
  static constexpr bool kHasDropout = kScoreMod == ScoreModKind::kDropout;
  // Biases and block masks: nothing is known of a row's maximum from its first tiles.
  static constexpr bool kOnlineSoftmax = kScoreMod == ScoreModKind::kRuntime;
  // Of a strip's first and last tiles only the scores that are seen are computed, if these are a
  // half; P V of such a tile is of all its keys, with weights of 0.
  static constexpr bool kHalfTiles =
      kTileKv == 128 && (kScoreMod == ScoreModKind::kPlain || kScoreMod == ScoreModKind::kAlibi);
  // Whether a warpgroup starts with its own first tile, before those that only others need. Faster,
  // by 1 to 2 %, but with tiles of 128 keys, of which it passes few.
  static constexpr bool kOwnTileFirst = kConsumers > 1 && kTileKv < 128 && !kOnlineSoftmax;
  // Whether P V is awaited before the weights are computed, in the source. ptxas puts the wait
  // behind most exponentials then, else behind a few: which is faster was measured, by up to 6 %.
  static constexpr bool kWaitPvFirst =
      kScoreMod == ScoreModKind::kSoftcap || kScoreMod == ScoreModKind::kAlibi
          ? kDimV <= 128
          : kConsumers == 2 && kDimV >= 128 && kDimV < 256;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kCtasPerSm = kCtasPerSm_;  // on a multiprocessor
  static_assert(kCtasPerSm == 1 || kConsumers == 1, "registers are dealt out for these");
  static constexpr int kProducerRegisters = kConsumers * kCtasPerSm == 3 ? 32
                                            : kOnlineSoftmax             ? 56
                                                                         : 40;
  static constexpr int kConsumerRegisters = kCtasPerSm == 3   ? 128
                                            : kCtasPerSm == 2 ? 216
                                            : kConsumers == 3 ? 160
                                            : kOnlineSoftmax  ? 224
                                                              : 232;

  // Columns come in panels of 64, 128 bytes a row.
  static constexpr int kPanelsQk = (kDimQk + 63) / 64, kPanelsV = (kDimV + 63) / 64;
  static constexpr int kQBytes = kTileQ * kPanelsQk * 128, kOBytes = kTileQ * kPanelsV * 128;
  static constexpr int kKBytes = kTileKv * kPanelsQk * 128, kVBytes = kTileKv * kPanelsV * 128;
  static constexpr int kMaxTensorBytes = 227 * 1024 / kCtasPerSm - 3 * 1024;  // beside Control
  // Four where they fit: loads for the next item start before short ones end.
  static constexpr int kStages =
      kQBytes + kOBytes + 4 * (kKBytes + kVBytes) <= kMaxTensorBytes ? 4 : 2;
  static constexpr int kKvBytes = kStages * (kKBytes + kVBytes);
  // O has its own buffer where it fits, so that the next Q need not wait; or, if half of it does,
  // that, which it leaves through in two pieces.
  static constexpr int kSpareBytes = kMaxTensorBytes - kQBytes - kKvBytes;
  static constexpr bool kSeparateO = kOBytes / (kDimV % 128 == 0 ? 2 : 1) <= kSpareBytes;
  static constexpr int kOSubtiles = !kSeparateO || kOBytes <= kSpareBytes ? 1 : 2;
  static constexpr int kSeparateOBytes = kSeparateO ? kOBytes / kOSubtiles : 0;
  // Two of Q where they fit, so that the next has arrived when a tile ends: 1 % with two stages of
  // K and V, nothing with four.
  static constexpr int kQStages =
      kSeparateO && kStages == 2 && kQBytes + kSeparateOBytes <= kSpareBytes ? 2 : 1;
  // Where there is one, a warp of its own loads Q: the next tile's keys need not wait for it.
  static constexpr bool kQProducerWarp = kQStages == 1;
  static constexpr int kQOrOBytes = kSeparateO ? kQStages * kQBytes : std::max(kQBytes, kOBytes);
  static constexpr int kTensorBytes = kQOrOBytes + kKvBytes + kSeparateOBytes;
  static constexpr int kKOffset = kQOrOBytes, kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kOOffset = kSeparateO ? kVOffset + kStages * kVBytes : 0;
  static_assert(kTileKv % 16 == 0 && kDimQk % 16 == 0 && kDimV % 16 == 0, "whole products");

  static constexpr TileCost kCost = hopper_cost(kTileQ, kTileKv, kDimV, kCtasPerSm);
};

constexpr int kWorkStages = 4;      // one finishing, one at work, one planned; a power of two
constexpr int kRedoCapacity = 128;  // tiles between two drains

template <class Config>
struct SharedStorage {
  uint64_t prefetch_next, all_done;
  // Of a warpgroup's rows.
  uint64_t q_full[Config::kQStages][Config::kConsumers];
  uint64_t q_empty[Config::kQStages][Config::kConsumers];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  WorkTile<Config::kConsumers> work_tiles[kWorkStages];
  Interval visible_kv[Config::kTileQ];  // keys, by row of the tile at work
  int32_t base_overflowed;              // whether an entry of `again` is set
  int32_t redo_queue[kRedoCapacity];    // by index: tile + 1
};

template <class Config>
constexpr int kSharedBytes = Config::kTensorBytes + static_cast<int>(sizeof(SharedStorage<Config>));

__device__ __forceinline__ uint32_t address(uint64_t& barrier) {
  return ptx::shared_address(&barrier);
}

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& storage,
                                              int32_t kv_producers) {
  constexpr int kConsumers = Config::kConsumers;
  const auto init = [](uint64_t& barrier, int count) {
    ptx::mbarrier_init(address(barrier), count);
  };
  for (int n = 0; n < Config::kQStages * kConsumers; ++n) {
    init(storage.q_full[n / kConsumers][n % kConsumers], 1);
    init(storage.q_empty[n / kConsumers][n % kConsumers], 1);
  }
  init(storage.prefetch_next, 1);
  init(storage.all_done, 4 * kConsumers);
  for (int n = 0; n < Config::kStages; ++n) {
    init(storage.k_full[n], 1);
    init(storage.v_full[n], 1);
    init(storage.k_empty[n], kConsumers);
    init(storage.v_empty[n], kConsumers);
  }
  for (int n = 0; n < kWorkStages; ++n) {
    init(storage.work_full[n], kConsumers);
    init(storage.work_empty[n], 4 * kConsumers + Config::kQProducerWarp + kv_producers);
  }
  ptx::fence_mbarrier_init();
}

}  // namespace flashattn::cuda::sm90
