// Tiles, registers and shared memory of each Hopper backward kernel.
#pragma once

#include <type_traits>

#include "cuda/device/dense_bias_panel.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

// Tiles of all kernels. Operands lie in panels of 64 columns, 128 bytes per row.
template <class T_, int kDimQk_, int kDimV_, int kTileQ_, int kTileKv_, class ScoreMod_>
struct BwdTileConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // WGMMA sizes; TMA pads with 0
  static constexpr int kTileQ = kTileQ_, kTileKv = kTileKv_;
  using ScoreMod = ScoreMod_;
  // kIsRuntime: any combination of score modifications, a dense bias among them.
  static constexpr bool kIsRuntime = ScoreMod::kIsRuntime && ScoreMod::kReadsMemory;
  // kHasBlockMask: Q tiles are listed, without those that a block mask hides. kSplitsBlockMask:
  // each consumer knows what the mask hides of its own keys. Otherwise each tile is masked or, with
  // kWholeBlocks, none: blocks hide whole tiles.
  static constexpr bool kHasBlockMask = ScoreMod::template kHas<BlockMask>;
  static constexpr bool kWholeBlocks = kHasBlockMask && !kIsRuntime && kTileQ > 64;
  static constexpr bool kSplitsBlockMask = kHasBlockMask && !kIsRuntime && !kWholeBlocks;
  static constexpr bool kIsDropout = !kIsRuntime && ScoreMod::template kHas<Dropout>;
  // kHasDenseBias: a dense bias is the only score modification. TMA loads it for each consumer by
  // itself.
  static constexpr bool kHasDenseBias = !kIsRuntime && ScoreMod::template kHas<DenseBias>;
  static constexpr int kBiasStages = kHasDenseBias ? 2 : 1;
  static constexpr bool kHasScoreMod = ScoreMod::kModifiesScores && !kHasDenseBias;
  static constexpr bool kHasDerivative = ScoreMod::template kHasStage<ScoreStage::kProduct>;
  static constexpr bool kSeparatePForDs =
      kHasDerivative || kIsDropout;  // P for dS differs from P for dV
  static constexpr bool kCoordHasHead =
      kHasBlockMask || kIsDropout;      // q_coord includes the head of the GQA group
  static constexpr int kConsumers = 2;  // warpgroups that hold dK and dV
  static constexpr int kPanelsQk = kDimQk / 64, kPanelsV = kDimV / 64;
  static constexpr int kKBytes = kTileKv * kDimQk * 2;
  static constexpr int kQBytes = kTileQ * kDimQk * 2, kDoBytes = kTileQ * kDimV * 2;
  static constexpr int kDsStages = 2;
  static constexpr int kRowStatBytes = kTileQ * 4;  // lse or delta of a Q tile
};

// Small heads: two consumer warpgroups hold dK and dV of 64 keys each. dQ of a Q tile, kDqSubtiles
// subtiles, fills kDqFills stages.
template <class T, int kDimQk, int kDimV, int kTileQ, class ScoreMod, int kStages_, int kKStages_,
          int kDqSubtiles_, int kDqStages_ = kDqSubtiles_, int kDqFills_ = kDqStages_>
