// The configuration of a Hopper backward kernel and what its warps share.
#pragma once

#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/kernels/sm90/params.h"
#include "cuda/kernels/sm90/pipeline_state.cuh"

namespace flashattn::cuda::sm90 {

// Tiles of all kinds. Columns come in panels of 64, 128 bytes a row.
template <class T_, int kDimQk_, int kDimV_, int kTileQ_, int kTileKv_, ScoreModKind kScores_>
struct BwdTileConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the products; smaller heads: zeros
  static constexpr int kTileQ = kTileQ_, kTileKv = kTileKv_;
  static constexpr ScoreModKind kScoreMod = kScores_;
  static constexpr bool kIsRuntime = kScoreMod == ScoreModKind::kRuntime,
                        kIsDropout = kScoreMod == ScoreModKind::kDropout;
  static constexpr bool kHasScoreMod = kScoreMod == ScoreModKind::kSoftcapAlibi || kIsRuntime;
  static constexpr bool kSeparatePForDs =
      kHasScoreMod || kIsDropout;  // dS is of other weights than dV
  static constexpr bool kCoordHasHead =
      kIsRuntime || kIsDropout;         // places tell heads of a group apart
  static constexpr int kConsumers = 2;  // warpgroups that hold dK and dV
  static constexpr int kPanelsQk = kDimQk / 64, kPanelsV = kDimV / 64;
  static constexpr int kKBytes = kTileKv * kDimQk * 2;
  static constexpr int kQBytes = kTileQ * kDimQk * 2, kDoBytes = kTileQ * kDimV * 2;
  static constexpr int kDsStages = 2;
  static constexpr int kRowStatBytes = kTileQ * 4;  // lse or D of a tile
};

// Two warpgroups hold dK and dV of 64 keys each. kDqSubtiles: of dQ.
template <class T, int kDim_, int kTileQ, ScoreModKind kScoreMod, int kStages_, int kKeyStages_,
          int kShares_>
struct BwdSmallHeadConfig : BwdTileConfig<T, kDim_, kDim_, kTileQ, 128, kScoreMod> {
  using Tiles = BwdTileConfig<T, kDim_, kDim_, kTileQ, 128, kScoreMod>;
  using Tiles::kTileKv, Tiles::kKBytes, Tiles::kQBytes, Tiles::kDsStages, Tiles::kRowStatBytes;
  static constexpr int kDim = kDim_, kPanels = kDim / 64;
  static constexpr bool kSplitRoles = false, kTwoCta = false;
  static constexpr int kClusterTileKv = kTileKv;
  static constexpr bool kStreamK = true;  // tiles of keys, for several blocks
  static constexpr int kAccRegs = kDim;   // of dK and dV, that a thread of them holds
  static constexpr int kStages = kStages_, kQStages = kStages, kDoStages = kStages;
  static constexpr int kKStages = kKeyStages_;  // of K: the next while dQ still needs the last
  static constexpr int kDsArrivals = 8, kDoArrivals = 8;  // arrivals
  static constexpr int kPeerKPanels = 0;
  static constexpr int kDsBytes = kTileQ * kTileKv * 2;
  static constexpr int kDqTileBytes = kTileQ * kDim * 4;
  static constexpr int kDqSubtiles = kShares_, kCtaDqSubtiles = kDqSubtiles;
  static constexpr int kDqStages = kDqSubtiles,
                       kDqStageBytes = kDqTileBytes / kDqSubtiles;  // a slot
  static constexpr int kDqFills = kDqSubtiles;  // of a tile of dQ: each fills a slot

  // Stages of K | V | stages of Q | of dO | of dS | dQ | stages of lse | of D | BwdSharedStorage.
  static constexpr int kV = kKStages * kKBytes, kQ = kV + kKBytes;
  static constexpr int kDo = kQ + kStages * kQBytes;
  static constexpr int kDs = kDo + kStages * kQBytes, kDq = kDs + kDsStages * kDsBytes;
  static constexpr int kLse = kDq + kDqTileBytes, kDelta = kLse + kStages * kRowStatBytes;
  static constexpr int kMainBytes = kDelta + kStages * kRowStatBytes;
};

