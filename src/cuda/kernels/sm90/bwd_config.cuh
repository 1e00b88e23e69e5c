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
struct BackwardTiles {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the products; smaller heads: zeros
  static constexpr int kTileQ = kTileQ_, kTileKv = kTileKv_;
  static constexpr ScoreModKind kScoreMod = kScores_;
  static constexpr bool kAny = kScoreMod == ScoreModKind::kRuntime,
                        kDropped = kScoreMod == ScoreModKind::kDropout;
  static constexpr bool kModified = kScoreMod == ScoreModKind::kSoftcapAlibi || kAny;
  static constexpr bool kDerived = kModified || kDropped;  // dS is of other weights than dV
  static constexpr bool kHeads = kAny || kDropped;         // places tell heads of a group apart
  static constexpr int kConsumers = 2;                     // warpgroups that hold dK and dV
  static constexpr int kPanelsQk = kDimQk / 64, kPanelsV = kDimV / 64;
  static constexpr int kKeyBytes = kTileKv * kDimQk * 2;
  static constexpr int kQueryBytes = kTileQ * kDimQk * 2, kDoBytes = kTileQ * kDimV * 2;
  static constexpr int kDsStages = 2;
  static constexpr int kNumberBytes = kTileQ * 4;  // lse or D of a tile
};

// Two warpgroups hold dK and dV of 64 keys each. kShares: of dQ.
template <class T, int kDim_, int kTileQ, ScoreModKind kScoreMod, int kStages_, int kKeyStages_,
          int kShares_>
struct BackwardSmallTiles : BackwardTiles<T, kDim_, kDim_, kTileQ, 128, kScoreMod> {
  using Tiles = BackwardTiles<T, kDim_, kDim_, kTileQ, 128, kScoreMod>;
  using Tiles::kTileKv, Tiles::kKeyBytes, Tiles::kQueryBytes, Tiles::kDsStages, Tiles::kNumberBytes;
  static constexpr int kDim = kDim_, kPanels = kDim / 64;
  static constexpr bool kWide = false, kPair = false;
  static constexpr int kItemKv = kTileKv;
  static constexpr bool kStreamK = true;  // tiles of keys, for several blocks
  static constexpr int kSums = kDim;      // of dK and dV, that a thread of them holds
  static constexpr int kStages = kStages_, kQStages = kStages, kDoStages = kStages;
  static constexpr int kKeyStages = kKeyStages_;  // of K: the next while dQ still needs the last
  static constexpr int kDsWarps = 8, kDoReaders = 8;  // arrivals
  static constexpr int kOtherPanels = 0;
  static constexpr int kScoreBytes = kTileQ * kTileKv * 2;
  static constexpr int kSumBytes = kTileQ * kDim * 4;
  static constexpr int kShares = kShares_, kOwnShares = kShares;
  static constexpr int kDqSlots = kShares, kDqBytes = kSumBytes / kShares;  // a slot
  static constexpr int kDqPieces = kShares;  // of a tile of dQ: each fills a slot

  // Stages of K | V | stages of Q | of dO | of dS | dQ | stages of lse | of D | BackwardControl.
  static constexpr int kV = kKeyStages * kKeyBytes, kQ = kV + kKeyBytes;
  static constexpr int kDo = kQ + kStages * kQueryBytes;
  static constexpr int kDs = kDo + kStages * kQueryBytes, kDq = kDs + kDsStages * kScoreBytes;
  static constexpr int kLse = kDq + kSumBytes, kDelta = kLse + kStages * kNumberBytes;
  static constexpr int kMainBytes = kDelta + kStages * kNumberBytes;
};

