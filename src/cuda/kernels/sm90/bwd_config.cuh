// Configuration of the Hopper backward kernels, with their shared memory, barriers and work tiles.
#pragma once

#include <type_traits>

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/device/dense_bias_panel.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/kernels/sm90/dq_pipeline.cuh"
#include "cuda/kernels/sm90/params.h"
#include "cuda/device/pipeline.cuh"

namespace flashattn::cuda::sm90 {

// Tiles of all kernels. Operands lie in panels of 64 columns, 128 bytes per row.
template <class T_, int kDimQk_, int kDimV_, int kTileQ_, int kTileKv_, class ScoreMod_>
struct BwdTileConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the WGMMAs; TMA pads with 0
  static constexpr int kTileQ = kTileQ_, kTileKv = kTileKv_;
  using ScoreMod = ScoreMod_;
  // kIsRuntime: dense bias, any combination.
  static constexpr bool kIsRuntime = ScoreMod::kIsRuntime && ScoreMod::kReadsMemory;
  // kHasBlockMask: Q tiles that a block mask hides are left out. kSplitsBlockMask: each consumer
  // asks for its own keys, see kBlockMaskSpans.
  static constexpr bool kHasBlockMask = ScoreMod::template kHas<BlockMask>;
  static constexpr bool kSplitsBlockMask = kHasBlockMask && !kIsRuntime;
  static constexpr bool kIsDropout = !kIsRuntime && ScoreMod::template kHas<Dropout>;
  // kHasDenseBias: scores differ by a bias alone, which TMA loads, for each consumer by itself.
  static constexpr bool kHasDenseBias = !kIsRuntime && ScoreMod::template kHas<DenseBias>;
  static constexpr int kBiasStages = kHasDenseBias ? 2 : 1;  // panels
  static constexpr bool kHasScoreMod = ScoreMod::kModifiesScores && !kHasDenseBias;
  static constexpr bool kHasDerivative = ScoreMod::template kHasStage<ScoreStage::kProduct>;
  static constexpr bool kSeparatePForDs =
      kHasDerivative || kIsDropout;  // P for dS differs from P for dV
  static constexpr bool kCoordHasHead =
      kHasBlockMask || kIsDropout;      // q_coord includes the head of the group
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
  static constexpr int kClusterTileKv = kTileKv;
  static constexpr bool kStreamK = true;  // CTAs may share a KV tile
  static constexpr int kAccRegs = (kDimQk + kDimV) / 2;  // accumulators of dK and dV per thread
  static constexpr int kStages = kStages_, kQStages = kStages, kDoStages = kStages;
  static constexpr int kKStages = kKStages_;  // of K: the next is loaded while dQ needs this one
  static constexpr int kDsArrivals = 8, kDoArrivals = 8;  // one per warp
  static constexpr int kPeerKPanels = 0;
  static constexpr int kDsBytes = kTileQ * kTileKv * 2;
  static constexpr int kDqTileBytes = kTileQ * kDimQk * 4;
  static constexpr int kDqSubtiles = kDqSubtiles_, kCtaDqSubtiles = kDqSubtiles, kDqTurns = 1;
  static constexpr int kDqStages = kDqStages_, kDqFills = kDqFills_;
  static constexpr int kDqStageBytes = kDqTileBytes / kDqFills;
  static constexpr bool kSplitsKPanel = false;  // see k_slot()

  // Shared memory: K stages | V | Q stages | dO stages | dS stages | dQ | lse stages | delta stages
  // | bias stages | BwdSharedStorage.
  static constexpr int kV = kKStages * kKBytes, kQ = kV + kTileKv * kDimV * 2;
  static constexpr int kDo = kQ + kStages * kQBytes;
  static constexpr int kDs = kDo + kStages * kDoBytes, kDq = kDs + kDsStages * kDsBytes;
  static constexpr int kLse = kDq + kDqStages * kDqStageBytes, kDelta = kLse + kStages * kRowStatBytes;
  static constexpr int kBias = kDelta + kStages * kRowStatBytes;
  static constexpr int kBiasBytes =
      kHasDenseBias ? Tiles::kConsumers * kBiasStages * kBiasPanelBytes : 0;
  static constexpr int kMainBytes = kBias + kBiasBytes;
};

