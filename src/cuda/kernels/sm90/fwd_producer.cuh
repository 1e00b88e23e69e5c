// The producers of the Hopper forward pass, a warp each: one plans the tiles, one starts the loads
// of keys and values, one those of queries.
#pragma once

#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

// Plans tiles of queries, as far ahead as there are slots for items.
template <class Config>
class Planner {
 public:
  __device__ __forceinline__ Planner(const ForwardParams& params, Control<Config>& control)
      : params_(params), control_(control), leader_(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void run() {
    const int32_t tiles = params_.swizzle.count();
    int32_t next = blockIdx.x;
    if (next == 0) clear_counter();
    int32_t index = 0;  // since the last drain
    bool again = false;
    for (;;) {
      int32_t tile = -1;
      bool taken = false;
      if (again && index < kRounds) {
        tile = *static_cast<volatile int32_t*>(&control_.again[index]) - 1;
        __syncwarp();
        if (leader_) control_.again[index] = 0;
      } else if (!again && index < kRounds && next < tiles) {
        tile = next;
        taken = true;
      } else {
        again = !again && drain();
        if (!again && next >= tiles) break;
        index = 0;
        continue;
      }
      if (tile >= 0) {
        wait_for_slot();
        WorkItem<Config::kConsumers>& slot = control_.items[items_.slot()];
        if (leader_) slot.index = index;
        if (plan_item<Config::kTileKv, Config::kScoreMod>(params_, tile, again, slot)) {
          if constexpr (Config::kSafe) narrow(slot);
          publish();
          // Taken no earlier than need be, so that work stays evenly dealt out.
          ptx::mbarrier_wait(address(control_.nearly), phases_ >> 1);
          phases_ ^= 2;
        }
      }
      if (taken) next = next_tile();
      if (tile >= 0 || again) ++index;
    }
    announce(ItemKind::kEnd);
  }

 private:
  __device__ __forceinline__ int32_t next_tile() {
    if (params_.counter == nullptr) return INT32_MAX;
    int32_t taken = 0;
    if (leader_) {
      TileCounter& counter = *params_.counter;
      while (!cleared_) {
        cleared_ = ptx::load_acquire(&counter.stamp) == params_.stamp;
        if (!cleared_) __nanosleep(100);
      }
      taken = atomicAdd(&counter.taken, 1);
      if (taken == params_.swizzle.count() - 1) ptx::store_relaxed(&counter.stamp, uint64_t{0});
    }
    return static_cast<int32_t>(gridDim.x) + __shfl_sync(~0u, taken, 0);
  }

  __device__ __forceinline__ void clear_counter() const {
    if (params_.counter == nullptr || !leader_) return;
    params_.counter->taken = 0;
    ptx::store_release(&params_.counter->stamp, params_.stamp);
  }

  __device__ __forceinline__ void wait_for_slot() {
    ptx::mbarrier_wait(address(control_.item_empty[items_.slot()]), items_.phase() ^ 1);
  }

  // The lanes that may have written.
  __device__ __forceinline__ void publish() {
    __syncwarp();
    if (threadIdx.x % 32 < Config::kConsumers) {
      ptx::mbarrier_arrive(address(control_.item_full[items_.slot()]));
    }
    items_.advance();
  }

  // Leaves the tiles from the first to the last of which the block mask leaves something, to all
  // warpgroups alike.
  __device__ __forceinline__ void narrow(WorkItem<Config::kConsumers>& item) {
    __syncwarp();
    int32_t begin = item.begin, end = item.end;
    if (begin < end) {
      Tiles<Config> tiles(params_);
      end = tiles.last_visible(item, end - 1, begin) + 1;
      begin = end <= begin ? end : tiles.first_visible(item, begin, end);
    }
    __syncwarp();
    if (!leader_) return;
    item.begin = begin;
    item.end = end;
#pragma unroll
    for (int n = 0; n < Config::kConsumers; ++n) {
      item.strips[n].begin = begin;
      item.strips[n].end = end;
    }
  }

  __device__ __forceinline__ void announce(ItemKind kind) {
    wait_for_slot();
    if (leader_) control_.items[items_.slot()].kind = kind;
    publish();
  }

  // Waits until all tiles so far are done: whether some outgrew their reference.
  __device__ __forceinline__ bool drain() {
    announce(ItemKind::kDrain);
    ptx::mbarrier_wait(address(control_.drained), phases_ & 1);
    phases_ ^= 1;
    const bool outgrown = *static_cast<volatile int32_t*>(&control_.outgrown) != 0;
    __syncwarp();
    if (leader_) control_.outgrown = 0;
    return outgrown;
  }

  const ForwardParams& params_;
  Control<Config>& control_;
  const bool leader_;
  PipelineState<kItems> items_;
  uint32_t phases_ = 0;   // bit 0: of drained, 1: of nearly
  bool cleared_ = false;  // the counter
};

// Calls load(item) for each tile, in one warp.
template <class Config, class Load>
__device__ __forceinline__ void load_items(Control<Config>& control, Load load) {
  for (PipelineState<kItems> items;; items.advance()) {
    ptx::mbarrier_wait(address(control.item_full[items.slot()]), items.phase());
    const volatile WorkItem<Config::kConsumers>& item = control.items[items.slot()];
    const ItemKind kind = item.kind;
    if (kind == ItemKind::kEnd) break;
    if (kind == ItemKind::kTile) load(item);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(control.item_empty[items.slot()]));
  }
}