// A third warpgroup computes dQ.
template <class T, int kDim, int kTileQ, ScoreModKind kScoreMod>
struct BwdConfig : BwdSmallHeadConfig<T, kDim, kTileQ, kScoreMod, kDim * kTileQ == 64 * 64 ? 4 : 2,
                                      2, kTileQ * kDim / (64 * 64)> {
  static constexpr int kMmaN = 64;  // of the products
  static constexpr bool kConsumersComputeDq = false;
  static constexpr bool kInlinePostprocess = true;  // dQ: the warpgroup that computes it has time
  static constexpr bool kOverlapPreprocess = true;  // before all is prepared
  static constexpr bool kEarlyReleaseV = true;  // behind the last dP of an item: the next may come
  // A consumer skips tiles of queries that see none of its keys: under masks 1 to 3 %. D64 loses
  // 3 %.
  static constexpr bool kSkipMaskedTiles = kDim == 128 && kScoreMod != ScoreModKind::kRuntime;
  static constexpr int kDqSubtilesAtOnce = 1;
  static constexpr int kThreads = 128 * 4;
  // A multiprocessor has 512 for the four.
  static constexpr int kProducerRegisters = 32, kDqRegisters = 64;
  static constexpr int kConsumerRegisters = 208;
  // Registers hold S of the next tile while dK of this one is under way.
  static constexpr bool kPrefetchS = kDim == 64;
  // Registers do not hold dP and two kinds of weights: one waits where dS will lie.
  static constexpr bool kStagePInDs = kDim == 128 && kScoreMod != ScoreModKind::kPlain;

  static_assert(kTileQ == 64 || kDim == 64, "dQ: shares of 64 x 64, by columns or by queries");
};

// For large heads, whose dK and dV of 64 keys fill two warpgroups: one consumer computes the
// weights and holds dV, the other the gradients and holds dK; a third warpgroup computes dQ.
//
// kTwoCta: two blocks, a cluster, work on 128 keys, each on 64 of them as above. They exchange dS,
// so that each computes dQ of half of the columns over all 128 keys: half as much is added to
// memory. Each loads half of the columns of Q and dO for both.
template <class T, int kDimQk, int kDimV, ScoreModKind kScoreMod>
struct BwdLargeHeadConfig : BwdTileConfig<T, kDimQk, kDimV, 64, 64, kScoreMod> {
  using Tiles = BwdTileConfig<T, kDimQk, kDimV, 64, 64, kScoreMod>;
  using Tiles::kKBytes, Tiles::kQBytes, Tiles::kDoBytes, Tiles::kDsStages, Tiles::kRowStatBytes;
  using Tiles::kTileQ, Tiles::kTileKv, Tiles::kHasScoreMod, Tiles::kIsRuntime, Tiles::kPanelsQk;
  static constexpr int kMmaN = kTileQ;
  static constexpr bool kSplitRoles = true, kTwoCta = kDimQk > 192, kConsumersComputeDq = false;
  static constexpr bool kInlinePostprocess = false, kEarlyReleaseV = false,
                        kSkipMaskedTiles = false;
  static constexpr bool kOverlapPreprocess = false;          // 0 gained
  static constexpr int kClusterTileKv = kTwoCta ? 128 : 64;  // keys of an item
  // The weights, on their way from one consumer to the other, wait where dS will lie: there is no
  // other room.
  static constexpr bool kStagePInDs = kTwoCta;
  static constexpr int kThreads = 128 * 4;
  static constexpr bool kStreamK = !kTwoCta;  // the planner has no registers for it
  static constexpr int kAccRegs = (kDimQk > kDimV ? kDimQk : kDimV) / 2;
  // Shares of dQ, 64 columns each, whose sums registers hold at once: dS is read once for all.
  static constexpr int kDqSubtilesAtOnce = kTwoCta && !kIsRuntime ? 2 : 1;
  static constexpr int kProducerRegisters = kDqSubtilesAtOnce > 1 ? 24 : 32;
  static constexpr int kDqRegisters = kDqSubtilesAtOnce > 1 ? 96 : 64;
  static constexpr int kSoftmaxRegisters =
      kDqSubtilesAtOnce > 1 ? 200 : 216;  // the first: also scores
  static constexpr int kConsumerRegisters = kDqSubtilesAtOnce > 1 ? 192 : 200;

  static constexpr int kQStages = 2, kDoStages = kDimV > 192 ? 1 : 2;
  static constexpr int kPStages = kStagePInDs ? 0 : 2;
  static constexpr int kDsArrivals = 4, kDoArrivals = 5;
  static constexpr int kKStages = 1;
  // Of the partner's K, the columns of which this block computes dQ.
  static constexpr int kPeerKPanels = kTwoCta ? kPanelsQk / 2 : 0;
  static constexpr int kPeerKBytes = kPeerKPanels * kTileKv * 128;
  static constexpr int kCtaDsBytes = kTileQ * kTileKv * 2;      // dS of the block's keys
  static constexpr int kDsBytes = kTileQ * kClusterTileKv * 2;  // that, then the partner's
  static constexpr int kDqSubtiles = kPanelsQk,
                       kCtaDqSubtiles = kDqSubtiles * kTileKv / kClusterTileKv;  // of dQ
  static constexpr int kDqStages = kDqSubtiles == 4 ? 2 : kDqSubtiles;
  static constexpr int kDqStageBytes =
      64 * 64 * (kTwoCta ? 2 : 4);  // a slot: a share, or half of one
  static constexpr int kDqFills = kCtaDqSubtiles * (64 * 64 * 4) / kDqStageBytes;

