// Configuration of a Hopper forward kernel, and its shared memory and barriers.
#pragma once

#include <algorithm>

#include "cuda/host/schedule/heuristics.h"
#include "cuda/device/dense_bias_panel.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/device/pipeline.cuh"

namespace flashattn::cuda::sm90 {

template <class T_, int kDimQk_, int kDimV_, int kConsumers_, int kTileKv_, class ScoreMod_,
          int kCtasPerSm_>
struct ForwardConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_,
                       kDimV = kDimV_;            // WGMMA sizes; TMA pads with 0
  static constexpr int kConsumers = kConsumers_;  // warpgroups of 64 rows
  static constexpr int kTileQ = 64 * kConsumers, kTileKv = kTileKv_;
  // Warpgroups issue their WGMMAs one after the other (ping-pong).
  static constexpr bool kUseSchedulerBarrier = kConsumers > 1;
  using ScoreMod = ScoreMod_;
  static constexpr bool kIsRuntime = ScoreMod::kIsRuntime;
  static constexpr bool kHasSoftcap = !kIsRuntime && ScoreMod::template kHas<Softcap>;
  static constexpr bool kHasAlibi = !kIsRuntime && ScoreMod::template kHas<Alibi>;
  static constexpr bool kHasDropout = !kIsRuntime && ScoreMod::template kHas<Dropout>;
  static constexpr bool kHasBlockMask = !kIsRuntime && ScoreMod::template kHas<BlockMask>;
  static constexpr bool kHasDenseBias = !kIsRuntime && ScoreMod::template kHas<DenseBias>;
  // With biases and block masks the first tiles may say nothing about the row maximum.
  static constexpr bool kOnlineSoftmax = !ScoreMod::kBoundsGrowth;
  // If rows see only half of their first or last KV tile, only that half's scores are computed; P V
  // covers the whole tile, with P = 0 in the other half.
  static constexpr bool kHalfTiles = kTileKv == 128 && (ScoreMod::kIsPlain || kHasAlibi);
  // A warpgroup computes its first KV tile before it skips those that only other warpgroups need:
  // 1 to 2 % faster, except with tiles of 128 keys, of which it skips few.
  static constexpr bool kOwnTileFirst = kConsumers > 1 && kTileKv < 128 && !kOnlineSoftmax;
  // Place in the source where a step waits for P V: before the exponentials of P, or after them.
  // ptxas moves the wait behind most exponentials in the first case and behind a few in the second.
  // The faster one was measured; the difference is up to 6 %.
  static constexpr bool kWaitPvFirst =
      kHasSoftcap || kHasAlibi ? kDimV <= 128 : kConsumers == 2 && kDimV >= 128 && kDimV < 256;
  // Place in the source of unusual work tiles (redone, or without a visible key): before the usual
  // ones, or behind them. Behind, the code of usual tiles is contiguous (D = 64: 2 % faster), but
  // then ptxas waits for P V after a third of the exponentials in one kernel (-2 %).
  static constexpr bool kUnusualFirst = kConsumers == 2 && kTileKv == 128 && kDimV == 128;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static_assert(kCtasPerSm == 1 || kConsumers == 1,
                "kCtasPerSm > 1 needs kConsumers == 1: kConsumerRegisters");
  // Small CTAs share the registers of a multiprocessor. The scheduler's warp, which looks at
  // block masks, needs more.
  static constexpr int kProducerRegisters = kCtasPerSm == 3 && kHasBlockMask ? 48
                                            : kConsumers * kCtasPerSm == 3   ? 32
                                            : kOnlineSoftmax                 ? 56
                                                                             : 40;
  static constexpr int kConsumerRegisters = kCtasPerSm == 3   ? 160 - kProducerRegisters
                                            : kCtasPerSm == 2 ? 256 - kProducerRegisters
                                            : kConsumers == 3 ? 160
                                            : kOnlineSoftmax  ? 224
                                                              : 232;

  static constexpr bool kIsFp8 = false, kTransposesV = false;
  static constexpr bool kPacksHeads = false;  // see PackedHeads
  // Tiles of the last wave may be split along their keys, see plan_stream_k_tile(). D = 64 is 2 %
  // slower with the code for it where rows see few keys.
  static constexpr bool kUseStreamK = ScoreMod::kIsPlain && kConsumers > 1 && kDimV != 64;