// Loads the queries of items.
template <class Config>
class QueryLoader {
 public:
  __device__ __forceinline__ QueryLoader(const ForwardParams& params, uint32_t shared,
                                         Control<Config>& control)
      : params_(params), control_(control), shared_(shared) {}

  __device__ __forceinline__ void load(const volatile WorkItem<Config::kConsumers>& item) {
    const bool varlen = params_.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    const int32_t row = static_cast<int32_t>(item.offset_q) + item.query;
    const int32_t h = item.h, batch = varlen ? 0 : item.b;
    const uint32_t slot = place_.slot(), to = shared_ + slot * Config::kQBytes;
    // Warpgroup by warpgroup: each leaves its rows at its own time.
#pragma unroll
    for (int group = 0; group < Config::kConsumers; ++group) {
      const uint32_t barrier = address(control_.q_full[slot][group]);
      ptx::mbarrier_wait(address(control_.q_empty[slot][group]), place_.phase() ^ 1);
      if (!ptx::elect()) continue;
      ptx::mbarrier_expect(barrier, Config::kQBytes / Config::kConsumers);
#pragma unroll
      for (int p = 0; p < Config::kPanelsQk; ++p) {
        ptx::tma_load(to + (p * Config::kTileQ + group * kWarpgroupRows) * 128, &params_.q, barrier,
                      {p * 64, row + group * kWarpgroupRows, h, batch}, ptx::kEvictFirst);
      }
    }
    place_.advance();
  }

 private:
  const ForwardParams& params_;
  Control<Config>& control_;
  const uint32_t shared_;
  PipelineState<Config::kQStages> place_;
};