// A third warpgroup computes dQ.
template <class T, int kDim, int kTileQ, ScoreModKind kScoreMod>
struct BackwardConfig
    : BackwardSmallTiles<T, kDim, kTileQ, kScoreMod, kDim * kTileQ == 64 * 64 ? 4 : 2, 2,
                         kTileQ * kDim / (64 * 64)> {
  static constexpr int kPartQ = 64;  // of the products
  static constexpr bool kLong = false;
  static constexpr bool kConverts = true;     // dQ: the warpgroup that computes it has time
  static constexpr bool kStartsEarly = true;  // before all is prepared
  static constexpr bool kFreesV = true;       // behind the last dP of an item: the next may come
  // A consumer skips tiles of queries that see none of its keys: under masks 1 to 3 %. D64 loses
  // 3 %.
  static constexpr bool kSkips = kDim == 128 && kScoreMod != ScoreModKind::kRuntime;
  static constexpr int kSharesAtOnce = 1;
  static constexpr int kThreads = 128 * 4;
  // A multiprocessor has 512 for the four.
  static constexpr int kProducerRegisters = 32, kDqRegisters = 64;
  static constexpr int kConsumerRegisters = 208;
  // Registers hold S of the next tile while dK of this one is under way.
  static constexpr bool kAhead = kDim == 64;
  // Registers do not hold dP and two kinds of weights: one waits where dS will lie.
  static constexpr bool kParked = kDim == 128 && kScoreMod != ScoreModKind::kPlain;

  static_assert(kTileQ == 64 || kDim == 64, "dQ: shares of 64 x 64, by columns or by queries");
};

// For large heads, whose dK and dV of 64 keys fill two warpgroups: one consumer computes the
// weights and holds dV, the other the gradients and holds dK; a third warpgroup computes dQ.
//
// kPair: two blocks, a cluster, work on 128 keys, each on 64 of them as above. They exchange dS, so
// that each computes dQ of half of the columns over all 128 keys: half as much is added to memory.
// Each loads half of the columns of Q and dO for both.
template <class T, int kDimQk, int kDimV, ScoreModKind kScoreMod>
struct BwdLargeHeadConfig : BackwardTiles<T, kDimQk, kDimV, 64, 64, kScoreMod> {
  using Tiles = BackwardTiles<T, kDimQk, kDimV, 64, 64, kScoreMod>;
  using Tiles::kKeyBytes, Tiles::kQueryBytes, Tiles::kDoBytes, Tiles::kDsStages,
      Tiles::kNumberBytes;
  using Tiles::kTileQ, Tiles::kTileKv, Tiles::kModified, Tiles::kAny, Tiles::kPanelsQk;
  static constexpr int kPartQ = kTileQ;
  static constexpr bool kWide = true, kPair = kDimQk > 192, kLong = false;
  static constexpr bool kConverts = false, kFreesV = false, kSkips = false;
  static constexpr bool kStartsEarly = false;       // 0 gained
  static constexpr int kItemKv = kPair ? 128 : 64;  // keys of an item
  // The weights, on their way from one consumer to the other, wait where dS will lie: there is no
  // other room.
  static constexpr bool kParked = kPair;
  static constexpr int kThreads = 128 * 4;
  static constexpr bool kStreamK = !kPair;  // the planner has no registers for it
  static constexpr int kSums = (kDimQk > kDimV ? kDimQk : kDimV) / 2;
  // Shares of dQ, 64 columns each, whose sums registers hold at once: dS is read once for all.
  static constexpr int kSharesAtOnce = kPair && !kAny ? 2 : 1;
  static constexpr int kProducerRegisters = kSharesAtOnce > 1 ? 24 : 32;
  static constexpr int kDqRegisters = kSharesAtOnce > 1 ? 96 : 64;
  static constexpr int kFirstRegisters = kSharesAtOnce > 1 ? 200 : 216;  // the first: also scores
  static constexpr int kConsumerRegisters = kSharesAtOnce > 1 ? 192 : 200;

  static constexpr int kQStages = 2, kDoStages = kDimV > 192 ? 1 : 2;
  static constexpr int kPStages = kParked ? 0 : 2;
  static constexpr int kDsWarps = 4, kDoReaders = 5;
  static constexpr int kKeyStages = 1;
  // Of the partner's K, the columns of which this block computes dQ.
  static constexpr int kOtherPanels = kPair ? kPanelsQk / 2 : 0;
  static constexpr int kOtherBytes = kOtherPanels * kTileKv * 128;
  static constexpr int kOwnBytes = kTileQ * kTileKv * 2;    // dS of the block's keys
  static constexpr int kScoreBytes = kTileQ * kItemKv * 2;  // that, then the partner's
  static constexpr int kShares = kPanelsQk, kOwnShares = kShares * kTileKv / kItemKv;  // of dQ
  static constexpr int kDqSlots = kShares == 4 ? 2 : kShares;
  static constexpr int kDqBytes = 64 * 64 * (kPair ? 2 : 4);  // a slot: a share, or half of one
  static constexpr int kDqPieces = kOwnShares * (64 * 64 * 4) / kDqBytes;

