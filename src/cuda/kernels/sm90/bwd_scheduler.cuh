// Tile scheduler of the Hopper backward pass, one thread or a warp, which also looks for dQ tiles
// to convert.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tile_list.cuh"
#include "cuda/kernels/sm90/dq_inline_postprocess.cuh"

namespace flashattn::cuda::sm90 {

// Whether work tile n is a partial of a split KV tile. n: twice the index of a StreamK work item,
// plus 1 for its second partial.
template <class Config>
__device__ __forceinline__ bool is_split(const BackwardParams& params, int32_t n) {
  return Config::kStreamK && params.stream_k.splits(n / 2);
}
__device__ __forceinline__ StreamK::Partial partial_of(const BackwardParams& params, int32_t n) {
  return params.stream_k.partial(n / 2, n & 1);
}

// Fills the work tile that follows `previous`. Returns false if the KV tile has no key. Registers
// are scarce: values are read back from the work tiles where possible.
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
    // to dQ, as with RUN_TO_RUN its turn would never come.
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
    if (!end) QTileLister<Config>(params, work_tile).run(at.stage());
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

// The dynamic tile scheduler, run by one thread, or by a whole warp if it lists Q tiles.
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

}  // namespace flashattn::cuda::sm90
