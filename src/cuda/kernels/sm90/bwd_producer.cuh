// Producer warps of the Hopper backward pass, one thread each: the tile scheduler, which also looks
// for dQ tiles to convert, and the producer of all loads. The threads that add dQ: dq_reduce.cuh.
#pragma once

#include "cuda/kernels/sm90/bwd_block_mask.cuh"
#include "cuda/kernels/sm90/dq_inline_postprocess.cuh"

namespace flashattn::cuda::sm90 {

// n: twice the index of a StreamK work item, plus 1 for its second partial.
template <class Config>
__device__ __forceinline__ bool is_split(const BackwardParams& params, int32_t n) {
  return Config::kStreamK && params.stream_k.splits(n / 2);
}
__device__ __forceinline__ StreamK::Partial partial_of(const BackwardParams& params, int32_t n) {
  return params.stream_k.partial(n / 2, n & 1);
}

// Fills the work tile that follows `previous`. Returns false if the KV tile has no key. Registers
// are scarce: what can be read back from the work tiles is.
template <class Config>
__device__ __forceinline__ bool plan_work_tile(const BackwardParams& params, int32_t n,
                                               const volatile BwdWorkTile<Config>& previous,
                                               volatile BwdWorkTile<Config>& work_tile) {
  const cuda::BackwardParams& common = params.common;
  const Problem& problem = common.problem;
  constexpr int32_t kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  constexpr int32_t kClusterTileKv = Config::kClusterTileKv;
  {
    int32_t linear_idx = n / 2;
    work_tile.partials = 1;
    if (is_split<Config>(params, n)) {
      const StreamK::Partial partial = partial_of(params, n);
      linear_idx = partial.tile;
      work_tile.split_tile = partial.split_tile;
      work_tile.partial = partial.index;
      work_tile.first_partial = partial.first;
      work_tile.partials = partial.count;
      work_tile.partial_tiles.begin = partial.begin;
      work_tile.partial_tiles.end = partial.end;
    }
    const L2Swizzle::Tile position = params.swizzle.tile(linear_idx);
    const int32_t b = position.head_idx / problem.heads_kv;
    work_tile.b = b;
    work_tile.kv_head = position.head_idx - b * problem.heads_kv;
    work_tile.key = params.first_key + position.tile_idx * params.key_step;
  }
  {
    const SeqlenInfo sequence =
        seqlen_info(problem, common.args.shape, common.args.inputs, work_tile.b);
    work_tile.len.q = sequence.len.q;
    work_tile.len.kv = sequence.len.kv;
    work_tile.offset_q = static_cast<int32_t>(sequence.offset_q);
    work_tile.offset_kv = static_cast<int32_t>(sequence.offset_kv);
  }
  if (work_tile.key >= work_tile.len.kv) return false;
  work_tile.end = 0;
  work_tile.keys = min(kClusterTileKv, work_tile.len.kv - work_tile.key);
  {
    const int32_t before = (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q)
                               ? work_tile.offset_q / kTileQ + work_tile.b
                               : work_tile.b * params.max_q_tiles;
    work_tile.workspace_tile =
        work_tile.kv_head * params.common.q_heads_per_kv_head * params.head_q_tiles + before;
  }
  constexpr int32_t kSpans = kQTileSpans<Config>, kSpanKv = kClusterTileKv / kSpans;
#pragma unroll 1
  for (int32_t span = 0; span < kSpans; ++span) {
    auto& q_span = work_tile.q_spans[span];
    const int32_t keys = min(kSpanKv, work_tile.keys - span * kSpanKv);
    q_span.full.end = 0;
    if constexpr (Config::kSkipMaskedTiles) q_span.any.end = 0;
    if (keys <= 0) continue;
    const int32_t key = work_tile.key + span * kSpanKv;
    {
      const Interval first =
          visible_queries(problem.mask_rule(), key, {work_tile.len.q, work_tile.len.kv});
      if (span == 0) work_tile.q_tiles.begin = first.begin;
      if constexpr (Config::kSkipMaskedTiles) q_span.any.begin = first.begin / kTileQ;
      q_span.full.end = first.end / kTileQ;
    }
    {
      const Interval last =
          visible_queries(problem.mask_rule(), key + keys - 1, {work_tile.len.q, work_tile.len.kv});
      work_tile.q_tiles.end = last.end;
      if constexpr (Config::kSkipMaskedTiles) q_span.any.end = (last.end + kTileQ - 1) / kTileQ;
      q_span.full.begin = (last.begin + kTileQ - 1) / kTileQ;
    }
  }
  {
    // An empty range stays empty when rounded to tiles: a KV tile that no query sees must not add
    // to dQ, as in order its turn would never come.
    const int32_t begin = work_tile.q_tiles.begin,
                  end = work_tile.q_tiles.end > begin ? work_tile.q_tiles.end : 0;
    work_tile.q_tiles.begin = begin / kTileQ;
    work_tile.q_tiles.end = (end + kTileQ - 1) / kTileQ;
  }
  if (Config::kStreamK && work_tile.partials > 1) {
    work_tile.q_tiles.begin = max(work_tile.partial_tiles.begin, work_tile.q_tiles.begin);
    work_tile.q_tiles.end = min(work_tile.partial_tiles.end, work_tile.q_tiles.end);
  }
  if constexpr (Config::kTwoCta) {  // from here on this CTA's keys
    work_tile.key = work_tile.key + cta_rank<Config>() * kTileKv;
    work_tile.keys = max(min(kTileKv, work_tile.len.kv - work_tile.key), 0);
  }
#pragma unroll
  for (int32_t span = 0; span < kSpans; ++span) {
    if (work_tile.keys < (span + 1) * kTileKv / kSpans) work_tile.q_spans[span].full.end = 0;
  }
  const int32_t count = max(work_tile.q_tiles.end - work_tile.q_tiles.begin, 0);
  work_tile.first_q_tile = work_tile.q_tiles.begin;
  // If all CTAs would start with the same Q tile, each starts with another, so that not all add to
  // one dQ tile: 1 to 2 % faster. Kernels without clusters lose 1 %.
  if (Config::kTwoCta && problem.mask == 0 && !common.ordered && count > 0) {
    work_tile.first_q_tile = work_tile.first_q_tile + work_tile.key / kClusterTileKv % count;
  }
  work_tile.iter_begin = previous.iter_end;
  work_tile.iter_end = previous.iter_end + count * params.common.q_heads_per_kv_head;
  work_tile.kv_index = previous.kv_index + (previous.iter_end != previous.iter_begin);
  return true;
}

// Publishes work tile n (see is_split()), or the end of work, in a free stage. Returns false, and
// publishes nothing, if the KV tile has no key.
template <class Config, class Broadcast>
__device__ __forceinline__ bool publish_work_tile(const BackwardParams& params,
                                                  BwdSharedStorage<Config>& storage,
                                                  WorkTileState at, int32_t n, bool leader,
                                                  Broadcast broadcast) {
  volatile BwdWorkTile<Config>& work_tile = storage.work_tiles[at.stage()];
  const bool end = n / 2 >= params.stream_k.work_items;
  bool valid = end;
  if (leader) {
    if (end) {
      work_tile.end = 1;
    } else {
      valid = plan_work_tile<Config>(params, n, storage.work_tiles[at.stage() ^ 1], work_tile);
    }
  }
  valid = broadcast(valid);
  if (!valid) return false;
  if (leader && !end) {
    const int32_t heads = (work_tile.b * params.common.problem.heads_kv + work_tile.kv_head + 1) *
                          params.common.q_heads_per_kv_head;
    wait_preprocessed(params, storage, heads);
    if (static_cast<const volatile int32_t&>(storage.has_large_lse)) {
#pragma unroll
      for (auto& span : work_tile.q_spans) span.full.end = kHasLargeLse;
    }
  }
  if constexpr (Config::kHasBlockMask) {
    const bool has_block_mask = params.common.problem.mask & FLASHATTN_MASK_BLOCKS;
    if (has_block_mask && !end) find_visible_tiles<Config>(params, work_tile);
  }
  if (leader) storage.work.producer_commit(at);
  return true;
}

// Scheduler of CTA 1 of a cluster: publishes the work tiles that CTA 0 takes.
template <class Config, class Broadcast>
__device__ __forceinline__ void follow_leader_cta(const BackwardParams& params,
                                                  BwdSharedStorage<Config>& storage, bool leader,
                                                  Broadcast broadcast) {
  for (WorkTileState work_tiles;; work_tiles.advance()) {
    Barrier& full = storage.two_cta.index_full.at(work_tiles);
    if (leader) full.expect(sizeof(uint32_t));
    full.wait_cluster(work_tiles.phase());
    const int32_t next =
        ptx::load_shared(ptx::shared_address(&storage.two_cta.indices[work_tiles.stage()]));
    storage.work.producer_acquire(work_tiles);
    publish_work_tile<Config>(params, storage, work_tiles, next, leader, broadcast);
    if (leader) storage.work.consumer_release_peer(work_tiles);  // the index has been read
    if (next / 2 >= params.stream_k.work_items) return;
  }
}

// The dynamic tile scheduler, run by one thread, or by a whole warp in kernels with block masks.
// wait(barrier, parity) waits, and may do other work meanwhile.
template <class Config, class Wait>
__device__ __forceinline__ void schedule_work_tiles(const BackwardParams& params,
                                                    BwdSharedStorage<Config>& storage, Wait wait) {
  const bool leader = !Config::kHasBlockMask || threadIdx.x % 32 == 0;
  const auto broadcast = [&](int32_t x) {
    return Config::kHasBlockMask ? __shfl_sync(~0u, x, 0) : x;
  };
  if constexpr (Config::kTwoCta) {
    if (cta_rank<Config>() != 0) return follow_leader_cta(params, storage, leader, broadcast);
  }
  WorkTileState work_tiles;
  int32_t next = blockIdx.x / kClusterSize<Config> * 2;
  if (params.static_work_items == 0 && leader) next = atomicAdd(params.common.work_counter, 1) * 2;
  next = broadcast(next);
  for (;;) {
    if (publish_work_tile<Config>(params, storage, work_tiles, next, leader, broadcast)) {
      if constexpr (Config::kTwoCta) {
        if (leader) {
          ptx::st_async(
              peer_address(ptx::shared_address(&storage.two_cta.indices[work_tiles.stage()])), next,
              peer_address(storage.two_cta.index_full.at(work_tiles).address()));
        }
      }
      work_tiles.advance();
      if (next / 2 >= params.stream_k.work_items) return;
      // The next work tile is taken as late as possible, which balances the load of CTAs.
      wait(storage.prefetch_next, work_tiles.count & 1 ^ 1);
      wait(storage.work.empty_barrier(work_tiles), work_tiles.phase() ^ 1);
    }
    if (is_split<Config>(params, next) && partial_of(params, next).more) {
      ++next;
    } else {
      if (leader) next = (params.static_work_items + atomicAdd(params.common.work_counter, 1)) * 2;
      next = broadcast(next);
    }
  }
}

// Schedules work tiles and, with kInlinePostprocess, looks for complete dQ tiles.
template <class Config>
__device__ __forceinline__ void scheduler_warp(const BackwardParams& params,
                                               BwdSharedStorage<Config>& storage) {
  const bool leader = !Config::kHasBlockMask || threadIdx.x % 32 == 0;
  if (leader) {
    wait_first_heads(params, storage);
    wait_preprocessed(params, storage, 1);  // earlier kernels may write the lengths, too
  }
  if constexpr (Config::kInlinePostprocess) {
    const DqPostprocessScheduler<Config> dq_scheduler(params, storage);
    const auto all = [](bool x) { return Config::kHasBlockMask ? __all_sync(~0u, x) : x; };
    schedule_work_tiles(params, storage, [&](Barrier& barrier, uint32_t parity) {
      while (!all(barrier.test(parity))) {
        if (leader) dq_scheduler.poll();
        __nanosleep(50);
      }
    });
    if (leader) dq_scheduler.finish();
  } else {
    schedule_work_tiles(params, storage,
                        [](Barrier& barrier, uint32_t parity) { barrier.wait(parity); });
  }
}

// Producer of all loads: Q with lse and dO with delta for each Q tile; K (in a cluster also half of
// the peer's K) and V with the first Q tile of a work tile, at the barriers of its Q and dO.
template <class Config>
class BwdProducer {
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kPeerKPanels = Config::kPeerKPanels;
  static constexpr uint32_t kPrefetchNextTiles = 128 / kTileQ;