struct BwdSmallHeadConfig : BwdTileConfig<T, kDimQk, kDimV, kTileQ, 128, ScoreMod> {
  using Tiles = BwdTileConfig<T, kDimQk, kDimV, kTileQ, 128, ScoreMod>;
  using Tiles::kHasDenseBias, Tiles::kBiasStages;
  using Tiles::kQBytes, Tiles::kDoBytes, Tiles::kDsStages, Tiles::kRowStatBytes;
  using Tiles::kTileKv, Tiles::kKBytes;
  static constexpr bool kSplitRoles = false, kTwoCta = false;
  static constexpr bool kBiasInDs = false;  // the bias has stages of its own, one panel each
  static constexpr int kClusterTileKv = kTileKv;
  // CTAs may share a KV tile, but not under a mask.
  static constexpr bool kStreamK = !Tiles::kHasBlockMask || Tiles::kIsRuntime;
  static constexpr int kAccRegs = (kDimQk + kDimV) / 2;  // accumulators of dK and dV per thread
  static constexpr int kStages = kStages_, kQStages = kStages, kDoStages = kStages;
  static constexpr int kKStages = kKStages_;  // the next K is loaded while dQ needs this one
  // kSplitsDs: each consumer passes its dS to the dQ warpgroup by a pipeline of its own, with
  // stages for the Q tiles that see its keys only, and skips the others. Not at D = 128, which
  // would lose 1 to 8 %.
  static constexpr bool kSplitsDs = Tiles::kSplitsBlockMask && kDimQk == 64;
  static constexpr int kDsArrivals = kSplitsDs ? 4 : 8, kDoArrivals = 8;  // one per warp
  static constexpr int kPeerKPanels = 0;
  static constexpr int kDsBytes = kTileQ * kTileKv * 2;
  static constexpr int kDqTileBytes = kTileQ * kDimQk * 4;
  static constexpr int kDqSubtiles = kDqSubtiles_, kCtaDqSubtiles = kDqSubtiles, kDqWriters = 1;
  static constexpr int kDqStages = kDqStages_, kDqFills = kDqFills_;
  static constexpr int kDqStageBytes = kDqTileBytes / kDqFills;
  static constexpr bool kSplitsKPanel = false;  // see k_slot()
  static constexpr bool kEarlyReleaseK = false;

  // Shared memory: K stages | V | Q stages | dO stages | dS stages | dQ | lse stages | delta stages
  // | bias stages | BwdSharedStorage.
  static constexpr int kV = kKStages * kKBytes, kQ = kV + kTileKv * kDimV * 2;
  static constexpr int kDo = kQ + kStages * kQBytes;
  static constexpr int kDs = kDo + kStages * kDoBytes, kDq = kDs + kDsStages * kDsBytes;
  static constexpr int kLse = kDq + kDqStages * kDqStageBytes,
                       kDelta = kLse + kStages * kRowStatBytes;
  static constexpr int kBias = kDelta + kStages * kRowStatBytes;
  static constexpr int kBiasBytes =
      kHasDenseBias ? Tiles::kConsumers * kBiasStages * kBiasPanelBytes : 0;
  static constexpr int kMainBytes = kBias + kBiasBytes;
};

// K stages of BwdConfig. At D = 128, a bias leaves no room for the second.
template <int kDim, class ScoreMod>
constexpr int kBwdKStages =
    kDim == 128 && !ScoreMod::kIsRuntime && ScoreMod::template kHas<DenseBias> ? 1 : 2;

// The kernel of bwd_mainloop.cuh: a third warpgroup computes dQ.
template <class T, int kDim, int kTileQ, class ScoreMod>
struct BwdConfig
    : BwdSmallHeadConfig<T, kDim, kDim, kTileQ, ScoreMod, kDim * kTileQ == 64 * 64 ? 4 : 2,
                         kBwdKStages<kDim, ScoreMod>, kTileQ * kDim / (64 * 64)> {
  static constexpr int kSliceQ = 64;  // queries per WGMMA, N
  static constexpr bool kConsumersComputeDq = false;
  static constexpr bool kInlinePostprocess = true;  // the dQ warpgroup has time for it
  static constexpr bool kOverlapPreprocess = true;  // starts before all heads are preprocessed
  static constexpr bool kEarlyReleaseV = true;  // after the last dP, so that the next V can load
  // A consumer skips Q tiles that see none of its keys: 1 to 3 % faster under masks. D = 64 would
  // lose 3 %, except with a block mask, whose blocks may be as small as a consumer's keys.
  using Tiles = BwdTileConfig<T, kDim, kDim, kTileQ, 128, ScoreMod>;
  static constexpr bool kSkipMaskedTiles =
      !Tiles::kIsRuntime && (kDim == 128 || Tiles::kSplitsBlockMask);
  // A tile whose rows may have a base has a step of its own: 0.7 % faster under masks. D = 128
  // would lose 0.3 %.
  static constexpr bool kLargeLseApart = ScoreMod::kIsPlain && kDim == 64;
  static constexpr int kDqSubtilesAtOnce = 1;
  static constexpr int kThreads = 128 * 4;
  // Registers per thread: those of the four warpgroups add up to at most 512.
  static constexpr int kProducerRegisters = 32, kDqRegisters = 64;
  static constexpr int kConsumerRegisters = 208;
  // S of the next Q tile is issued before dK of this one is done, where registers allow.
  static constexpr bool kPrefetchS = kDim == 64;
  // Registers do not hold dP, P for dV and P for dS: the latter is staged in the buffer of dS.
  static constexpr bool kStagePInDs = kDim == 128 && Tiles::kSeparatePForDs;

  static_assert(kTileQ == 64 || kDim == 64,
                "a dQ subtile is 64 x 64: only one of kTileQ and kDim may exceed 64");
};