// Loads the keys and values that the items need, or either; and with the keys the queries, if no
// other warp does.
template <class Config>
class Loader {
 public:
  __device__ __forceinline__ Loader(const ForwardParams& params, uint32_t shared,
                                    Control<Config>& control, bool keys, bool values)
      : params_(params),
        control_(control),
        loads_keys_(keys),
        loads_values_(values),
        queries_(params, shared, control),
        k_(shared + Config::kK),
        v_(shared + Config::kV),
        leader_(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void run() {
    load_items(control_, [this](const volatile WorkItem<Config::kConsumers>& item) { load(item); });
  }

 private:
  static constexpr int32_t kAhead = 2;  // tiles of keys left when the next item is planned

  struct Keys {
    int32_t first, head, batch, count;
  };

  // Of a tile of a paged cache: of a box of rows each lane's page, and where in it they begin.
  struct Boxes {
    int32_t page, row;
  };

  __device__ __forceinline__ void load(const volatile WorkItem<Config::kConsumers>& item) {
    const bool varlen_kv = params_.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    const Keys keys{static_cast<int32_t>(item.offset_kv),
                    item.h / params_.problem.q_heads_per_kv_head(), varlen_kv ? 0 : item.b,
                    item.len.kv};
    const int32_t begin = item.begin;
    int32_t n = item.end - 1;
    if (n < begin) {
      // Rows without keys: O is written where Q lies.
      if (!Config::kQueryWarp && loads_keys_) queries_.load(item);
      if (loads_values_) announce();
      return;
    }
    Tiles<Config> tiles(params_);
    Boxes boxes = look_up(keys, n);
    if (loads_keys_) {
      load_keys<Config::kPanelsQk>(params_.k, k_, control_.k_full, control_.k_empty, stage_, keys,
                                   n, boxes);
      if (!Config::kQueryWarp) queries_.load(item);
    }
    bool announced = !loads_values_;
    // K of the next tile before V of this: it is needed first.
#pragma unroll 1
    while (n >= begin) {
      if (!announced && n <= begin + kAhead) {
        announce();
        announced = true;
      }
      const PipelineState<Config::kStages> values = stage_;
      stage_.advance();
      const int32_t after = tiles.last_visible(item, n - 1, begin);
      const Boxes boxes_after = look_up(keys, after);
      if (after >= begin && loads_keys_) {
        load_keys<Config::kPanelsQk>(params_.k, k_, control_.k_full, control_.k_empty, stage_, keys,
                                     after, boxes_after);
      }
      if (loads_values_) {
        load_keys<Config::kPanelsV>(params_.v, v_, control_.v_full, control_.v_empty, values, keys,
                                    n, boxes);
      }
      n = after;
      boxes = boxes_after;
    }
  }

  // This item's loads are all but started.
  __device__ __forceinline__ void announce() {
    if (leader_) ptx::mbarrier_arrive(address(control_.nearly));
  }

  // Before a buffer is waited for: nothing then waits for page numbers. Boxes past the last key lie
  // past the last page: zeros.
  __device__ __forceinline__ Boxes look_up(const Keys& keys, int32_t n) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return {};
    const int32_t lane = threadIdx.x % 32, mine = n * Config::kTileKv + lane * params_.kv_box;
    if (lane * params_.kv_box >= Config::kTileKv || mine < 0 || mine >= keys.count) {
      return {INT32_MAX, 0};
    }
    const Inputs& in = params_.args.inputs;
    const int32_t number = mine / params_.problem.page_size;
    return {in.page_table[keys.batch * in.page_table_stride + number],
            mine - number * params_.problem.page_size};
  }

  // Tile n of K or V into its buffer, when consumers have left that.
  template <int kPanels>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, uint32_t buffers,
                                            uint64_t (&full)[Config::kStages],
                                            uint64_t (&empty)[Config::kStages],
                                            const PipelineState<Config::kStages>& at,
                                            const Keys& keys, int32_t n, Boxes mine) {
    constexpr int kBytes = Config::kTileKv * kPanels * 128;
    const uint32_t to = buffers + at.slot() * kBytes, barrier = address(full[at.slot()]);
    ptx::mbarrier_wait(address(empty[at.slot()]), at.phase() ^ 1);
    if (leader_) ptx::mbarrier_expect(barrier, kBytes);
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) {
      if (!ptx::elect()) return;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load(to + p * Config::kTileKv * 128, &map, barrier,
                      {p * 64, keys.first + n * Config::kTileKv, keys.head, keys.batch},
                      ptx::kEvictLast);
      }
      return;
    }
    const int32_t box = params_.kv_box;
#pragma unroll 1
    for (int32_t x = 0, row = 0; row < Config::kTileKv; ++x, row += box) {
      const Boxes its{__shfl_sync(~0u, mine.page, x), __shfl_sync(~0u, mine.row, x)};
      if (!ptx::elect()) continue;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load(to + (p * Config::kTileKv + row) * 128, &map, barrier,
                      {p * 64, its.row, keys.head, its.page}, ptx::kEvictLast);
      }
    }
  }

  const ForwardParams& params_;
  Control<Config>& control_;
  const bool loads_keys_, loads_values_;
  QueryLoader<Config> queries_;
  const uint32_t k_, v_;
  const bool leader_;
  PipelineState<Config::kStages> stage_;
};

}  // namespace flashattn::cuda::sm90
