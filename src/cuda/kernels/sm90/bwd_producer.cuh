// The producers of the Hopper backward pass, a thread each: one plans the tiles of keys and looks
// for dQ to convert, one starts the loads. Those that add dQ: backward_adder.cuh.
#pragma once

#include "cuda/kernels/sm90/dq_inline_postprocess.cuh"

namespace flashattn::cuda::sm90 {

// Where the item's keys begin and end, of a pair those of both blocks.
template <class Config>
__device__ __forceinline__ Interval keys_of(const volatile BackwardItem<Config>& item) {
  const int32_t first = item.key / Config::kItemKv * Config::kItemKv;
  return {first, min(first + Config::kItemKv, item.len.kv)};
}

// What of a tile of keys a ticket is for; twice the ticket's number, and 1 for its second piece.
template <class Config>
__device__ __forceinline__ bool is_split(const BackwardParams& params, int32_t n) {
  return Config::kStreamK && params.stream_k.splits(n / 2);
}
__device__ __forceinline__ StreamK::Partial partial_of(const BackwardParams& params, int32_t n) {
  return params.stream_k.partial(n / 2, n & 1);
}

// After the item `previous`. False: there is no key in the tile. Few registers are to be had: what
// can be read back from the items is.
template <class Config>
__device__ __forceinline__ bool plan_item(const BackwardParams& params, int32_t n,
                                          const volatile BackwardItem<Config>& previous,
                                          volatile BackwardItem<Config>& item) {
  const cuda::BackwardParams& common = params.common;
  const Problem& problem = common.problem;
  constexpr int32_t kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  constexpr int32_t kItemKv = Config::kItemKv;
  {
    int32_t number = n / 2;
    item.partials = 1;
    if (is_split<Config>(params, n)) {
      const StreamK::Partial partial = partial_of(params, n);
      number = partial.tile;
      item.split_tile = partial.split_tile;
      item.partial = partial.index;
      item.first_partial = partial.first;
      item.partials = partial.count;
      item.partial_tiles.begin = partial.begin;
      item.partial_tiles.end = partial.end;
    }
    const L2Swizzle::Tile position = params.swizzle.tile(number);
    const int32_t b = position.head_idx / problem.heads_kv;
    item.b = b;
    item.kv_head = position.head_idx - b * problem.heads_kv;
    item.key = params.first_key + position.tile_idx * params.key_step;
  }
  {
    const SeqlenInfo sequence = seqlen_info(problem, common.args.shape, common.args.inputs, item.b);
    item.len.q = sequence.len.q;
    item.len.kv = sequence.len.kv;
    item.offset_q = static_cast<int32_t>(sequence.offset_q);
    item.offset_kv = static_cast<int32_t>(sequence.offset_kv);
  }
  if (item.key >= item.len.kv) return false;
  item.end = 0;
  item.keys = min(kItemKv, item.len.kv - item.key);
  {
    const int32_t before = (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q)
                               ? item.offset_q / kTileQ + item.b
                               : item.b * params.sequence_tiles;
    item.first_tile = item.kv_head * params.common.q_heads_per_kv_head * params.head_tiles + before;
  }
  constexpr int32_t kGroups = kKeyGroups<Config>, kGroupKv = kItemKv / kGroups;
#pragma unroll 1
  for (int32_t group = 0; group < kGroups; ++group) {
    auto& seen = item.groups[group];
    const int32_t keys = min(kGroupKv, item.keys - group * kGroupKv);
    seen.full.end = 0;
    if constexpr (Config::kSkips) seen.some.end = 0;
    if (keys <= 0) continue;
    const int32_t key = item.key + group * kGroupKv;
    {
      const Interval first = visible_queries(problem.mask_rule(), key, {item.len.q, item.len.kv});
      if (group == 0) item.tiles.begin = first.begin;
      if constexpr (Config::kSkips) seen.some.begin = first.begin / kTileQ;
      seen.full.end = first.end / kTileQ;
    }
    {
      const Interval last =
          visible_queries(problem.mask_rule(), key + keys - 1, {item.len.q, item.len.kv});
      item.tiles.end = last.end;
      if constexpr (Config::kSkips) seen.some.end = (last.end + kTileQ - 1) / kTileQ;
      seen.full.begin = (last.begin + kTileQ - 1) / kTileQ;
    }
  }
  {
    // None, or those between: what comes in turns must not come for nothing.
    const int32_t begin = item.tiles.begin, end = item.tiles.end > begin ? item.tiles.end : 0;
    item.tiles.begin = begin / kTileQ;
    item.tiles.end = (end + kTileQ - 1) / kTileQ;
  }
  if (Config::kStreamK && item.partials > 1) {
    item.tiles.begin = max(item.partial_tiles.begin, item.tiles.begin);
    item.tiles.end = min(item.partial_tiles.end, item.tiles.end);
  }
  if constexpr (Config::kPair) {  // from here on this block's
    item.key = item.key + block_rank<Config>() * kTileKv;
    item.keys = max(min(kTileKv, item.len.kv - item.key), 0);
  }
#pragma unroll
  for (int32_t group = 0; group < kGroups; ++group) {
    if (item.keys < (group + 1) * kTileKv / kGroups) item.groups[group].full.end = 0;
  }
  const int32_t count = max(item.tiles.end - item.tiles.begin, 0);
  item.start = item.tiles.begin;
  // Where all would begin with the same queries each begins with others, lest all add to one dQ:
  // 1 to 2 %. Others than pairs lose 1 %.
  if (Config::kPair && problem.mask == 0 && !common.ordered && count > 0) {
    item.start = item.start + item.key / kItemKv % count;
  }
  item.before = previous.done;
  item.done = previous.done + count * params.common.q_heads_per_kv_head;
  item.number = previous.number + (previous.done != previous.before);
  return true;
}

// Which tiles of an item the block mask leaves: a lane a tile.
template <class Config>
__device__ __forceinline__ void look_at_blocks(const BackwardParams& params,
                                               volatile BackwardItem<Config>& item) {
  const Problem& problem = params.common.problem;
  const Inputs& in = params.common.args.inputs;
  const int32_t lane = threadIdx.x % 32;
  __syncwarp();  // the item is one lane's
  const int32_t tiles = max(item.tiles.end - item.tiles.begin, 0);
  uint32_t hidden = 0;
#pragma unroll 1
  for (int32_t first = 0; first < tiles * params.common.q_heads_per_kv_head; first += 32) {
    const bool inside = first + lane < tiles * params.common.q_heads_per_kv_head;
    bool some = false;
    if (inside) {
      const int32_t head = (first + lane) / tiles;
      const int32_t query = ((first + lane) % tiles + item.tiles.begin) * Config::kTileQ;
      const int32_t last = min(query + Config::kTileQ, item.len.q) - 1;
      int32_t y = query / problem.block_q;
      const uint8_t* on =
          in.block_mask + item.b * in.block_mask_stride_batch +
          (item.kv_head * params.common.q_heads_per_kv_head + head) * in.block_mask_stride_head +
          y * in.block_mask_stride_row;
#pragma unroll 1
      for (; y <= last / problem.block_q && !some; ++y, on += in.block_mask_stride_row) {
#pragma unroll 1
        for (int32_t x = keys_of<Config>(item).begin / problem.block_kv;
             x <= (keys_of<Config>(item).end - 1) / problem.block_kv && !some; ++x) {
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

// What n is for, as above, or that there is no more, for all to see, in a free slot. False: there
// is nothing to see, n has no key.
template <class Config, class Spread>
__device__ __forceinline__ bool show_item(const BackwardParams& params,
                                          BackwardControl<Config>& control, Items at, int32_t n,
                                          bool leader, Spread spread) {
  volatile BackwardItem<Config>& item = control.items[at.slot()];
  const bool end = n / 2 >= params.stream_k.work_items;
  bool some = end;
  if (leader) {
    if (end) {
      item.end = 1;
    } else {
      some = plan_item<Config>(params, n, control.items[at.slot() ^ 1], item);
    }
  }
  some = spread(some);
  if (!some) return false;
  if (leader && !end) {
    const int32_t heads = (item.b * params.common.problem.heads_kv + item.kv_head + 1) *
                          params.common.q_heads_per_kv_head;
    wait_until_prepared(params, control, heads);
    const cuda::BackwardParams& common = params.common;
    item.far = ptx::load_acquire(common.far) == common.far_stamp;
    if (item.far) {
#pragma unroll
      for (auto& group : item.groups) group.full.end = 0;
    }
  }
  if constexpr (Config::kAny) {
    const bool blocks = params.common.problem.mask & FLASHATTN_MASK_BLOCKS;
    if (blocks && !end) look_at_blocks<Config>(params, item);
  }
  if (leader) ptx::mbarrier_arrive(barrier_at(control.item_full[at.slot()]));
  return true;
}

// The second block of a pair: what the first has taken.
template <class Config, class Spread>
__device__ __forceinline__ void follow_items(const BackwardParams& params,
                                             BackwardControl<Config>& control, bool leader,
                                             Spread spread) {
  for (Items items;; items.advance()) {
    const uint32_t full = barrier_at(control.pair.number_full[items.slot()]);
    if (leader) ptx::mbarrier_expect(full, sizeof(uint32_t));
    ptx::mbarrier_wait_cluster(full, items.phase());
    const int32_t next = ptx::load_shared(ptx::shared_address(&control.pair.numbers[items.slot()]));
    ptx::mbarrier_wait(barrier_at(control.item_empty[items.slot()]), items.phase() ^ 1);
    show_item<Config>(params, control, items, next, leader, spread);
    const uint32_t empty = at_partner(barrier_at(control.item_empty[items.slot()]));
    if (leader) ptx::mbarrier_arrive_remote(empty);  // the number has been read
    if (next / 2 >= params.stream_k.work_items) return;
  }
}

// With any scores by all lanes of a warp, else by one thread. wait(barrier, parity) waits, and does
// what else there is to do.
template <class Config, class Wait>
__device__ __forceinline__ void plan_items(const BackwardParams& params,
                                           BackwardControl<Config>& control, Wait wait) {
  const bool leader = !Config::kAny || threadIdx.x % 32 == 0;
  const auto spread = [&](int32_t x) { return Config::kAny ? __shfl_sync(~0u, x, 0) : x; };
  if constexpr (Config::kPair) {
    if (block_rank<Config>() != 0) return follow_items(params, control, leader, spread);
  }
  Items items;
  int32_t next = blockIdx.x / kBlocks<Config> * 2;
  if (params.dealt == 0 && leader) next = atomicAdd(params.common.work_counter, 1) * 2;
  next = spread(next);
  for (;;) {
    if (show_item<Config>(params, control, items, next, leader, spread)) {
      if constexpr (Config::kPair) {
        if (leader) {
          ptx::store_remote(at_partner(ptx::shared_address(&control.pair.numbers[items.slot()])),
                            next, at_partner(barrier_at(control.pair.number_full[items.slot()])));
        }
      }
      items.advance();
      if (next / 2 >= params.stream_k.work_items) return;
      // Taken no earlier than need be, so that work stays evenly dealt out.
      wait(barrier_at(control.nearly), items.count & 1 ^ 1);
      wait(barrier_at(control.item_empty[items.slot()]), items.phase() ^ 1);
    }
    if (is_split<Config>(params, next) && partial_of(params, next).more) {
      ++next;
    } else {
      if (leader) next = (params.dealt + atomicAdd(params.common.work_counter, 1)) * 2;
      next = spread(next);
    }
  }
}

// Plans the items; where the kernel converts dQ, also looks for what is complete.
template <class Config>
__device__ __forceinline__ void plan(const BackwardParams& params,
                                     BackwardControl<Config>& control) {
  const bool leader = !Config::kAny || threadIdx.x % 32 == 0;
  if (leader) {
    wait_until_begun<Config>(params);
    wait_until_prepared(params, control, 1);  // lengths, too, are of kernels before
  }
  if constexpr (Config::kConverts) {
    const DqScout<Config> scout(params, control);
    const auto all = [](bool x) { return Config::kAny ? __all_sync(~0u, x) : x; };
    plan_items(params, control, [&](uint32_t barrier, uint32_t parity) {
      while (!all(ptx::mbarrier_test(barrier, parity))) {
        if (leader) scout.look();
        __nanosleep(50);
      }
    });
    if (leader) scout.end();
  } else {
    plan_items(params, control,
               [](uint32_t barrier, uint32_t parity) { ptx::mbarrier_wait(barrier, parity); });
  }
}

// Loads tile by tile Q with lse and dO with D; with the first of an item K, of a pair also half of
// the partner's, and V, which arrive with Q and dO, as far as barriers go.
template <class Config>
class BackwardLoader {
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kOtherPanels = Config::kOtherPanels;
  static constexpr uint32_t kNearly = 128 / kTileQ;

 public:
  __device__ __forceinline__ BackwardLoader(const BackwardParams& params, uint32_t shared,
                                            BackwardControl<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_item(control_, [&](const volatile BackwardItem<Config>& item, uint32_t empty) {
      load(item);
      ptx::mbarrier_arrive(empty);
    });
  }

 private:
  __device__ __forceinline__ void load(const volatile BackwardItem<Config>& item) {
    bool first = true;  // until the first tile
    const auto load = [&](int32_t heads, int32_t tile, int32_t place) {
      // K where a buffer is free before the last item is done, or else when it is.
      constexpr bool kEarly = Config::kKeyStages > 1;
      {
        const PipelineState<Config::kQStages> at{count_};
        const uint32_t full = barrier_at(control_.q_full[at.slot()]);
        ptx::mbarrier_wait(barrier_at(control_.q_empty[at.slot()]), at.phase() ^ 1);
        if constexpr (Config::kModified) control_.slopes[at.slot()] = slope_of(item, heads);
        expect<Config::kPanelsQk, kOtherPanels>(full, first);
        if (kEarly && first) load_k(item);
        load_queries<Config::kPanelsQk>(params_.q,
                                        shared_ + Config::kQ + at.slot() * Config::kQueryBytes,
                                        full, item, heads, tile);
        load_numbers(params_.common.lse2, Config::kLse, at.slot(), full, place);
      }
      {
        const PipelineState<Config::kDoStages> at{count_};
        const uint32_t full = barrier_at(control_.do_full[at.slot()]);
        ptx::mbarrier_wait(barrier_at(control_.do_empty[at.slot()]), at.phase() ^ 1);
        expect<Config::kPanelsV>(full, first);
        load_queries<Config::kPanelsV>(params_.dout,
                                       shared_ + Config::kDo + at.slot() * Config::kDoBytes, full,
                                       item, heads, tile);
        load_numbers(params_.common.delta, Config::kDelta, at.slot(), full, place);
        if (!kEarly && first) load_k(item);
        if (first) {
          ptx::mbarrier_wait(barrier_at(control_.v_empty), item.number & 1 ^ 1);
          load_keys<Config::kPanelsV>(params_.v, shared_ + Config::kV, full, item, item.key, 0);
        }
      }
      ++count_;
      first = false;
      // Of the last queries but 128, or the first.
      if (count_ == max(item.done, item.before + 1 + kNearly) - kNearly) {
        ptx::mbarrier_arrive(barrier_at(control_.nearly));
      }
    };
    for_each_tile<Config>(item, params_, load, [](int32_t) {});
    if (first) ptx::mbarrier_arrive(barrier_at(control_.nearly));
  }

  // ALiBi's of the head that is so many before the end of its group, or 0, in units of log2(e).
  __device__ __forceinline__ float slope_of(const volatile BackwardItem<Config>& item,
                                            int32_t heads) const {
    if (!(params_.common.problem.bias & FLASHATTN_BIAS_ALIBI)) return 0.0f;
    const Inputs& in = params_.common.args.inputs;
    const int32_t head = (item.kv_head + 1) * params_.common.q_heads_per_kv_head - heads;
    return in.alibi_slopes[item.b * in.alibi_stride_batch + head * in.alibi_stride_head] * kLog2E;
  }

  // Bytes of a tile of queries, their numbers and, with the first, as many panels of keys, and more
  // of others.
  template <int kPanels, int kOthers = 0>
  __device__ __forceinline__ void expect(uint32_t full, bool first) const {
    constexpr uint32_t kBytes = Config::kNumberBytes + kTileQ * kPanels * 128;
    ptx::mbarrier_expect(full, first ? kBytes + kTileKv * (kPanels + kOthers) * 128 : kBytes);
  }

  __device__ __forceinline__ void load_k(const volatile BackwardItem<Config>& item) const {
    const PipelineState<Config::kQStages> at{count_};
    const PipelineState<Config::kKeyStages> keys{item.number};
    ptx::mbarrier_wait(barrier_at(control_.k_empty[keys.slot()]), keys.phase() ^ 1);
    const uint32_t full = barrier_at(control_.q_full[at.slot()]);
    load_keys<Config::kPanelsQk>(params_.k, keys_at<Config>(shared_, item), full, item, item.key,
                                 0);
    if constexpr (Config::kPair) {
      load_keys<kOtherPanels>(params_.k, shared_ + Config::kOther, full, item, item.key ^ kTileKv,
                              block_rank<Config>() * (kOtherPanels * 64));
    }
  }

  template <int kPanels>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, uint32_t to, uint32_t full,
                                            const volatile BackwardItem<Config>& item, int32_t key,
                                            int32_t column) const {
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    load_panels<kTileKv, kPanels>(map, to, full,
                                  {column, item.offset_kv + key, item.kv_head, varlen ? 0 : item.b},
                                  ptx::kEvictFirst);
  }

  // A pair: half of the columns, for both. The other half comes from the partner, which waits for
  // the same readers.
  template <int kPanels>
  __device__ __forceinline__ void load_queries(const CUtensorMap& map, uint32_t to, uint32_t full,
                                               const volatile BackwardItem<Config>& item,
                                               int32_t heads, int32_t tile) const {
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    constexpr int kOwn = kPanels / kBlocks<Config>;
    const int32_t first = block_rank<Config>() * kOwn;
    load_panels<kTileQ, kOwn, Config::kPair>(
        map, to + first * (kTileQ * 128), full,
        {first * 64, item.offset_q + tile * kTileQ,
         (item.kv_head + 1) * params_.common.q_heads_per_kv_head - heads, varlen ? 0 : item.b},
        ptx::kEvictLast);
  }

  __device__ __forceinline__ void load_numbers(const float* from, uint32_t to, uint32_t slot,
                                               uint32_t full, int32_t place) const {
    ptx::bulk_load(shared_ + to + slot * Config::kNumberBytes,
                   from + static_cast<int64_t>(place) * kTileQ, Config::kNumberBytes, full);
  }

  template <int kRows, int kPanels, bool kForBoth = false>
  __device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t to, uint32_t full,
                                              ptx::BoxPosition at, uint64_t policy) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const uint32_t panel = to + p * kRows * 128;
      const ptx::BoxPosition box{at.column + p * 64, at.row, at.head, at.batch};
      if constexpr (kForBoth) {
        ptx::tma_load_multicast(panel, &map, full, box, policy, 3);
      } else {
        ptx::tma_load(panel, &map, full, box, policy);
      }
    }
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  uint32_t count_ = 0;  // tiles of queries so far
};

}  // namespace flashattn::cuda::sm90
