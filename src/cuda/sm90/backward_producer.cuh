// The producers of the Hopper backward pass, a thread each: one plans the tiles of keys, two start
// the loads, one adds dQ to the sums in global memory.
#pragma once

#include "cuda/sm90/backward_config.cuh"

namespace flashattn::cuda::sm90 {

// done: of the item before. False: there is no key in the tile. Few registers are to be had: what
// can be read back from the item is.
template <class Config>
__device__ __forceinline__ bool plan_item(const BackwardParams& params, int32_t n,
                                          const volatile uint32_t& done,
                                          volatile BackwardItem& item) {
  const cuda::BackwardParams& common = params.common;
  const Problem& problem = common.problem;
  constexpr int32_t kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  {
    const TilePosition position = tile_position(params.order, n);
    const int32_t b = position.unit / problem.heads_kv;
    item.b = b;
    item.kv_head = position.unit - b * problem.heads_kv;
    // Early keys first: under a causal mask they take longest.
    item.key = (params.order.query_tiles - 1 - position.query_tile) * kTileKv;
  }
  {
    const Sequence sequence = sequence_of(problem, common.args.shape, common.args.inputs, item.b);
    item.len.q = sequence.len.q;
    item.len.kv = sequence.len.kv;
    item.first_q = static_cast<int32_t>(sequence.first_q);
    item.first_kv = static_cast<int32_t>(sequence.first_kv);
  }
  if (item.key >= item.len.kv) return false;
  item.end = 0;
  item.keys = min(kTileKv, item.len.kv - item.key);
  {
    const int32_t before = (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q)
                               ? item.first_q / kTileQ + item.b
                               : item.b * params.sequence_tiles;
    item.first_tile = item.kv_head * problem.group() * params.head_tiles + before;
  }
  {
    const Interval first =
        visible_queries(problem.mask_rule(), item.key, {item.len.q, item.len.kv});
    item.tiles.begin = first.begin / kTileQ;
    item.full.end = first.end / kTileQ;
  }
  {
    const Interval last =
        visible_queries(problem.mask_rule(), item.key + item.keys - 1, {item.len.q, item.len.kv});
    item.tiles.end = (last.end + kTileQ - 1) / kTileQ;
    item.full.begin = (last.begin + kTileQ - 1) / kTileQ;
  }
  if (item.keys < kTileKv) item.full.end = 0;
  const int32_t count = max(item.tiles.end - item.tiles.begin, 0);
  item.done = done + count * problem.group();
  item.start = common.turns ? item.tiles.end - 1 : item.tiles.begin;
  return true;
}

// Which tiles of an item the block mask leaves: a lane a tile.
template <class Config>
__device__ __forceinline__ void look_at_blocks(const BackwardParams& params,
                                               volatile BackwardItem& item) {
  const Problem& problem = params.common.problem;
  const flashattn_inputs& in = params.common.args.inputs;
  const int32_t lane = threadIdx.x % 32;
  __syncwarp();  // the item is one lane's
  const int32_t tiles = max(item.tiles.end - item.tiles.begin, 0);
  uint32_t hidden = 0;
#pragma unroll 1
  for (int32_t first = 0; first < tiles * problem.group(); first += 32) {
    const bool inside = first + lane < tiles * problem.group();
    bool some = false;
    if (inside) {
      const int32_t head = (first + lane) / tiles;
      const int32_t query = ((first + lane) % tiles + item.tiles.begin) * Config::kTileQ;
      const int32_t last = min(query + Config::kTileQ, item.len.q) - 1;
      int32_t y = query / problem.block_q;
      const uint8_t* on = in.block_mask + item.b * in.block_mask_stride_batch +
                          (item.kv_head * problem.group() + head) * in.block_mask_stride_head +
                          y * in.block_mask_stride_row;
#pragma unroll 1
      for (; y <= last / problem.block_q && !some; ++y, on += in.block_mask_stride_row) {
#pragma unroll 1
        for (int32_t x = item.key / problem.block_kv;
             x <= (item.key + item.keys - 1) / problem.block_kv && !some; ++x) {
          some = on[x];
        }
      }
    }
    const uint32_t seen = __ballot_sync(~0u, some);
    hidden += __popc(__ballot_sync(~0u, inside && !some));
    if (lane == 0) item.seen[first / 32] = seen;
  }
  if (lane == 0) item.done = item.done - hidden;
}

// With any scores by all lanes of a warp, else by one thread.
template <class Config>
__device__ __forceinline__ void plan_items(const BackwardParams& params,
                                           BackwardControl<Config>& control) {
  const bool leader = !Config::kAny || threadIdx.x % 32 == 0;
  const auto spread = [&](int32_t x) { return Config::kAny ? __shfl_sync(~0u, x, 0) : x; };
  const int32_t count = static_cast<int32_t>(params.order.count());
  Items items;
  uint32_t phase = 0;
  // In turns none may be kept for a block that has not started.
  const int32_t dealt = params.common.turns ? 0 : static_cast<int32_t>(gridDim.x);
  int32_t next = blockIdx.x;
  if (params.common.turns && leader) next = atomicAdd(params.common.ticket, 1);
  next = spread(next);
  for (;;) {
    ptx::mbarrier_wait(barrier_at(control.item_empty[items.slot()]), items.phase() ^ 1);
    volatile BackwardItem& item = control.items[items.slot()];
    bool some = next >= count;
    if (leader) {
      if (next >= count) {
        item.end = 1;
      } else {
        some = plan_item<Config>(params, next, control.items[items.slot() ^ 1].done, item);
      }
    }
    some = spread(some);
    if (some) {
      if constexpr (Config::kAny) {
        const bool blocks = params.common.problem.mask & FLASHATTN_MASK_BLOCKS;
        if (blocks && next < count) look_at_blocks<Config>(params, item);
      }
      if (leader) ptx::mbarrier_arrive(barrier_at(control.item_full[items.slot()]));
      items.advance();
      if (next >= count) return;
      // Taken no earlier than need be, so that work stays evenly dealt out.
      ptx::mbarrier_wait(barrier_at(control.nearly), phase);
      phase ^= 1;
    }
    if (leader) next = dealt + atomicAdd(params.common.ticket, 1);
    next = spread(next);
  }
}

// Calls step(heads left, tiles left of the head, tile, place) for all tiles of queries of an item,
// in the order of all roles; place: the tile in dq and the like. For those of which the block mask
// leaves nothing skip(place).
template <class Config, class Step, class Skip>
__device__ __forceinline__ void for_each_tile(const volatile BackwardItem& item,
                                              const BackwardParams& params, Step step, Skip skip) {
  int32_t place = item.first_tile, tile = item.start;
#pragma unroll 1
  for (int32_t heads = params.common.problem.group(); heads > 0; --heads) {
#pragma unroll 1
    for (int32_t left = item.tiles.end - item.tiles.begin; left > 0; --left) {
      if (is_seen<Config>(item, params, params.common.problem.group() - heads, tile)) {
        step(heads, left, tile, place + tile);
      } else {
        skip(place + tile);
      }
      tile = tile_after(item, params, tile);
    }
    place += params.head_tiles;
  }
}

// Loads K and, tile by tile, Q with lse; or V and dO with D.
template <class Config, bool kGradients>
class BackwardLoader {
  static constexpr int kTileQ = Config::kTileQ;
  static constexpr int kPanels = kGradients ? Config::kPanelsV : Config::kPanelsQk;