  // K | V | stages of Q | of dO | of dS | of P | dQ | the partner's K | stages of lse | of D |
  // BwdSharedStorage.
  static constexpr int kV = kKBytes, kQ = kV + kTileKv * kDimV * 2;
  static constexpr int kDo = kQ + kQStages * kQBytes, kDs = kDo + kDoStages * kDoBytes;
  static constexpr int kP = kDs + kDsStages * kDsBytes;
  static constexpr int kDq = kP + kPStages * kCtaDsBytes, kPeerK = kDq + kDqStages * kDqStageBytes;
  static constexpr int kLse = kPeerK + kPeerKBytes, kDelta = kLse + kQStages * kRowStatBytes;
  static constexpr int kMainBytes = kDelta + kDoStages * kRowStatBytes;
};

// For many queries: with no warpgroup for dQ the consumers have the registers for tiles of 80.
template <class T, int kDim, ScoreModKind kScoreMod>
struct BwdTwoWarpgroupConfig : BwdSmallHeadConfig<T, kDim, 80, kScoreMod, 2, 1, 2> {
  static constexpr int kMmaN = 80;
  static constexpr bool kConsumersComputeDq = true, kInlinePostprocess = false;
  static constexpr bool kEarlyReleaseV = false, kOverlapPreprocess = false, kStagePInDs = false,
                        kSkipMaskedTiles = false;
  static constexpr int kThreads = 128 * 3;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static_assert(kDim == 128, "a consumer has 64 columns of dQ");
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * (65536 / kThreads / 8 * 8),
                "who claims more registers than the block has waits for ever");
};

// Blocks that share an item and the columns of dQ.
template <class Config>
constexpr int kClusterSize = Config::kClusterTileKv / Config::kTileKv;

// Of the sums of a block's consumers: four numbers of each thread stand together.
template <class Config>
constexpr int kPartialQuads =
    Config::kStreamK ? Config::kConsumers * 128 * Config::kAccRegs / 4 : 0;

// Some of the keys of an item: tiles of queries in which every query sees all of them; and those in
// which some query sees one.
struct QTileSpan {
  Interval full;
};
struct QTileSpanWithAny : QTileSpan {
  Interval any;
};

// A consumer's, where it skips tiles of queries that see none of its keys; else all.
template <class Config>
constexpr int kQTileSpans = Config::kSkipMaskedTiles ? Config::kConsumers : 1;

// A tile of keys of a KV head: all tiles of queries of its group that see some of it. The blocks of
// a pair have the same items, but for the keys.
template <class Config>
struct BwdWorkTile {
  int32_t end;  // not 0: there are no more
  int32_t b, kv_head;
  int32_t key, keys;  // the block's first; how many, up to the tile, perhaps none
  int32_t offset_q, offset_kv;
  Lengths len;
  Interval q_tiles;
  std::conditional_t<Config::kSkipMaskedTiles, QTileSpanWithAny, QTileSpan>
      q_spans[kQTileSpans<Config>];
  int32_t first_q_tile;  // the Q tile that is visited first; q_tiles.begin follows the last
  uint32_t iter_begin,
      iter_end;            // tiles of queries, heads and all, since the block began: to its end
  uint32_t kv_index;       // of items before it that had some
  int32_t has_far_rows;    // whether there are rows with a base of their own: no tile is then full
  int32_t workspace_tile;  // of the sequence, in dq and the like, for the group's first head
  // Of a tile of keys that several blocks share: see StreamK::Partial. pieces is 1: of one block.
  int32_t split_tile, partial, first_partial, partials;
  Interval partial_tiles;
  // With a block mask, bit (head of the group) * tiles + tile: whether a query of the tile sees a
  // key. Tiles count from tiles.begin.
  uint32_t visible_tiles[Config::kIsRuntime ? kMaxBlockMaskTiles / 32 : 1];
};