  // K | V | stages of Q | of dO | of dS | of P | dQ | the partner's K | stages of lse | of D |
  // BackwardControl.
  static constexpr int kV = kKeyBytes, kQ = kV + kTileKv * kDimV * 2;
  static constexpr int kDo = kQ + kQStages * kQueryBytes, kDs = kDo + kDoStages * kDoBytes;
  static constexpr int kP = kDs + kDsStages * kScoreBytes;
  static constexpr int kDq = kP + kPStages * kOwnBytes, kOther = kDq + kDqSlots * kDqBytes;
  static constexpr int kLse = kOther + kOtherBytes, kDelta = kLse + kQStages * kNumberBytes;
  static constexpr int kMainBytes = kDelta + kDoStages * kNumberBytes;
};

// For many queries: with no warpgroup for dQ the consumers have the registers for tiles of 80.
template <class T, int kDim, ScoreModKind kScoreMod>
struct BwdTwoWarpgroupConfig : BackwardSmallTiles<T, kDim, 80, kScoreMod, 2, 1, 2> {
  static constexpr int kPartQ = 80;
  static constexpr bool kLong = true, kConverts = false;
  static constexpr bool kFreesV = false, kStartsEarly = false, kParked = false, kSkips = false;
  static constexpr int kThreads = 128 * 3;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static_assert(kDim == 128, "a consumer has 64 columns of dQ");
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * (65536 / kThreads / 8 * 8),
                "who claims more registers than the block has waits for ever");
};

// Blocks that share an item and the columns of dQ.
template <class Config>
constexpr int kBlocks = Config::kItemKv / Config::kTileKv;

// Of the sums of a block's consumers: four numbers of each thread stand together.
template <class Config>
constexpr int kPartialQuads = Config::kStreamK ? Config::kConsumers * 128 * Config::kSums / 4 : 0;

// Some of the keys of an item: tiles of queries in which every query sees all of them; and those in
// which some query sees one.
struct KeyGroup {
  Interval full;
};
struct SkippingKeyGroup : KeyGroup {
  Interval some;
};

// A consumer's, where it skips tiles of queries that see none of its keys; else all.
template <class Config>
constexpr int kKeyGroups = Config::kSkips ? Config::kConsumers : 1;

// A tile of keys of a KV head: all tiles of queries of its group that see some of it. The blocks of
// a pair have the same items, but for the keys.
template <class Config>
struct BackwardItem {
  int32_t end;  // not 0: there are no more
  int32_t b, kv_head;
  int32_t key, keys;  // the block's first; how many, up to the tile, perhaps none
  int32_t offset_q, offset_kv;
  Lengths len;
  Interval tiles;  // of queries
  std::conditional_t<Config::kSkips, SkippingKeyGroup, KeyGroup> groups[kKeyGroups<Config>];
  int32_t start;          // the tile that comes first; after the last comes tiles.begin
  uint32_t before, done;  // tiles of queries, heads and all, since the block began: to its end
  uint32_t number;        // of items before it that had some
  int32_t far;            // whether there are rows with a base of their own: no tile is then full
  int32_t first_tile;     // of the sequence, in dq and the like, for the group's first head
  // Of a tile of keys that several blocks share: see StreamK::Partial. pieces is 1: of one block.
  int32_t split_tile, partial, first_partial, partials;
  Interval partial_tiles;
  // With a block mask, bit (head of the group) * tiles + tile: whether a query of the tile sees a
  // key. Tiles count from tiles.begin.
  uint32_t seen[Config::kAny ? kMostBlockTiles / 32 : 1];
};

// A tile of dQ that this block is to convert when all have added to it.
struct DqSums {
  int32_t* state;          // of dq_states
  const float4* from;      // its sums; NULL: no key was seen
  char* to;                // its first row of args.dq
  int32_t heads;           // b * heads_q + h + 1
  int32_t rows;            // of the sequence from there on; below 0: no more tiles
  uint32_t taken, handed;  // whether one stands here; how many have been left to those who convert
  uint32_t converted[4];   // by each warp
};

constexpr int kBackwardItems = 2;
constexpr uint32_t kDqLater = 4;  // tiles that an adder has begun to add when it says so of all

// Pairs. The partner's dS; in the second block the numbers of items, which the first takes.
template <class Config>
struct PairControl {
  uint64_t received[Config::kDsStages], number_full[kBackwardItems];
  uint32_t numbers[kBackwardItems];
};