 public:
  __device__ __forceinline__ BackwardLoader(const BackwardParams& params, uint32_t shared,
                                            BackwardControl<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (Items items;; items.advance()) {
      ptx::mbarrier_wait(barrier_at(control_.item_full[items.slot()]), items.phase());
      const volatile BackwardItem& item = control_.items[items.slot()];
      if (item.end) break;
      ptx::mbarrier_wait(barrier_at(control_.kv_empty), (items.count & 1) ^ 1);
      if (item.tiles.begin < item.tiles.end) {
        load(item);
      } else {
        ptx::mbarrier_arrive(barrier_at(kGradients ? control_.v_full : control_.k_full));
        if (kGradients) ptx::mbarrier_arrive(barrier_at(control_.nearly));
      }
      ptx::mbarrier_arrive(barrier_at(control_.item_empty[items.slot()]));
    }
  }

 private:
  __device__ __forceinline__ void load(const volatile BackwardItem& item) {
    constexpr uint32_t kRows = kGradients ? Config::kDo : Config::kQ;
    constexpr uint32_t kNumbers = kGradients ? Config::kDelta : Config::kLse;
    {
      const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
      load_panels<Config::kTileKv>(
          kGradients ? params_.v : params_.k, shared_ + (kGradients ? Config::kV : 0),
          barrier_at(kGradients ? control_.v_full : control_.k_full), 0,
          {0, item.first_kv + item.key, item.kv_head, varlen ? 0 : item.b}, ptx::kEvictFirst);
    }
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    const int32_t batch = varlen ? 0 : item.b;
    // Of them the last tile may be hidden.
    const bool blocks = Config::kAny && (params_.common.problem.mask & FLASHATTN_MASK_BLOCKS);
    const auto load = [&](int32_t heads, int32_t left, int32_t tile, int32_t place) {
      const uint32_t slot = place_.slot();
      const uint32_t full = barrier_at(kGradients ? control_.do_full[slot] : control_.q_full[slot]);
      ptx::mbarrier_wait(barrier_at(kGradients ? control_.do_empty[slot] : control_.q_empty[slot]),
                         place_.phase() ^ 1);
      load_panels<kTileQ>(kGradients ? params_.dout : params_.q,
                          shared_ + kRows + slot * (kTileQ * kPanels * 128), full,
                          Config::kNumberBytes,
                          {0, item.first_q + tile * kTileQ,
                           (item.kv_head + 1) * params_.common.problem.group() - heads, batch},
                          ptx::kEvictLast);
      ptx::bulk_load(shared_ + kNumbers + slot * Config::kNumberBytes,
                     (kGradients ? params_.common.delta : params_.common.lse2) +
                         static_cast<int64_t>(place) * kTileQ,
                     Config::kNumberBytes, full);
      place_.advance();
      if (kGradients && !blocks && heads == 1 &&
          left == min(2, item.tiles.end - item.tiles.begin)) {
        ptx::mbarrier_arrive(barrier_at(control_.nearly));
      }
    };
    for_each_tile<Config>(item, params_, load, [](int32_t) {});
    if (kGradients && blocks) ptx::mbarrier_arrive(barrier_at(control_.nearly));
  }

