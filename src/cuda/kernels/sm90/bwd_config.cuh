// Barriers, pipelines and work tiles of the Hopper backward kernels.
#pragma once

#include <type_traits>

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/device/dense_bias_panel.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/kernels/sm90/bwd_tile_config.cuh"
#include "cuda/kernels/sm90/dq_pipeline.cuh"
#include "cuda/kernels/sm90/params.h"
#include "cuda/device/pipeline.cuh"

namespace flashattn::cuda::sm90 {

// CTAs per cluster. They split the keys of a work tile and the columns of dQ.
template <class Config>
constexpr int kClusterSize = Config::kClusterTileKv / Config::kTileKv;

// Size of a stream-K partial in float4: the dK and dV accumulators of a CTA, four of one thread in
// each float4.
template <class Config>
constexpr int kPartialQuads =
    Config::kStreamK ? Config::kConsumers * 128 * Config::kAccRegs / 4 : 0;

// Value of QTileSpan::full.end if rows may have a BackwardParams::softmax_base: no Q tile is full
// then.
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
      iter_end;            // Q tiles that the CTA has visited, over all heads, before and after it
  uint32_t kv_index;       // work tiles before this one that have Q tiles
  int32_t workspace_tile;  // index of the first head's first Q tile in dq, lse2 and delta
  // Stream-K, see StreamK::Partial. partials == 1: the KV tile is not split.
  int32_t split_tile, partial, first_partial, partials;
  Interval partial_tiles;
  // kHasBlockMask: the Q tiles that are visited, words of QTileEntry. If additions to dQ are
  // ordered, q_tile_list_size words behind each lies its turn: KV tiles still to be added to its dQ
  // then. The list is free to be overwritten once the work tile is.
  uint32_t* q_tile_list;
};

// A dQ tile that this CTA converts once all KV tiles have been added to it.
struct DqPostprocessTile {
  int32_t* state;        // element of dq_states
  const float4* from;    // fp32 accumulator of the tile; NULL: no query saw a key
  char* to;              // first row of the tile in args.dq
  int32_t heads;         // must be preprocessed first: b * heads_q + h + 1
  int32_t rows;          // rows of the sequence from `to` on; below 0: no more tiles
  uint32_t valid, sent;  // whether a tile is held; tiles passed to the warps so far
  uint32_t done[4];      // tiles that each warp has converted
};

constexpr uint32_t kDeferredTiles = 4;  // dQ tiles that a DqReducer publishes at once

// kTwoCta. peer_ds_full: the peer's dS has arrived. index_full: in CTA 1, the index of a work tile
// that CTA 0 has taken has arrived in `indices`.
template <class Config>
struct TwoCtaStorage {
  StageBarriers<Config::kDsStages> peer_ds_full;
  StageBarriers<kWorkTileStages> index_full;
  uint32_t indices[kWorkTileStages];
};

// kBiasInDs. bias_full: the bias has arrived in a stage of dS. peer_ds_free: the peer has read its
// fp32 bias, half of which lay where this CTA's dS will arrive.
template <class Config, bool kBiasInDs = Config::kBiasInDs>
struct DsBiasStorage {};
template <class Config>
struct DsBiasStorage<Config, true> {
  StageBarriers<Config::kDsStages> bias_full, peer_ds_free;
};

// kHasBlockMask: the QTileEntry of each Q stage, written before Q arrives.
template <class Config, bool kHasBlockMask = Config::kHasBlockMask>
struct QTileStorage {};
template <class Config>
struct QTileStorage<Config, true> {
  uint32_t q_tile_entries[Config::kQStages];
};

// Whether half of the scheduler's warp converts dQ tiles, as there is no dQ warpgroup.
template <class Config>
constexpr bool kHalfWarpPostprocess = Config::kInlinePostprocess && Config::kConsumersComputeDq;

constexpr int kHalfWarp = 16;  // threads