// What converting dQ takes. To those who do, and back.
struct ConvertControl {
  uint64_t full, empty;
  DqSums sums;
  int32_t later[2][kDqLater];  // of each adder: where it has begun to add
};

template <class Config>
struct BackwardControl {
  uint64_t k_empty[Config::kKeyStages], v_empty, nearly;
  uint64_t q_full[Config::kQStages], q_empty[Config::kQStages];
  uint64_t do_full[Config::kDoStages], do_empty[Config::kDoStages];
  // Wide heads: from one consumer to the other.
  uint64_t p_full[Config::kWide ? 2 : 1], p_empty[Config::kWide ? 2 : 1];
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  uint64_t dq_full[2][Config::kDqSlots];  // for each of the adders: tiles in turn
  uint64_t dq_empty[Config::kDqSlots];
  uint64_t item_full[kBackwardItems], item_empty[kBackwardItems];
  BackwardItem<Config> items[kBackwardItems];
  BackwardItem<Config> own[Config::kConsumers];  // what a consumer works on
  uint32_t taken[Config::kConsumers];            // items, by each consumer
  int32_t arrived[Config::kConsumers];           // pieces that were there before its own
  int32_t prepared;                              // heads, as far as the planner has seen
  Interval visible[Config::kTileKv];             // queries, by key of the tile at work
  // ALiBi's of the head, in units of log2(e), or 0; they come with Q.
  float slopes[Config::kModified ? Config::kQStages : 1];
  std::conditional_t<Config::kPair, PairControl<Config>, uint32_t> pair;
  std::conditional_t<Config::kConverts, ConvertControl, uint32_t> convert;
};

template <class Config>
constexpr int kBackwardSharedBytes =
    Config::kMainBytes + static_cast<int>(sizeof(BackwardControl<Config>));
constexpr int kMostSharedBytes = 227 * 1024;

__device__ __forceinline__ uint32_t barrier_at(uint64_t& barrier) {
  return ptx::shared_address(&barrier);
}

// This block among those that share an item.
template <class Config>
__device__ __forceinline__ uint32_t block_rank() {
  return Config::kPair ? ptx::cluster_rank() : 0;
}

// Where something of this block lies in the partner.
__device__ __forceinline__ uint32_t at_partner(uint32_t address) {
  return ptx::at_rank(address, ptx::cluster_rank() ^ 1);
}

template <class Config>
__device__ __forceinline__ void init_barriers(BackwardControl<Config>& control) {
  constexpr int kConsumers = Config::kConsumers;
  const auto init = [](uint64_t& barrier, int count) {
    ptx::mbarrier_init(barrier_at(barrier), count);
  };
  // Who reads K or the item: the consumers, and a warpgroup for dQ if there is one.
  constexpr int kReaders = kConsumers + !Config::kLong;
  for (uint64_t& barrier : control.k_empty) init(barrier, kReaders);
  init(control.v_empty, kConsumers);
  init(control.nearly, 1);
  for (int n = 0; n < Config::kQStages; ++n) {
    init(control.q_full[n], 1);
    init(control.q_empty[n], kBlocks<Config> * kConsumers);
  }
  for (int n = 0; n < Config::kDoStages; ++n) {
    init(control.do_full[n], 1);
    init(control.do_empty[n], kBlocks<Config> * Config::kDoReaders);
  }
  if constexpr (Config::kWide) {
    for (int n = 0; n < 2; ++n) {
      init(control.p_full[n], 4);  // warps
      init(control.p_empty[n], 4);
    }
  }
  for (int n = 0; n < Config::kDsStages; ++n) {
    init(control.ds_full[n], Config::kDsWarps);
    init(control.ds_empty[n], Config::kLong ? kConsumers : kBlocks<Config>);
  }
  for (int n = 0; n < Config::kDqSlots; ++n) {
    init(control.dq_full[0][n], 4);  // warps
    init(control.dq_full[1][n], 4);
    init(control.dq_empty[n], 1);
  }
  for (int n = 0; n < kBackwardItems; ++n) {
    init(control.item_full[n], 1);
    // Also the loader and the adders; the partner, when it has read the number.
    init(control.item_empty[n], kReaders + 3 + (Config::kPair && block_rank<Config>() == 0));
  }
  if constexpr (Config::kPair) {
    for (uint64_t& barrier : control.pair.received) init(barrier, 1);
    for (uint64_t& barrier : control.pair.number_full) init(barrier, 1);
  }
  if constexpr (Config::kConverts) {
    init(control.convert.full, 1);
    init(control.convert.empty, 4);  // warps
  }
  ptx::fence_mbarrier_init();
  for (int n = 0; n < kConsumers; ++n) control.taken[n] = 0;
  control.prepared = 0;
  if constexpr (Config::kConverts) {
    DqSums& sums = control.convert.sums;
    sums.taken = sums.handed = 0;
    for (uint32_t& times : sums.converted) times = 0;
  }
  for (BackwardItem<Config>& item : control.items) item.before = item.done = item.number = 0;
}