// Large heads, whose dK and dV of 64 keys fill two warpgroups: one consumer computes P and holds
// dV, the other computes dS and holds dK; a third warpgroup computes dQ.
//
// kTwoCta: a cluster of two CTAs works on 128 keys, 64 per CTA as above. They exchange dS, so that
// each computes half of the columns of dQ over all 128 keys, and half as much is added to global
// memory. Each loads half of the columns of Q and dO for both, by multicast.
template <class T, int kDimQk, int kDimV, class ScoreMod>
struct BwdLargeHeadConfig : BwdTileConfig<T, kDimQk, kDimV, 64, 64, ScoreMod> {
  using Tiles = BwdTileConfig<T, kDimQk, kDimV, 64, 64, ScoreMod>;
  using Tiles::kKBytes, Tiles::kQBytes, Tiles::kDoBytes, Tiles::kDsStages, Tiles::kRowStatBytes;
  using Tiles::kTileQ, Tiles::kTileKv, Tiles::kHasScoreMod, Tiles::kIsRuntime, Tiles::kPanelsQk;
  static constexpr int kSliceQ = kTileQ;
  static constexpr bool kSplitRoles = true, kTwoCta = kDimQk > 192, kConsumersComputeDq = false;
  static constexpr bool kSplitsDs = false;
  static constexpr bool kInlinePostprocess = false, kEarlyReleaseV = false,
                        kSkipMaskedTiles = false, kSplitsKPanel = false;
  static constexpr bool kEarlyReleaseK = false;
  static constexpr bool kOverlapPreprocess = true;           // D = 256: 2 % faster at 1k
  static constexpr int kClusterTileKv = kTwoCta ? 128 : 64;  // keys of a work tile
  // P passes from one consumer to the other in the buffer of dS: there is no room for another.
  static constexpr bool kStagePInDs = kTwoCta;
  // The bias of a Q tile arrives there, too, before P; an fp32 bias also fills the peer's half.
  static constexpr bool kBiasInDs = Tiles::kHasDenseBias;
  static_assert(!kBiasInDs || kStagePInDs, "a stage of dS holds a bias of fp32 in a cluster only");
  static constexpr int kThreads = 128 * 4;
  static constexpr bool kStreamK = !kTwoCta;  // the scheduler lacks registers for it
  static constexpr int kAccRegs = (kDimQk > kDimV ? kDimQk : kDimV) / 2;
  // dQ subtiles, 64 columns each, that are accumulated at once: dS is read once for all of them.
  static constexpr int kDqSubtilesAtOnce = kTwoCta && !kIsRuntime ? 2 : 1;
  // A scheduler with a block mask needs some more registers.
  static constexpr int kProducerRegisters =
      kDqSubtilesAtOnce > 1 && !Tiles::kHasBlockMask ? 24 : 32;
  static constexpr int kDqRegisters = kDqSubtilesAtOnce > 1 ? 96 : 64;
  static constexpr int kSoftmaxRegisters =  // the consumer that computes P
      kDqSubtilesAtOnce == 1 ? 216
      : Tiles::kHasBlockMask ? 192
                             : 200;
  static constexpr int kConsumerRegisters = kDqSubtilesAtOnce > 1 ? 192 : 200;