// kInlinePostprocess: the scheduler passes dQ tiles to the threads that convert them.
struct DqPostprocessStorage {
  Pipeline<1> pipeline;
  DqPostprocessTile tile;
  int32_t deferred[2][kDeferredTiles];  // by reducer: tiles not yet published
};
// blocks: the blocks of the tile, which pass through shared memory one after another.
struct DqHalfWarpStorage : DqPostprocessStorage {
  Pipeline<1> blocks;
};

template <class Config>
struct BwdSharedStorage : BiasPipeline<Config::kHasDenseBias && !Config::kBiasInDs,
                                       Config::kBiasStages, Config::kConsumers>,
                          DsBiasStorage<Config>,
                          QTileStorage<Config> {
  // K and V arrive at the barriers of the first Q and dO of a work tile.
  StageBarriers<Config::kKStages> k_empty;
  StageBarriers<1> v_empty;
  Barrier prefetch_next;  // the producer has few loads left: plan the next work tile
  Pipeline<Config::kQStages, 1, Config::kTwoCta> q;
  Pipeline<Config::kDoStages, 1, Config::kTwoCta> dout;
  Pipeline<Config::kSplitRoles ? 2 : 1> p;  // kSplitRoles: P, from one consumer to the other
  // Released once all CTAs have computed dQ.
  Pipeline<Config::kDsStages, Config::kSplitsDs ? Config::kConsumers : 1, Config::kTwoCta> ds;
  DqPipeline<Config::kDqStages, Config::kDqWriters> dq;
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
  std::conditional_t<kHalfWarpPostprocess<Config>, DqHalfWarpStorage,
                     std::conditional_t<Config::kInlinePostprocess, DqPostprocessStorage, uint32_t>>
      dq_postprocess;
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
  storage.q.init(1, kClusterSize<Config> * kConsumers * (Config::kSplitsDs ? 4 : 1));
  storage.dout.init(1, kClusterSize<Config> * Config::kDoArrivals);
  if constexpr (Config::kSplitRoles) storage.p.init(4, 4);  // warps
  storage.ds.init(Config::kDsArrivals,
                  Config::kConsumersComputeDq ? kConsumers : kClusterSize<Config>);
  storage.dq.init(4, 1);  // warps; a reducer
  if constexpr (Config::kBiasInDs) {
    storage.bias_full.init(1);
    storage.peer_ds_free.init(4);  // warps of the peer
  } else if constexpr (Config::kHasDenseBias) {
    storage.bias.init(1, 4);  // warps
  }
  // Work tiles are also read by the producer and the two reducers. In CTA 0 the peer arrives, too,
  // once it has read the index.
  storage.work.init(1, kReaders + 3 + (Config::kTwoCta && cta_rank<Config>() == 0));
  if constexpr (Config::kTwoCta) {
    storage.two_cta.peer_ds_full.init(1);
    storage.two_cta.index_full.init(1);
  }
  if constexpr (kHalfWarpPostprocess<Config>) {
    storage.dq_postprocess.pipeline.init(1, kHalfWarp);
    storage.dq_postprocess.blocks.init(1, kHalfWarp);
  } else if constexpr (Config::kInlinePostprocess) {
    storage.dq_postprocess.pipeline.init(1, 4);  // warps
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

// Calls work(work_tile, at) for each work tile that the scheduler publishes. Each reader releases
// the work tile, at state `at`, once it has read it.
template <class Config, class Work>
__device__ __forceinline__ void for_each_work_tile(BwdSharedStorage<Config>& storage, Work work) {
  for (WorkTileState work_tiles;; work_tiles.advance()) {
    storage.work.consumer_wait(work_tiles);
    const volatile BwdWorkTile<Config>& work_tile = storage.work_tiles[work_tiles.stage()];
    if (work_tile.end) break;
    work(work_tile, work_tiles);
  }
}

}  // namespace flashattn::cuda::sm90