 public:
  __device__ __forceinline__ BwdProducer(const BackwardParams& params, uint32_t shared,
                                         BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_work_tile(storage_,
                       [&](const volatile BwdWorkTile<Config>& work_tile, WorkTileState at) {
                         load(work_tile);
                         storage_.work.consumer_release(at);
                       });
  }

 private:
  __device__ __forceinline__ void load(const volatile BwdWorkTile<Config>& work_tile) {
    bool first = true;  // before the first Q tile
    const auto load = [&](int32_t heads, int32_t tile, int32_t workspace_tile) {
      // Two K stages: K is loaded before Q, while the previous work tile is still running.
      constexpr bool kEarly = Config::kKStages > 1;
      {
        const PipelineState<Config::kQStages> at{iter_};
        const uint32_t full = storage_.q.full_barrier(at).address();
        storage_.q.producer_acquire(at);
        if constexpr (Config::kHasScoreMod)
          storage_.alibi_slopes[at.stage()] = slope_of(work_tile, heads);
        expect<Config::kPanelsQk, kPeerKPanels>(storage_.q, at, first);
        if (kEarly && first) load_k(work_tile);
        load_q_tile<Config::kPanelsQk>(params_.q,
                                       shared_ + Config::kQ + at.stage() * Config::kQBytes, full,
                                       work_tile, heads, tile);
        load_row_stats(params_.common.lse2, Config::kLse, at.stage(), full, workspace_tile);
      }
      // Before dO, whose stage is free later than one of dS.
      if constexpr (Config::kBiasInDs) load_bias_to_ds(work_tile, heads, tile);
      {
        const PipelineState<Config::kDoStages> at{iter_};
        const uint32_t full = storage_.dout.full_barrier(at).address();
        storage_.dout.producer_acquire(at);
        expect<Config::kPanelsV>(storage_.dout, at, first);
        load_q_tile<Config::kPanelsV>(params_.dout,
                                      shared_ + Config::kDo + at.stage() * Config::kDoBytes, full,
                                      work_tile, heads, tile);
        load_row_stats(params_.common.delta, Config::kDelta, at.stage(), full, workspace_tile);
        if (!kEarly && first) load_k(work_tile);
        if (first) {
          storage_.v_empty.wait_before({work_tile.kv_index});
          load_kv_tile<Config::kPanelsV>(params_.v, shared_ + Config::kV, full, work_tile,
                                         work_tile.key, 0);
        }
      }
      if constexpr (Config::kHasDenseBias && !Config::kBiasInDs) load_bias(work_tile, heads, tile);
      ++iter_;
      first = false;
      // 128 queries before the end of the work tile, or after its first Q tile, the scheduler may
      // plan the next.
      if (iter_ == max(work_tile.iter_end, work_tile.iter_begin + 1 + kPrefetchNextTiles) -
                       kPrefetchNextTiles) {
        storage_.prefetch_next.arrive();
      }
    };
    for_each_tile<Config>(work_tile, params_, load, [](int32_t) {});
    if (first) storage_.prefetch_next.arrive();
  }