// Something of this block has been read; of a pair, both want to know.
template <class Config>
__device__ __forceinline__ void arrive_at_all(uint64_t& barrier) {
  ptx::mbarrier_arrive(barrier_at(barrier));
  if constexpr (Config::kPair) ptx::mbarrier_arrive_remote(at_partner(barrier_at(barrier)));
}

// Where K of an item lies.
template <class Config>
__device__ __forceinline__ uint32_t keys_at(uint32_t shared,
                                            const volatile BackwardItem<Config>& item) {
  return shared + PipelineState<Config::kKeyStages>{item.number}.slot() * Config::kKeyBytes;
}

// Of an item with tiles of queries: one more has no use for K.
template <class Config>
__device__ __forceinline__ void free_k(BackwardControl<Config>& control,
                                       const volatile BackwardItem<Config>& item) {
  const PipelineState<Config::kKeyStages> keys{item.number};
  ptx::mbarrier_arrive(barrier_at(control.k_empty[keys.slot()]));
}

// Named barriers; 0 is that of the block.
constexpr int kWarpgroupBarrier = 1;  // + consumer: its four warps
constexpr int kDqBarrier = 3;         // the four warps that compute dQ

using Items = PipelineState<kBackwardItems>;

// Calls work(item, empty) for all items, as the planner shows them; who has read one arrives at
// `empty`.
template <class Config, class Work>
__device__ __forceinline__ void for_each_item(BackwardControl<Config>& control, Work work) {
  for (Items items;; items.advance()) {
    ptx::mbarrier_wait(barrier_at(control.item_full[items.slot()]), items.phase());
    const volatile BackwardItem<Config>& item = control.items[items.slot()];
    if (item.end) break;
    work(item, barrier_at(control.item_empty[items.slot()]));
  }
}

// A head of the group and a tile of queries, where heads are told apart.
constexpr int32_t kPlaceHead = kMostAnyTiles, kPlaceTile = kPlaceHead - 1;

// Whether the block mask leaves something of the tile of queries.
template <class Config>
__device__ __forceinline__ bool is_seen(const volatile BackwardItem<Config>& item,
                                        const BackwardParams& params, int32_t head, int32_t tile) {
  if (!Config::kAny || !(params.common.problem.mask & FLASHATTN_MASK_BLOCKS)) return true;
  const int32_t bit = head * (item.tiles.end - item.tiles.begin) + tile - item.tiles.begin;
  return item.seen[bit / 32] >> bit % 32 & 1;
}

// The tile of queries after `tile`, round.
template <class Config>
__device__ __forceinline__ int32_t tile_after(const volatile BackwardItem<Config>& item,
                                              int32_t tile) {
  return tile == item.tiles.end - 1 ? item.tiles.begin : tile + 1;
}

// Calls step(heads left, tile, place) for all tiles of queries of an item, in the order of all
// roles; place: the tile in dq and the like. For those of which the block mask leaves nothing
// skip(place).
template <class Config, class Step, class Skip>
__device__ __forceinline__ void for_each_tile(const volatile BackwardItem<Config>& item,
                                              const BackwardParams& params, Step step, Skip skip) {
  int32_t place = item.first_tile;
#pragma unroll 1
  for (int32_t heads = params.common.q_heads_per_kv_head; heads > 0; --heads) {
    int32_t tile = item.start;
#pragma unroll 1
    for (int32_t left = item.tiles.end - item.tiles.begin; left > 0; --left) {
      if (is_seen<Config>(item, params, params.common.q_heads_per_kv_head - heads, tile)) {
        step(heads, tile, place + tile);
      } else {
        skip(place + tile);
      }
      tile = tile_after(item, tile);
    }
    place += params.head_tiles;
  }
}

}  // namespace flashattn::cuda::sm90
