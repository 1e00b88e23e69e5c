// The producers of the Hopper backward pass, a thread each: one plans the tiles of keys, one starts
// the loads, one adds dQ to the sums in global memory.
#pragma once

#include "cuda/sm90/backward_config.cuh"

namespace flashattn::cuda::sm90 {

// False: there is no key in the tile.
template <class Config>
__device__ __forceinline__ bool plan_item(const BackwardParams& params, int32_t n,
                                          BackwardItem& item) {
  const cuda::BackwardParams& common = params.common;
  const Problem& problem = common.problem;
  const TilePosition position = tile_position(params.order, n);
  // Early keys first: under a causal mask they take longest.
  const int32_t key = (params.order.query_tiles - 1 - position.query_tile) * Config::kTileKv;
  const int32_t b = position.unit / problem.heads_kv;
  const int32_t kv_head = position.unit - b * problem.heads_kv;
  const Sequence sequence = sequence_of(problem, common.args.shape, common.args.inputs, b);
  const Lengths len = sequence.len;
  if (key >= len.kv) return false;
  item.end = 0;
  item.b = b;
  item.kv_head = kv_head;
  item.key = key;
  item.keys = min(Config::kTileKv, len.kv - key);
  item.first_q = static_cast<int32_t>(sequence.first_q);
  item.first_kv = static_cast<int32_t>(sequence.first_kv);
  item.len = len;
  const Interval keys{key, key + item.keys};
  const Interval any = query_span(problem.mask_rule(), keys, len);
  item.tiles = item.full = {0, 0};
  if (any.begin < any.end) {
    item.tiles = {any.begin / Config::kTileQ, (any.end - 1) / Config::kTileQ + 1};
  }
  if (item.keys == Config::kTileKv) {
    const Interval all = full_queries(problem.mask_rule(), keys, len);
    item.full = {(all.begin + Config::kTileQ - 1) / Config::kTileQ, all.end / Config::kTileQ};
  }
  const int32_t before = (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q)
                             ? item.first_q / Config::kTileQ + b
                             : b * params.sequence_tiles;
  item.first_tile = kv_head * problem.group() * params.head_tiles + before;
  return true;
}

template <class Config>
__device__ __forceinline__ void plan_items(const BackwardParams& params,
                                           BackwardControl<Config>& control) {
  const int32_t count = static_cast<int32_t>(params.order.count());
  Pair items;
  uint32_t phase = 0;
  int32_t next = blockIdx.x;
  for (;;) {
    ptx::mbarrier_wait(barrier_at(control.item_empty[items.slot()]), items.phase() ^ 1);
    BackwardItem& item = control.items[items.slot()];
    if (next >= count) item.end = 1;
    const bool some = next >= count || plan_item<Config>(params, next, item);
    if (some) {
      ptx::mbarrier_arrive(barrier_at(control.item_full[items.slot()]));
      items.advance();
      if (next >= count) return;
      // Taken no earlier than need be, so that work stays evenly dealt out.
      ptx::mbarrier_wait(barrier_at(control.nearly), phase);
      phase ^= 1;
    }
    next = static_cast<int32_t>(gridDim.x) + atomicAdd(params.common.ticket, 1);
  }
}

// Calls step(head, tile, last) for all tiles of queries of an item, in the order of all roles.
template <class Step>
__device__ __forceinline__ void for_each_tile(const volatile BackwardItem& item, int32_t group,
                                              Step step) {
  const int32_t begin = item.tiles.begin, end = item.tiles.end;
#pragma unroll 1
  for (int32_t head = begin < end ? 0 : group; head < group; ++head) {
#pragma unroll 1
    for (int32_t tile = begin; tile < end; ++tile) step(head, tile);
  }
}

template <class Config>
class BackwardLoader {
 public:
  __device__ __forceinline__ BackwardLoader(const BackwardParams& params, uint32_t shared,
                                            BackwardControl<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (Pair items;; items.advance()) {
      ptx::mbarrier_wait(barrier_at(control_.item_full[items.slot()]), items.phase());
      const volatile BackwardItem& item = control_.items[items.slot()];
      if (item.end) break;
      if (item.tiles.begin < item.tiles.end) {
        load(item);
      } else {
        ptx::mbarrier_arrive(barrier_at(control_.nearly));
      }
      ptx::mbarrier_arrive(barrier_at(control_.item_empty[items.slot()]));
    }
  }