  // Panels have 64 columns, 128 bytes per row.
  static constexpr int kPanelColumns = 64, kPanelBytes = 128;
  static constexpr int kPanelsQk = (kDimQk + 63) / 64, kPanelsV = (kDimV + 63) / 64;
  static constexpr int kQBytes = kTileQ * kPanelsQk * 128, kOBytes = kTileQ * kPanelsV * 128;
  static constexpr int kKBytes = kTileKv * kPanelsQk * 128, kVBytes = kTileKv * kPanelsV * 128;
  // Stages of the dense bias per warpgroup, one panel of 64 queries x 128 bytes each: two KV tiles
  // in 16 bits, one in fp32.
  static constexpr int kBiasStages = kHasDenseBias ? kTileKv / 32 : 1;
  static constexpr int kBiasBytes = kHasDenseBias ? kBiasStages * kConsumers * kBiasPanelBytes : 0;
  static constexpr int kMaxTensorBytes =
      227 * 1024 / kCtasPerSm - 3 * 1024 - kBiasBytes;  // beside SharedStorage
  // Four stages where they fit: loads for the next work tile then start before a short one ends.
  static constexpr int kStages =
      kQBytes + kOBytes + 4 * (kKBytes + kVBytes) <= kMaxTensorBytes ? 4 : 2;
  static constexpr int kKvBytes = kStages * (kKBytes + kVBytes);
  // O has a buffer of its own where it fits, so that the next Q need not wait; if only half of O
  // fits, O is stored in two subtiles. Otherwise O uses the buffer of Q.
  static constexpr int kSpareBytes = kMaxTensorBytes - kQBytes - kKvBytes;
  static constexpr bool kSeparateO = kOBytes / (kDimV % 128 == 0 ? 2 : 1) <= kSpareBytes;
  static constexpr int kOSubtiles = !kSeparateO || kOBytes <= kSpareBytes ? 1 : 2;
  static constexpr int kSeparateOBytes = kSeparateO ? kOBytes / kOSubtiles : 0;
  // Two Q stages where they fit, so that the next Q has arrived when a tile ends: 1 % faster with
  // two stages of K and V, no difference with four.
  static constexpr int kQStages =
      kSeparateO && kStages == 2 && kQBytes + kSeparateOBytes <= kSpareBytes ? 2 : 1;
  // A single Q stage has a producer warp of its own, so that the next tile's K need not wait for Q.
  // It also loads the bias.
  static constexpr bool kQProducerWarp = kQStages == 1 || kHasDenseBias;
  static constexpr int kQOrOBytes = kSeparateO ? kQStages * kQBytes : std::max(kQBytes, kOBytes);
  static constexpr int kTensorBytes = kQOrOBytes + kKvBytes + kSeparateOBytes + kBiasBytes;
  static constexpr int kBiasOffset = kTensorBytes - kBiasBytes;
  static constexpr int kKOffset = kQOrOBytes, kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kOOffset = kSeparateO ? kVOffset + kStages * kVBytes : 0;
  static_assert(kTileKv % 16 == 0 && kDimQk % 16 == 0 && kDimV % 16 == 0,
                "kTileKv, kDimQk and kDimV must be multiples of 16, the K of a WGMMA");

  static constexpr TileCost kCost = hopper_cost(kTileQ, kTileKv, kDimV, kCtasPerSm);
};

constexpr int kWorkStages = 4;      // work tiles finishing, running, planned; a power of two
constexpr int kRedoCapacity = 128;  // most work tiles between two drains

// Packed heads: the KV split of a planned work tile.
struct PackedTile {
  int32_t split_idx;
  Interval keys;
};
template <bool kPacksHeads>
struct PackedTiles {};
template <>
struct PackedTiles<true> {
  PackedTile packed_tiles[kWorkStages];
};

// kTransposesV: tiles of V before VTransposer turns them into V^T. raw_v_keys: how many keys of the
// tile in a stage exist; kNoMoreTiles: there is no tile.
constexpr int32_t kNoMoreTiles = -1;
template <class Config, bool kTransposesV>
struct RawVPipeline {
  struct State {};
};
template <class Config>
struct RawVPipeline<Config, true> {
  using State = PipelineState<Config::kRawVStages>;
  Pipeline<Config::kRawVStages> raw_v;
  int32_t raw_v_keys[Config::kRawVStages];
};

template <class Config>
struct SharedStorage : BiasPipeline<Config::kHasDenseBias, Config::kBiasStages, Config::kConsumers>,
                       RawVPipeline<Config, Config::kTransposesV>,
                       VisibleTiles<kMayHideTiles<Config>, Config::kStages, Config::kConsumers>,
                       PackedTiles<Config::kPacksHeads> {
  Barrier prefetch_next;  // the K/V producer has few loads left: plan the next work tile
  Barrier all_done;       // consumers have finished all tiles before kDrain
  Pipeline<Config::kQStages, Config::kConsumers> q;  // each warpgroup releases its 64 rows
  Pipeline<Config::kStages> k, v;
  Pipeline<kWorkStages> work;
  WorkTile<Config::kConsumers> work_tiles[kWorkStages];
  Interval visible_kv[Config::kTileQ];  // visible keys per row of the tile being computed
  int32_t base_overflowed;              // redo_queue is not empty
  int32_t redo_queue[kRedoCapacity];    // by redo_slot: work_idx + 1, or 0
};

template <class Config>
constexpr int kSharedBytes = Config::kTensorBytes + static_cast<int>(sizeof(SharedStorage<Config>));

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& storage,
                                              int32_t kv_producers) {
  constexpr int kConsumers = Config::kConsumers;
  storage.prefetch_next.init(1);
  storage.all_done.init(4 * kConsumers);
  storage.q.init(1, 1);
  storage.k.init(1, kConsumers);
  if constexpr (Config::kTransposesV) {
    storage.raw_v.init(1, Config::kTransposerWarps);
    storage.v.init(Config::kTransposerWarps, kConsumers);
  } else {
    storage.v.init(1, kConsumers);
  }
  if constexpr (Config::kHasDenseBias) storage.bias.init(1, 4);  // warps
  if constexpr (kMayHideTiles<Config>) storage.windows.init(1, kv_producers);
  storage.work.init(kConsumers, 4 * kConsumers + Config::kQProducerWarp + kv_producers);
  ptx::fence_mbarrier_init();
}

}  // namespace flashattn::cuda::sm90