  // Loads the bias of a Q tile, for the keys of each consumer.
  __device__ __forceinline__ void load_bias(const volatile BwdWorkTile<Config>& work_tile,
                                            int32_t heads, int32_t tile) const {
    using Panels = typename BwdWarpgroupBase<Config>::BiasTile;
    const int32_t element = dtype_size(params_.common.problem.dtype_bias);
    const int32_t head = (work_tile.kv_head + 1) * params_.common.q_heads_per_kv_head - heads;
#pragma unroll 1
    for (int32_t consumer = 0; consumer < Config::kConsumers; ++consumer) {
#pragma unroll 1
      for (int32_t p = 0; p < Panels::count(element); ++p) {
        const PipelineState<Config::kBiasStages> at{iter_ * Panels::count(element) + p};
        storage_.bias.producer_acquire(at, consumer);
        storage_.bias.producer_expect(at, kBiasPanelRows * Panels::row_bytes(element), consumer);
        ptx::tma_load(BwdWarpgroupBase<Config>::bias_panel(shared_, at, consumer), &params_.bias,
                      storage_.bias.full_barrier(at, consumer).address(),
                      {work_tile.key + consumer * 64 + p * Panels::columns(element), tile * kTileQ,
                       head, work_tile.b},
                      ptx::kEvictNormal);
      }
    }
  }