 private:
  __device__ __forceinline__ void load(const volatile BackwardItem& item) {
    const Problem& problem = params_.common.problem;
    const int32_t group = problem.group(), last = max(item.tiles.end - 2, item.tiles.begin);
    const bool varlen_q = problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    const bool varlen_kv = problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    const int32_t q_batch = varlen_q ? 0 : item.b, kv_batch = varlen_kv ? 0 : item.b;
    const int32_t first_q = item.first_q, kv_row = item.first_kv + item.key;
    const int32_t kv_head = item.kv_head;
    const int64_t first_tile = item.first_tile;
    ptx::mbarrier_wait(barrier_at(control_.kv_empty), kv_phase_);
    kv_phase_ ^= 1;
    load_panels<Config::kTileKv>(params_.k, shared_, control_.k_full, 0,
                                 {0, kv_row, kv_head, kv_batch}, ptx::kEvictFirst);
    bool values = true;
    for_each_tile(item, group, [&](int32_t head, int32_t tile) {
      const uint32_t slot = place_.slot(), phase = place_.phase() ^ 1;
      const ptx::BoxPosition at{0, first_q + tile * Config::kTileQ, kv_head * group + head,
                                q_batch};
      const int64_t number = (first_tile + head * params_.head_tiles + tile) * Config::kTileQ;
      ptx::mbarrier_wait(barrier_at(control_.q_empty[slot]), phase);
      load_panels<Config::kTileQ>(params_.q, shared_ + Config::kQ + slot * Config::kQueryBytes,
                                  control_.q_full[slot], Config::kNumberBytes, at, ptx::kEvictLast);
      ptx::bulk_load(shared_ + Config::kLse + slot * Config::kNumberBytes,
                     params_.common.lse2 + number, Config::kNumberBytes,
                     barrier_at(control_.q_full[slot]));
      if (values) {
        load_panels<Config::kTileKv>(params_.v, shared_ + Config::kV, control_.v_full, 0,
                                     {0, kv_row, kv_head, kv_batch}, ptx::kEvictFirst);
        values = false;
      }
      ptx::mbarrier_wait(barrier_at(control_.do_empty[slot]), phase);
      load_panels<Config::kTileQ>(params_.dout, shared_ + Config::kDo + slot * Config::kQueryBytes,
                                  control_.do_full[slot], Config::kNumberBytes, at,
                                  ptx::kEvictLast);
      ptx::bulk_load(shared_ + Config::kDelta + slot * Config::kNumberBytes,
                     params_.common.delta + number, Config::kNumberBytes,
                     barrier_at(control_.do_full[slot]));
      place_.advance();
      if (head == group - 1 && tile == last) ptx::mbarrier_arrive(barrier_at(control_.nearly));
    });
  }

  // `more`: bytes that come besides.
  template <int kRows>
  __device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t to, uint64_t& full,
                                              uint32_t more, ptx::BoxPosition at,
                                              uint64_t policy) const {
    const uint32_t barrier = barrier_at(full);
    ptx::mbarrier_expect(barrier, kRows * Config::kDim * 2 + more);
#pragma unroll
    for (int p = 0; p < Config::kPanels; ++p) {
      ptx::tma_load(to + p * kRows * 128, &map, barrier, {p * 64, at.row, at.head, at.batch},
                    policy);
    }
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  Pair place_;
  uint32_t kv_phase_ = 1;
};

// Adds the warpgroups' shares of dQ, tile by tile, as they leave them in shared memory.
template <class Config>
__device__ __forceinline__ void add_dq(const BackwardParams& params, uint32_t shared,
                                       BackwardControl<Config>& control) {
  constexpr int kShare = Config::kShareBytes;
  const int32_t group = params.common.problem.group();
  uint32_t phase = 0;
  for (Pair items;; items.advance()) {
    ptx::mbarrier_wait(barrier_at(control.item_full[items.slot()]), items.phase());
    const volatile BackwardItem& item = control.items[items.slot()];
    if (item.end) break;
    const int64_t first_tile = item.first_tile;
    for_each_tile(item, group, [&](int32_t head, int32_t tile) {
      float* to = params.common.dq +
                  (first_tile + head * params.head_tiles + tile) * (Config::kTileQ * Config::kDim);
#pragma unroll
      for (int n = 0; n < Config::kConsumers; ++n) {
        ptx::mbarrier_wait(barrier_at(control.dq_full[n]), phase);
        ptx::bulk_add(to + n * (kShare / 4), shared + Config::kDq + n * kShare, kShare);
        ptx::bulk_commit();
      }
      ptx::bulk_wait_read<1>();
      ptx::mbarrier_arrive(barrier_at(control.dq_empty[0]));
      ptx::bulk_wait_read();
      ptx::mbarrier_arrive(barrier_at(control.dq_empty[1]));
      phase ^= 1;
    });
    ptx::mbarrier_arrive(barrier_at(control.item_empty[items.slot()]));
  }
  ptx::bulk_wait();
}

}  // namespace flashattn::cuda::sm90