// A tile of dQ that this block is to convert when all have added to it.
struct DqPostprocessTile {
  int32_t* state;        // of dq_states
  const float4* from;    // its sums; NULL: no key was seen
  char* to;              // its first row of args.dq
  int32_t heads;         // b * heads_q + h + 1
  int32_t rows;          // of the sequence from there on; below 0: no more tiles
  uint32_t valid, sent;  // whether a tile is held here; how many were passed to the warps
  uint32_t done[4];      // tiles that each warp has converted
};

constexpr int kWorkTileStages = 2;
constexpr uint32_t kDeferredTiles =
    4;  // tiles that an adder has begun to add when it says so of all

// Pairs. The partner's dS; in the second block the numbers of items, which the first takes.
template <class Config>
struct TwoCtaStorage {
  uint64_t peer_ds_full[Config::kDsStages], index_full[kWorkTileStages];
  uint32_t indices[kWorkTileStages];
};

// What converting dQ takes. To those who do, and back.
struct DqPostprocessStorage {
  uint64_t full, empty;
  DqPostprocessTile tile;
  int32_t deferred[2][kDeferredTiles];  // of each adder: where it has begun to add
};

template <class Config>
struct BwdSharedStorage {
  uint64_t k_empty[Config::kKStages], v_empty, prefetch_next;
  uint64_t q_full[Config::kQStages], q_empty[Config::kQStages];
  uint64_t do_full[Config::kDoStages], do_empty[Config::kDoStages];
  // Wide heads: from one consumer to the other.
  uint64_t p_full[Config::kSplitRoles ? 2 : 1], p_empty[Config::kSplitRoles ? 2 : 1];
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  uint64_t dq_full[2][Config::kDqStages];  // for each of the adders: tiles in turn
  uint64_t dq_empty[Config::kDqStages];
  uint64_t work_tile_full[kWorkTileStages], work_tile_empty[kWorkTileStages];
  BwdWorkTile<Config> work_tiles[kWorkTileStages];
  BwdWorkTile<Config>
      consumer_work_tile[Config::kConsumers];     // each consumer's copy of its current tile
  uint32_t work_tiles_taken[Config::kConsumers];  // count, by each consumer
  int32_t partials_arrived[Config::kConsumers];   // partials that arrived before the consumer's own
  int32_t preprocessed_heads;                     // lower bound that the scheduler has read
  Interval visible_queries[Config::kTileKv];      // per key of the work tile
  // ALiBi slope of the head of each Q stage, in units of log2(e), or 0; written before Q arrives.
  float alibi_slopes[Config::kHasScoreMod ? Config::kQStages : 1];
  std::conditional_t<Config::kTwoCta, TwoCtaStorage<Config>, uint32_t> two_cta;
  std::conditional_t<Config::kInlinePostprocess, DqPostprocessStorage, uint32_t> dq_postprocess;
};

template <class Config>
constexpr int kBwdSharedBytes =
    Config::kMainBytes + static_cast<int>(sizeof(BwdSharedStorage<Config>));
constexpr int kMaxSharedBytes = 227 * 1024;

__device__ __forceinline__ uint32_t barrier_at(uint64_t& barrier) {
  return ptx::shared_address(&barrier);
}

// This block among those that share an item.
template <class Config>
__device__ __forceinline__ uint32_t cta_rank() {
  return Config::kTwoCta ? ptx::cluster_rank() : 0;
}

// Where something of this block lies in the partner.
__device__ __forceinline__ uint32_t at_peer(uint32_t address) {
  return ptx::mapa(address, ptx::cluster_rank() ^ 1);
}