  // Loads the bias of a Q tile, for this CTA's keys, into its stage of dS: this CTA's part, and the
  // peer's if it is fp32.
  __device__ __forceinline__ void load_bias_to_ds(const volatile BwdWorkTile<Config>& work_tile,
                                                  int32_t heads, int32_t tile) const {
    using Panels = typename BwdWarpgroupBase<Config>::BiasTile;
    const int32_t element = dtype_size(params_.common.problem.dtype_bias);
    const PipelineState<Config::kDsStages> at{iter_};
    Barrier& full = storage_.bias_full.at(at);
    storage_.ds.producer_acquire(at);
    full.expect(kBiasPanelRows * 64 * element);
#pragma unroll 1
    for (int32_t p = 0; p < Panels::count(element); ++p) {
      ptx::tma_load(
          BwdWarpgroupBase<Config>::ds_bias_panel(shared_, at, p), &params_.bias, full.address(),
          {work_tile.key + p * Panels::columns(element), tile * kTileQ,
           (work_tile.kv_head + 1) * params_.common.q_heads_per_kv_head - heads, work_tile.b},
          ptx::kEvictNormal);
    }
  }

  // ALiBi slope of the head `heads` before the end of its GQA group, in units of log2(e); 0: no
  // ALiBi.
  __device__ __forceinline__ float slope_of(const volatile BwdWorkTile<Config>& work_tile,
                                            int32_t heads) const {
    if (!(params_.common.problem.bias & FLASHATTN_BIAS_ALIBI)) return 0.0f;
    const Inputs& in = params_.common.args.inputs;
    const int32_t head = (work_tile.kv_head + 1) * params_.common.q_heads_per_kv_head - heads;
    return in.alibi_slopes[work_tile.b * in.alibi_stride_batch + head * in.alibi_stride_head] *
           kLog2E;
  }