// Stages of K of the kernel below. Bits of a block mask, or a bias, leave no room for a second of
// 128 columns.
template <int kDim, class ScoreMod>
constexpr int kBwdKStages =
    kDim == 128 && !ScoreMod::kIsRuntime &&
            (ScoreMod::template kHas<BlockMask> || ScoreMod::template kHas<DenseBias>)
        ? 1
        : 2;

// The kernel of bwd_mainloop.cuh: a third warpgroup computes dQ.
template <class T, int kDim, int kTileQ, class ScoreMod>
struct BwdConfig
    : BwdSmallHeadConfig<T, kDim, kDim, kTileQ, ScoreMod, kDim * kTileQ == 64 * 64 ? 4 : 2,
                         kBwdKStages<kDim, ScoreMod>, kTileQ * kDim / (64 * 64)> {
  static constexpr int kMmaN = 64;  // queries per WGMMA
  static constexpr bool kConsumersComputeDq = false;
  static constexpr bool kInlinePostprocess = true;  // the dQ warpgroup has time for it
  static constexpr bool kOverlapPreprocess = true;  // starts before all heads are preprocessed
  static constexpr bool kEarlyReleaseV = true;  // after the last dP, so that the next V can load
  // A consumer skips Q tiles that see none of its keys: 1 to 3 % faster under masks. D = 64 would
  // lose 3 %, but for a block mask, of which blocks may be as small as a consumer's keys.
  static constexpr bool kSkipMaskedTiles = !(ScoreMod::kIsRuntime && ScoreMod::kReadsMemory) &&
                                           (kDim == 128 || ScoreMod::template kHas<BlockMask>);
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
  static constexpr bool kStagePInDs =
      kDim == 128 && BwdTileConfig<T, kDim, kDim, kTileQ, 128, ScoreMod>::kSeparatePForDs;

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
  static constexpr int kMmaN = kTileQ;
  static constexpr bool kSplitRoles = true, kTwoCta = kDimQk > 192, kConsumersComputeDq = false;
  static constexpr bool kInlinePostprocess = false, kEarlyReleaseV = false,
                        kSkipMaskedTiles = false, kSplitsKPanel = false;
  static constexpr bool kOverlapPreprocess = true;           // D = 256: 2 % faster at 1k
  static constexpr int kClusterTileKv = kTwoCta ? 128 : 64;  // keys of a work tile
  // P passes from one consumer to the other in the buffer of dS: there is no room for another.
  static constexpr bool kStagePInDs = kTwoCta;
  static constexpr int kThreads = 128 * 4;
  static constexpr bool kStreamK = !kTwoCta;  // the scheduler lacks registers for it
  static constexpr int kAccRegs = (kDimQk > kDimV ? kDimQk : kDimV) / 2;
  // dQ subtiles, 64 columns each, that are accumulated at once: dS is read once for all of them.
  static constexpr int kDqSubtilesAtOnce = kTwoCta && !kIsRuntime ? 2 : 1;
  // The scheduler of a block mask needs some more.
  static constexpr int kProducerRegisters =
      kDqSubtilesAtOnce > 1 && !Tiles::kHasBlockMask ? 24 : 32;
  static constexpr int kDqRegisters = kDqSubtilesAtOnce > 1 ? 96 : 64;
  static constexpr int kSoftmaxRegisters =  // of the consumer of P
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
  static constexpr int kDqStages = kDqSubtiles == 4 ? 2 : kDqSubtiles, kDqTurns = 1;
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
  static constexpr int kMmaN = 80;
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
struct BwdLatentHeadConfig : BwdSmallHeadConfig<T, 192, 128, 64, ScoreMod, 2, 1, 2, 3, 6> {
  static constexpr int kMmaN = 64;
  static constexpr bool kConsumersComputeDq = true, kInlinePostprocess = false;
  static constexpr bool kEarlyReleaseV = false, kOverlapPreprocess = true, kStagePInDs = false,
                        kSkipMaskedTiles = false, kSplitsKPanel = true;
  static constexpr int kThreads = 128 * 3;
  static constexpr int kDqTurns = 2;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

// Place of a panel of K in shared memory. kSplitsKPanel: of three the second comes last. A consumer
// computes the columns of dQ of panel 0 or 2 and of half of panel 1: one WGMMA reads both.
template <class Config>
__host__ __device__ constexpr int k_slot(int panel) {
  return Config::kSplitsKPanel && panel > 0 ? 3 - panel : panel;
}

// CTAs of a cluster, which share a work tile and the columns of dQ.
template <class Config>
constexpr int kClusterSize = Config::kClusterTileKv / Config::kTileKv;

// float4s of a stream-K partial: the accumulators of dK and dV of a CTA, four of a thread in each.
template <class Config>
constexpr int kPartialQuads =
    Config::kStreamK ? Config::kConsumers * 128 * Config::kAccRegs / 4 : 0;

// The end of QTileSpan::full where rows may have a BackwardParams::softmax_base: no Q tile is full.
constexpr int32_t kHasLargeLse = -1;

// Q tiles for a span of a work tile's keys. full: every query sees all of these keys. any: some
// query sees one.
struct QTileSpan {
  Interval full;
};
struct QTileSpanWithAny : QTileSpan {
  Interval any;
};

// Key spans per work tile: one per consumer where consumers skip Q tiles, otherwise one in all.
template <class Config>
constexpr int kQTileSpans = Config::kSkipMaskedTiles ? Config::kConsumers : 1;

// Spans of keys that a block mask is looked up for: one per consumer or, where both consumers of a
// CTA have all of its keys, one per CTA. Then the words that hold a bit of each Q tile.
template <class Config>
constexpr int kBlockMaskSpans = !Config::kSplitsBlockMask ? 1
                                : Config::kSplitRoles     ? kClusterSize<Config>
                                                          : Config::kConsumers;
template <class Config>
constexpr int kBlockMaskWords = Config::kHasBlockMask ? kMaxBlockMaskTiles / 32 : 1;

// A KV tile of a KV head, with all Q tiles of its GQA group that see some of its keys. The CTAs of
// a cluster have the same work tiles, except for the keys.
template <class Config>
struct BwdWorkTile {
  int32_t end;  // not 0: there are no more work tiles
  int32_t b, kv_head;
  int32_t key, keys;  // this CTA's first key; number of keys, at most kTileKv, may be 0
  int32_t offset_q, offset_kv;
  Lengths len;
  Interval q_tiles;
  std::conditional_t<Config::kSkipMaskedTiles, QTileSpanWithAny, QTileSpan>
      q_spans[kQTileSpans<Config>];
  int32_t first_q_tile;  // the Q tile that is visited first; q_tiles.begin follows the last
  uint32_t iter_begin,
      iter_end;            // Q tiles of all heads, since the CTA began, up to its begin and end
  uint32_t kv_index;       // work tiles before it that have Q tiles
  int32_t workspace_tile;  // the sequence's first, in dq, lse2 and delta, for the first head
  // Stream-K, see StreamK::Partial. partials == 1: the KV tile is not split.
  int32_t split_tile, partial, first_partial, partials;
  Interval partial_tiles;
  // Block mask: bit (head of the group) * tiles + tile, of each span of keys: whether a query of
  // the Q tile sees a key; whether every query sees every key. Tiles count from q_tiles.begin.
  uint32_t visible_tiles[kBlockMaskSpans<Config>][kBlockMaskWords<Config>];
  uint32_t full_tiles[kBlockMaskSpans<Config>]
                     [Config::kSplitsBlockMask ? kBlockMaskWords<Config> : 1];
};

// A dQ tile that this CTA converts once all KV tiles have been added to it.
struct DqPostprocessTile {
  int32_t* state;        // of dq_states
  const float4* from;    // its fp32 accumulator; NULL: no key was seen
  char* to;              // its first row of args.dq
  int32_t heads;         // b * heads_q + h + 1
  int32_t rows;          // rows of the sequence from there on; below 0: no more tiles
  uint32_t valid, sent;  // whether a tile is held; tiles passed to the warps so far
  uint32_t done[4];      // tiles that each warp has converted
};

constexpr int kWorkTileStages = 2;
constexpr uint32_t kDeferredTiles = 4;  // tiles that a DqReducer publishes at once

// kTwoCta: the peer's dS; in CTA 1 the indices of the work tiles, which CTA 0 takes.
template <class Config>
struct TwoCtaStorage {
  StageBarriers<Config::kDsStages> peer_ds_full;
  StageBarriers<kWorkTileStages> index_full;
  uint32_t indices[kWorkTileStages];
};

// kInlinePostprocess: the scheduler passes dQ tiles to the dQ warpgroup.
struct DqPostprocessStorage {
  Pipeline<1> pipeline;
  DqPostprocessTile tile;
  int32_t deferred[2][kDeferredTiles];  // by reducer: tiles not yet published
};

template <class Config>
struct BwdSharedStorage
    : BiasPipeline<Config::kHasDenseBias, Config::kBiasStages, Config::kConsumers> {
  // K and V arrive at the barriers of the first Q and dO of a work tile.
  StageBarriers<Config::kKStages> k_empty;
  StageBarriers<1> v_empty;
  Barrier prefetch_next;  // the producer has few loads left: plan the next work tile
  Pipeline<Config::kQStages, 1, Config::kTwoCta> q;
  Pipeline<Config::kDoStages, 1, Config::kTwoCta> dout;
  Pipeline<Config::kSplitRoles ? 2 : 1> p;  // kSplitRoles: P, from one consumer to the other
  Pipeline<Config::kDsStages, 1, Config::kTwoCta> ds;  // released when dQ is done, in the peer, too
  DqPipeline<Config::kDqStages, Config::kDqTurns> dq;
  Pipeline<kWorkTileStages> work;
  BwdWorkTile<Config> work_tiles[kWorkTileStages];
  BwdWorkTile<Config>
      consumer_work_tile[Config::kConsumers];     // each consumer's copy of its current tile
  uint32_t work_tiles_taken[Config::kConsumers];  // count, by each consumer
  int32_t partials_arrived[Config::kConsumers];   // partials that arrived before the consumer's own
  int32_t preprocessed_heads;                     // lower bound that the scheduler has read
  int32_t has_large_lse;  // rows of those heads may have a base, see BackwardParams::softmax_base
  Interval visible_queries[Config::kTileKv];  // per key of the work tile
  // ALiBi slope of the head of each Q stage, in units of log2(e), or 0; written before Q arrives.
  float alibi_slopes[Config::kHasScoreMod ? Config::kQStages : 1];
  std::conditional_t<Config::kTwoCta, TwoCtaStorage<Config>, uint32_t> two_cta;
  std::conditional_t<Config::kInlinePostprocess, DqPostprocessStorage, uint32_t> dq_postprocess;
};

template <class Config>
constexpr int kBwdSharedBytes =
    Config::kMainBytes + static_cast<int>(sizeof(BwdSharedStorage<Config>));
constexpr int kMaxSharedBytes = 227 * 1024;

// Rank of this CTA in its cluster.
template <class Config>
__device__ __forceinline__ uint32_t cta_rank() {
  return Config::kTwoCta ? ptx::cluster_rank() : 0;
}

template <class Config>
__device__ __forceinline__ void init_shared_storage(BwdSharedStorage<Config>& storage) {
  constexpr int kConsumers = Config::kConsumers;
  // K and the work tile are read by the consumers and by the dQ warpgroup, if there is one.
  constexpr int kReaders = kConsumers + !Config::kConsumersComputeDq;
  storage.k_empty.init(kReaders);
  storage.v_empty.init(kConsumers);
  storage.prefetch_next.init(1);
  storage.q.init(1, kClusterSize<Config> * kConsumers);
  storage.dout.init(1, kClusterSize<Config> * Config::kDoArrivals);
  if constexpr (Config::kSplitRoles) storage.p.init(4, 4);  // warps
  storage.ds.init(Config::kDsArrivals,
                  Config::kConsumersComputeDq ? kConsumers : kClusterSize<Config>);
  storage.dq.init(4, 1);                                         // warps; a reducer
  if constexpr (Config::kHasDenseBias) storage.bias.init(1, 4);  // warps
  // The producer and the two reducers read it, too; the peer arrives when it has read the index.
  storage.work.init(1, kReaders + 3 + (Config::kTwoCta && cta_rank<Config>() == 0));
  if constexpr (Config::kTwoCta) {
    storage.two_cta.peer_ds_full.init(1);
    storage.two_cta.index_full.init(1);
  }
  if constexpr (Config::kInlinePostprocess) storage.dq_postprocess.pipeline.init(1, 4);  // warps
  ptx::fence_mbarrier_init();
  for (int n = 0; n < kConsumers; ++n) storage.work_tiles_taken[n] = 0;
  storage.preprocessed_heads = 0;
  if constexpr (Config::kInlinePostprocess) {
    DqPostprocessTile& tile = storage.dq_postprocess.tile;
    tile.valid = tile.sent = 0;
    for (uint32_t& done : tile.done) done = 0;
  }
  for (BwdWorkTile<Config>& work_tile : storage.work_tiles)
    work_tile.iter_begin = work_tile.iter_end = work_tile.kv_index = 0;
}

// Address of K of a work tile.
template <class Config>
__device__ __forceinline__ uint32_t k_address(uint32_t shared,
                                              const volatile BwdWorkTile<Config>& work_tile) {
  return shared + PipelineState<Config::kKStages>{work_tile.kv_index}.stage() * Config::kKBytes;
}

// Releases K for one reader. Only for work tiles that have Q tiles: the others load no K.
template <class Config>
__device__ __forceinline__ void release_k(BwdSharedStorage<Config>& storage,
                                          const volatile BwdWorkTile<Config>& work_tile) {
  storage.k_empty.arrive({work_tile.kv_index});
}

// IDs of named barriers; 0 is __syncthreads().
constexpr int kWarpgroupBarrier = 1;  // + consumer: its four warps
constexpr int kDqBarrier = 3;         // the dQ warpgroup

using WorkTileState = PipelineState<kWorkTileStages>;

// Calls work(work_tile, at) for each work tile that the scheduler publishes. Each reader
// releases it, at this state, once it has read it.
template <class Config, class Work>
__device__ __forceinline__ void for_each_work_tile(BwdSharedStorage<Config>& storage, Work work) {
  for (WorkTileState work_tiles;; work_tiles.advance()) {
    storage.work.consumer_wait(work_tiles);
    const volatile BwdWorkTile<Config>& work_tile = storage.work_tiles[work_tiles.stage()];
    if (work_tile.end) break;
    work(work_tile, work_tiles);
  }
}

// q_coord with kCoordHasHead: (head of the GQA group) * kCoordHead + Q tile.
constexpr int32_t kCoordHead = kMaxRuntimeTiles, kCoordTileMask = kCoordHead - 1;

// The place of a Q tile in visible_tiles and full_tiles. head: of the GQA group.
template <class Config>
__device__ __forceinline__ int32_t block_mask_bit(const volatile BwdWorkTile<Config>& work_tile,
                                                  int32_t head, int32_t tile) {
  return head * (work_tile.q_tiles.end - work_tile.q_tiles.begin) + tile - work_tile.q_tiles.begin;
}

// Whether the block mask leaves a visible key in the Q tile.
template <class Config>
__device__ __forceinline__ bool is_visible(const volatile BwdWorkTile<Config>& work_tile,
                                           const BackwardParams& params, int32_t head,
                                           int32_t tile) {
  if (!Config::kHasBlockMask || !(params.common.problem.mask & FLASHATTN_MASK_BLOCKS)) return true;
  const int32_t bit = block_mask_bit(work_tile, head, tile);
  uint32_t visible = 0;
#pragma unroll
  for (int span = 0; span < kBlockMaskSpans<Config>; ++span)
    visible |= work_tile.visible_tiles[span][bit / 32];
  return visible >> bit % 32 & 1;
}

// The Q tile after `tile`; q_tiles.begin follows the last.
template <class Config>
__device__ __forceinline__ int32_t next_q_tile(const volatile BwdWorkTile<Config>& work_tile,
                                               int32_t tile) {
  return tile == work_tile.q_tiles.end - 1 ? work_tile.q_tiles.begin : tile + 1;
}

// Calls step(heads left, tile, workspace_tile) for each Q tile of a work tile, in the order that
// all warps follow, or skip(workspace_tile) if the block mask hides the tile. workspace_tile: its
// index in dq, lse2 and delta.
template <class Config, class Step, class Skip>
__device__ __forceinline__ void for_each_tile(const volatile BwdWorkTile<Config>& work_tile,
                                              const BackwardParams& params, Step step, Skip skip) {
  int32_t workspace_tile = work_tile.workspace_tile;
#pragma unroll 1
  for (int32_t heads = params.common.q_heads_per_kv_head; heads > 0; --heads) {
    int32_t tile = work_tile.first_q_tile;
#pragma unroll 1
    for (int32_t left = work_tile.q_tiles.end - work_tile.q_tiles.begin; left > 0; --left) {
      if (is_visible<Config>(work_tile, params, params.common.q_heads_per_kv_head - heads, tile)) {
        step(heads, tile, workspace_tile + tile);
      } else {
        skip(workspace_tile + tile);
      }
      tile = next_q_tile(work_tile, tile);
    }
    workspace_tile += params.head_q_tiles;
  }
}

}  // namespace flashattn::cuda::sm90
