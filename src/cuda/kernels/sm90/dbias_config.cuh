// Configuration of the Hopper kernel for the gradient of a dense bias: shared memory, barriers, and
// the work items that its producer and consumers follow.
#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/params.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {

constexpr int kDbiasBoxRows = 64;  // rows of a TMA box of Q and dO, as in the backward kernel

// A CTA has a producer and two consumer warpgroups, with 64 queries each. Operands lie in panels of
// 64 columns, 128 bytes per row.
template <class T_, int kDim_, int kTileKv_>
struct DbiasConfig {
  using T = T_;
  static constexpr int kDim = kDim_, kTileKv = kTileKv_;
  static constexpr int kConsumers = 2, kTileQ = kConsumers * kDbiasBoxRows;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kPanels = kDim / 64;
  // A stage holds a Q tile and a KV tile: Q and K, or dO and V.
  static constexpr int kQBytes = kTileQ * kDim * 2, kStageBytes = kQBytes + kTileKv * kDim * 2;
  static constexpr int kStages = kDim > 64 ? 1 : 2;
  // The bias of a tile, once for all iterations: each thread's elements in its own order, fp32.
  static constexpr int kBiasBytes = kTileQ * kTileKv * 4;
  static constexpr int kStatBytes = kTileQ * 4;  // one number per row

  // Shared memory: Q and K stages | dO and V stages | bias | lse2 stages | base stages | delta
  // stages | DbiasSharedStorage.
  static constexpr int kDo = kStages * kStageBytes, kBias = 2 * kDo;
  static constexpr int kLse = kBias + kBiasBytes, kBase = kLse + kStages * kStatBytes;
  static constexpr int kDelta = kBase + kStages * kStatBytes;
  static constexpr int kMainBytes = kDelta + kStages * kStatBytes;
};

// The producer describes an iteration to the consumers.
struct DbiasStep {
  Lengths len;   // lengths of the sequence
  int32_t full;  // every query of the tile sees every key of the tile
  int32_t end;   // no iteration: the partial is complete
};

// The launch's counters: the CTAs that have started; then for each tile that is split, and each
// warp of its consumers, the partials that have been added.
__device__ __forceinline__ int32_t* dbias_counters(const BackwardParams& params) {
  return params.common.arrived + params.common.arrived_count;
}

// A tile of dbias, and the sequences and heads that are summed into it.
struct DbiasTile {
  int32_t query, key;  // the tile's first
  Interval batches, heads;
};

template <class Config>
struct DbiasSharedStorage {
  Pipeline<Config::kStages> qk, dov;
  DbiasStep steps[Config::kStages];  // by stage of qk
  int32_t cta_idx;
  // One copy per consumer warp, which saves registers for the mainloop.
  DbiasTile tiles[Config::kConsumers * 4];
  StreamK::Partial partials[Config::kConsumers * 4];
};

template <class Config>
constexpr int kDbiasSharedBytes =
    Config::kMainBytes + static_cast<int>(sizeof(DbiasSharedStorage<Config>));

// Decodes a tile index: keys vary fastest, then queries, heads and sequences.
template <class Config>
__device__ __forceinline__ DbiasTile dbias_tile(const BackwardParams& params, int32_t tile) {
  const BackwardArgs& args = params.common.args;
  int32_t rest = tile;
  const auto take = [&rest](int32_t count) {
    const int32_t own = rest % count;
    rest /= count;
    return own;
  };
  const auto take_unless_summed = [&](int64_t stride, int32_t count) {
    if (stride == 0) return Interval{0, count};
    const int32_t own = take(count);
    return Interval{own, own + 1};
  };
  DbiasTile t;
  t.key = take((args.shape.seqlen_kv + Config::kTileKv - 1) / Config::kTileKv) * Config::kTileKv;
  t.query = take((args.shape.seqlen_q + Config::kTileQ - 1) / Config::kTileQ) * Config::kTileQ;
  t.heads = take_unless_summed(args.dbias_stride_head, params.common.problem.heads_q);
  t.batches = take_unless_summed(args.dbias_stride_batch, args.shape.batch);
  return t;
}

// Returns the sequence and head that iteration n of a partial adds. In a split tile they are
// numbered in the order in which its CTAs, which start together, reach them, so that CTAs of
// different tiles load the same sequence and head at about the same time, from L2.
__device__ __forceinline__ int32_t summand(const StreamK& stream_k, const StreamK::Partial& partial,
                                           int32_t n) {
  if (partial.count == 1) return n;
  const FastDivmod& item = stream_k.item_iterations;
  const int32_t first = partial.split_tile * stream_k.tile_iterations.divisor, own = first + n;
  // items: work items before this one. time: iterations before this one in its work item.
  const int32_t items = item.quotient(own), time = own - items * item.divisor;
  // Counts those of the first x iterations of all tiles that precede `time` in their work items.
  const auto earlier = [&](int32_t x) {
    const int32_t whole = item.quotient(x);
    return whole * time + min(x - whole * item.divisor, time);
  };
  const int32_t before = item.quotient(first);  // whole work items before this tile
  const int32_t past = first - before * item.divisor > time;
  return earlier(first + stream_k.tile_iterations.divisor) - earlier(first) + items - before - past;
}

// Calls work(tile, partial) for each run of iterations that the CTA computes: first for whole
// tiles, then for its share of the tiles that are split.
template <class Config, class Work>
__device__ __forceinline__ void for_each_partial(const BackwardParams& params, int32_t cta_idx,
                                                 Work work) {
  const StreamK& stream_k = params.stream_k;
  bool second = false;
#pragma unroll 1
  for (int32_t item = cta_idx; item < stream_k.work_items;) {
    // Recomputed, not kept in registers, for each partial.
    const bool splits = stream_k.splits(no_hoist(item));
    {
      StreamK::Partial partial{};
      partial.tile = item;
      partial.count = 1;
      if (splits) partial = stream_k.partial(item, second);
      const DbiasTile tile = dbias_tile<Config>(params, partial.tile);
      if (!splits) {
        partial.end = (tile.batches.end - tile.batches.begin) * (tile.heads.end - tile.heads.begin);
      }
      work(tile, partial);
    }
    second = stream_k.splits(item) && !second && stream_k.partial(no_hoist(item), false).more;
    if (!second) item += static_cast<int32_t>(gridDim.x);
  }
}

}  // namespace flashattn::cuda::sm90