  static constexpr int kQStages = 2, kDoStages = kDimV > 192 ? 1 : 2;
  static constexpr int kPStages = kStagePInDs ? 0 : 2;
  static constexpr int kDsArrivals = 4, kDoArrivals = 5;
  static constexpr int kKStages = 1;
  // Panels of the peer CTA's K: the columns of which this CTA computes dQ.
  static constexpr int kPeerKPanels = kTwoCta ? kPanelsQk / 2 : 0;
  static constexpr int kPeerKBytes = kPeerKPanels * kTileKv * 128;
  static constexpr int kCtaDsBytes = kTileQ * kTileKv * 2;      // dS of this CTA's keys
  static constexpr int kDsBytes = kTileQ * kClusterTileKv * 2;  // this CTA's, then the peer's
  static constexpr int kDqSubtiles = kPanelsQk,
                       kCtaDqSubtiles = kDqSubtiles * kTileKv / kClusterTileKv;  // by this CTA
  static constexpr int kDqStages = kDqSubtiles == 4 ? 2 : kDqSubtiles, kDqWriters = 1;
  static constexpr int kDqStageBytes = 64 * 64 * (kTwoCta ? 2 : 4);  // a subtile, or half of one
  static constexpr int kDqFills = kCtaDqSubtiles * (64 * 64 * 4) / kDqStageBytes;

  // Shared memory: K | V | Q stages | dO stages | dS stages | P stages | dQ stages | the peer's K |
  // lse stages | delta stages | BwdSharedStorage.
  static constexpr int kV = kKBytes, kQ = kV + kTileKv * kDimV * 2;
  static constexpr int kDo = kQ + kQStages * kQBytes, kDs = kDo + kDoStages * kDoBytes;
  static constexpr int kP = kDs + kDsStages * kDsBytes;
  static constexpr int kDq = kP + kPStages * kCtaDsBytes, kPeerK = kDq + kDqStages * kDqStageBytes;
  static constexpr int kLse = kPeerK + kPeerKBytes, kDelta = kLse + kQStages * kRowStatBytes;
  static constexpr int kMainBytes = kDelta + kDoStages * kRowStatBytes;
};

// Long Q: without a dQ warpgroup the consumers have registers for Q tiles of 80.
template <class T, int kDim, class ScoreMod>
struct BwdTwoWarpgroupConfig : BwdSmallHeadConfig<T, kDim, kDim, 80, ScoreMod, 2, 1, 2> {
  static constexpr int kSliceQ = 80;
  static constexpr bool kConsumersComputeDq = true, kInlinePostprocess = false;
  static constexpr bool kEarlyReleaseV = false, kOverlapPreprocess = false, kStagePInDs = false,
                        kSkipMaskedTiles = false;
  static constexpr int kThreads = 128 * 3;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static_assert(kDim == 128, "kDim must be 128: each consumer computes 64 columns of dQ");
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * (65536 / kThreads / 8 * 8),
                "setmaxnreg waits forever for registers that the CTA does not have");
};

// Latent attention's heads, 192 and 128: dK and dV of 64 keys are 160 registers of a thread, which
// leaves no room for a dQ warpgroup. Each consumer computes 96 columns of dQ, and both pass them
// through the same stages, in turn.
template <class T, class ScoreMod>
using BwdLatentHeadTiles = BwdSmallHeadConfig<T, 192, 128, 64, ScoreMod, 2, 1, 2, 3, 6>;
template <class T, class ScoreMod>
struct BwdLatentHeadConfig : BwdLatentHeadTiles<T, ScoreMod> {
  static constexpr int kSliceQ = 64;
  static constexpr bool kConsumersComputeDq = true;
  static constexpr bool kInlinePostprocess = true;  // in half of the scheduler's warp
  // K is released before the last dQ is stored.
  static constexpr bool kEarlyReleaseV = true, kEarlyReleaseK = true;
  static constexpr bool kOverlapPreprocess = true, kStagePInDs = false, kSkipMaskedTiles = true;
  static constexpr bool kSplitsKPanel = true;
  static constexpr int kThreads = 128 * 3;
  static constexpr int kDqWriters = 2;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // Shared memory, before BwdSharedStorage: a block of dQ that is converted.
  using Tiles = BwdLatentHeadTiles<T, ScoreMod>;
  static constexpr int kDqBlock = Tiles::kMainBytes, kMainBytes = kDqBlock + Tiles::kDqStageBytes;
};

// Slot of a panel of K in shared memory. kSplitsKPanel: the slots hold panels 0, 2, 1. A consumer
// computes the columns of dQ of panel 0 or 2 and of half of panel 1: one WGMMA reads both.
template <class Config>
__host__ __device__ constexpr int k_slot(int panel) {
  return Config::kSplitsKPanel && panel > 0 ? 3 - panel : panel;
}

}  // namespace flashattn::cuda::sm90