  // Expects the bytes of a Q tile and its row stats and, with the first Q tile, kPanels panels of K
  // or V and kOthers of the peer's K.
  template <int kPanels, int kOthers = 0, class AnyPipeline>
  __device__ __forceinline__ void expect(AnyPipeline& pipeline, typename AnyPipeline::State at,
                                         bool first) const {
    constexpr uint32_t kBytes = Config::kRowStatBytes + kTileQ * kPanels * 128;
    pipeline.producer_expect(at, first ? kBytes + kTileKv * (kPanels + kOthers) * 128 : kBytes);
  }

  __device__ __forceinline__ void load_k(const volatile BwdWorkTile<Config>& work_tile) const {
    storage_.k_empty.wait_before({work_tile.kv_index});
    const uint32_t full = storage_.q.full_barrier({iter_}).address();
    load_kv_tile<Config::kPanelsQk, true>(params_.k, k_address<Config>(shared_, work_tile), full,
                                          work_tile, work_tile.key, 0);
    if constexpr (Config::kTwoCta) {
      load_kv_tile<kPeerKPanels>(params_.k, shared_ + Config::kPeerK, full, work_tile,
                                 work_tile.key ^ kTileKv, cta_rank<Config>() * (kPeerKPanels * 64));
    }
  }

  template <int kPanels, bool kInSlots = false>
  __device__ __forceinline__ void load_kv_tile(const CUtensorMap& map, uint32_t to, uint32_t full,
                                               const volatile BwdWorkTile<Config>& work_tile,
                                               int32_t key, int32_t column) const {
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    load_panels<kTileKv, kPanels, false, kInSlots>(
        map, to, full,
        {column, work_tile.offset_kv + key, work_tile.kv_head, varlen ? 0 : work_tile.b},
        ptx::kEvictFirst);
  }

  // In a cluster each CTA loads half of the columns for both, by multicast. Both producers wait for
  // the readers in both CTAs.
  template <int kPanels>
  __device__ __forceinline__ void load_q_tile(const CUtensorMap& map, uint32_t to, uint32_t full,
                                              const volatile BwdWorkTile<Config>& work_tile,
                                              int32_t heads, int32_t tile) const {
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    constexpr int kOwn = kPanels / kClusterSize<Config>;
    const int32_t first = cta_rank<Config>() * kOwn;
    load_panels<kTileQ, kOwn, Config::kTwoCta>(
        map, to + first * (kTileQ * 128), full,
        {first * 64, work_tile.offset_q + tile * kTileQ,
         (work_tile.kv_head + 1) * params_.common.q_heads_per_kv_head - heads,
         varlen ? 0 : work_tile.b},
        ptx::kEvictLast);
  }

  __device__ __forceinline__ void load_row_stats(const float* from, uint32_t to, uint32_t stage,
                                                 uint32_t full, int32_t workspace_tile) const {
    ptx::bulk_load(shared_ + to + stage * Config::kRowStatBytes,
                   from + static_cast<int64_t>(workspace_tile) * kTileQ, Config::kRowStatBytes,
                   full);
  }

  // kInSlots: see k_slot().
  template <int kRows, int kPanels, bool kMulticast = false, bool kInSlots = false>
  __device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t to, uint32_t full,
                                              ptx::TmaCoord at, uint64_t policy) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const uint32_t panel = to + (kInSlots ? k_slot<Config>(p) : p) * kRows * 128;
      const ptx::TmaCoord box{at.column + p * 64, at.row, at.head, at.batch};
      if constexpr (kMulticast) {
        ptx::tma_load_multicast(panel, &map, full, box, policy, 3);
      } else {
        ptx::tma_load(panel, &map, full, box, policy);
      }
    }
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
  uint32_t iter_ = 0;  // Q tiles so far
};

}  // namespace flashattn::cuda::sm90