template <class Config>
__device__ __forceinline__ void init_barriers(BwdSharedStorage<Config>& storage) {
  constexpr int kConsumers = Config::kConsumers;
  const auto init = [](uint64_t& barrier, int count) {
    ptx::mbarrier_init(barrier_at(barrier), count);
  };
  // Who reads K or the item: the consumers, and a warpgroup for dQ if there is one.
  constexpr int kReaders = kConsumers + !Config::kConsumersComputeDq;
  for (uint64_t& barrier : storage.k_empty) init(barrier, kReaders);
  init(storage.v_empty, kConsumers);
  init(storage.prefetch_next, 1);
  for (int n = 0; n < Config::kQStages; ++n) {
    init(storage.q_full[n], 1);
    init(storage.q_empty[n], kClusterSize<Config> * kConsumers);
  }
  for (int n = 0; n < Config::kDoStages; ++n) {
    init(storage.do_full[n], 1);
    init(storage.do_empty[n], kClusterSize<Config> * Config::kDoArrivals);
  }
  if constexpr (Config::kSplitRoles) {
    for (int n = 0; n < 2; ++n) {
      init(storage.p_full[n], 4);  // warps
      init(storage.p_empty[n], 4);
    }
  }
  for (int n = 0; n < Config::kDsStages; ++n) {
    init(storage.ds_full[n], Config::kDsArrivals);
    init(storage.ds_empty[n], Config::kConsumersComputeDq ? kConsumers : kClusterSize<Config>);
  }
  for (int n = 0; n < Config::kDqStages; ++n) {
    init(storage.dq_full[0][n], 4);  // warps
    init(storage.dq_full[1][n], 4);
    init(storage.dq_empty[n], 1);
  }
  for (int n = 0; n < kWorkTileStages; ++n) {
    init(storage.work_tile_full[n], 1);
    // Also the loader and the adders; the partner, when it has read the number.
    init(storage.work_tile_empty[n], kReaders + 3 + (Config::kTwoCta && cta_rank<Config>() == 0));
  }
  if constexpr (Config::kTwoCta) {
    for (uint64_t& barrier : storage.two_cta.peer_ds_full) init(barrier, 1);
    for (uint64_t& barrier : storage.two_cta.index_full) init(barrier, 1);
  }
  if constexpr (Config::kInlinePostprocess) {
    init(storage.dq_postprocess.full, 1);
    init(storage.dq_postprocess.empty, 4);  // warps
  }
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

// Something of this block has been read; of a pair, both want to know.
template <class Config>
__device__ __forceinline__ void arrive_cluster(uint64_t& barrier) {
  ptx::mbarrier_arrive(barrier_at(barrier));
  if constexpr (Config::kTwoCta) ptx::mbarrier_arrive_remote(at_peer(barrier_at(barrier)));
}

// Where K of an item lies.
template <class Config>
__device__ __forceinline__ uint32_t k_address(uint32_t shared,
                                              const volatile BwdWorkTile<Config>& work_tile) {
  return shared + PipelineState<Config::kKStages>{work_tile.kv_index}.slot() * Config::kKBytes;
}

// Of an item with tiles of queries: one more has no use for K.
template <class Config>
__device__ __forceinline__ void release_k(BwdSharedStorage<Config>& storage,
                                          const volatile BwdWorkTile<Config>& work_tile) {
  const PipelineState<Config::kKStages> keys{work_tile.kv_index};
  ptx::mbarrier_arrive(barrier_at(storage.k_empty[keys.slot()]));
}

// Named barriers; 0 is that of the block.
constexpr int kWarpgroupBarrier = 1;  // + consumer: its four warps
constexpr int kDqBarrier = 3;         // the four warps that compute dQ

using WorkTileState = PipelineState<kWorkTileStages>;

// Calls work(item, empty) for all items, as the planner shows them; who has read one arrives at
// `empty`.
template <class Config, class Work>
__device__ __forceinline__ void for_each_work_tile(BwdSharedStorage<Config>& storage, Work work) {
  for (WorkTileState work_tiles;; work_tiles.advance()) {
    ptx::mbarrier_wait(barrier_at(storage.work_tile_full[work_tiles.slot()]), work_tiles.phase());
    const volatile BwdWorkTile<Config>& work_tile = storage.work_tiles[work_tiles.slot()];
    if (work_tile.end) break;
    work(work_tile, barrier_at(storage.work_tile_empty[work_tiles.slot()]));
  }
}

// A head of the group and a tile of queries, where heads are told apart.
constexpr int32_t kCoordHead = kMaxRuntimeTiles, kCoordTileMask = kCoordHead - 1;

// Whether the block mask leaves something of the tile of queries.
template <class Config>
__device__ __forceinline__ bool is_visible(const volatile BwdWorkTile<Config>& work_tile,
                                           const BackwardParams& params, int32_t head,
                                           int32_t tile) {
  if (!Config::kIsRuntime || !(params.common.problem.mask & FLASHATTN_MASK_BLOCKS)) return true;
  const int32_t bit =
      head * (work_tile.q_tiles.end - work_tile.q_tiles.begin) + tile - work_tile.q_tiles.begin;
  return work_tile.visible_tiles[bit / 32] >> bit % 32 & 1;
}

// The tile of queries after `tile`, round.
template <class Config>
__device__ __forceinline__ int32_t next_q_tile(const volatile BwdWorkTile<Config>& work_tile,
                                               int32_t tile) {
  return tile == work_tile.q_tiles.end - 1 ? work_tile.q_tiles.begin : tile + 1;
}

// Calls step(heads left, tile, place) for all tiles of queries of an item, in the order of all
// roles; place: the tile in dq and the like. For those of which the block mask leaves nothing
// skip(place).
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