  // `more`: bytes that come besides.
  template <int kRows>
  __device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t to, uint32_t full,
                                              uint32_t more, ptx::BoxPosition at,
                                              uint64_t policy) const {
    ptx::mbarrier_expect(full, kRows * kPanels * 128 + more);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_load(to + p * kRows * 128, &map, full, {p * 64, at.row, at.head, at.batch}, policy);
    }
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  Ring<kGradients ? Config::kDoStages : Config::kQStages> place_;
};

// Until all tiles of keys before `mine` have added to the tile of queries.
__device__ __forceinline__ void await_turn(const BackwardParams& params, int32_t mine,
                                           int32_t place) {
  while (ptx::load_acquire(params.common.turns + place) < mine) __nanosleep(20);
  ptx::fence_async_proxy_all();
}

// Frees the buffers of dQ one by one, as they have been read.
template <class Config, int kSlot = 0>
__device__ __forceinline__ void free_dq(BackwardControl<Config>& control) {
  if constexpr (kSlot < Config::kDqSlots) {
    ptx::bulk_wait_read<Config::kDqSlots - 1 - kSlot>();
    ptx::mbarrier_arrive(barrier_at(control.dq_empty[kSlot]));
    free_dq<Config, kSlot + 1>(control);
  }
}

// Adds the shares of dQ, tile by tile, as warpgroups leave them in shared memory. In turns: tiles
// of keys add to a tile of queries one after the other, in the order in which blocks take them, so
// that nobody waits for a block that has not started.
template <class Config>
__device__ __forceinline__ void add_dq(const BackwardParams& params, uint32_t shared,
                                       BackwardControl<Config>& control) {
  constexpr int kShare = Config::kShareBytes, kSlots = Config::kDqSlots;
  uint32_t uses = 0;  // of each buffer
  for (Items items;; items.advance()) {
    ptx::mbarrier_wait(barrier_at(control.item_full[items.slot()]), items.phase());
    const volatile BackwardItem& item = control.items[items.slot()];
    if (item.end) break;
    const auto add = [&](int32_t, int32_t, int32_t, int32_t place) {
      float* to = params.common.dq + static_cast<int64_t>(place) * (Config::kShares * (kShare / 4));
      if (params.common.turns) await_turn(params, item.key / Config::kTileKv, place);
#pragma unroll 1
      for (int first = 0; first < Config::kShares; first += kSlots, ++uses) {
#pragma unroll
        for (int n = 0; n < kSlots; ++n, to += kShare / 4) {
          ptx::mbarrier_wait(barrier_at(control.dq_full[n]), uses & 1);
          ptx::bulk_add(to, shared + Config::kDq + n * kShare, kShare);
          ptx::bulk_commit();
        }
        free_dq<Config>(control);
      }
      if (params.common.turns) {
        ptx::bulk_wait();  // not before the sums have changed
        ptx::add_release(params.common.turns + place, 1);
      }
    };
    for_each_tile<Config>(item, params, add, [&](int32_t place) {
      if (!params.common.turns) return;
      await_turn(params, item.key / Config::kTileKv, place);
      ptx::add_release(params.common.turns + place, 1);
    });
    ptx::mbarrier_arrive(barrier_at(control.item_empty[items.slot()]));
  }
  ptx::bulk_wait();
}

}  // namespace flashattn::cuda::sm90
