// Producer warps of the Hopper forward pass: of K and V, of Q, and of a dense bias.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/fwd_block_mask.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

// Calls load(work_tile) for each work tile; all lanes of a warp call it.
template <class Config, class Load>
__device__ __forceinline__ void for_each_work_tile(SharedStorage<Config>& storage, Load load) {
  for (PipelineState<kWorkStages> work_state;; work_state.advance()) {
    storage.work.consumer_wait(work_state);
    const volatile WorkTile<Config::kConsumers>& work_tile = storage.work_tiles[work_state.stage()];
    const WorkKind kind = work_tile.kind;
    if (kind == WorkKind::kEnd) break;
    if (kind == WorkKind::kTile) load(work_tile);
    __syncwarp();
    if (threadIdx.x % 32 == 0) storage.work.consumer_release(work_state);
  }
}

// Producer of Q.
template <class Config>
class QProducer {
 public:
  __device__ __forceinline__ QProducer(const ForwardParams& params, uint32_t shared,
                                       SharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void load(const volatile WorkTile<Config::kConsumers>& work_tile) {
    const bool varlen = params_.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q;
    const int32_t row = static_cast<int32_t>(work_tile.offset_q) + work_tile.query;
    const int32_t h = work_tile.h, batch = varlen ? 0 : work_tile.b;
    // The box of a warpgroup's rows: (column, row, head, batch); packed heads: (column, query head,
    // query, batch).
    const auto box = [&](int32_t panel, int32_t warpgroup) -> ptx::TmaCoord {
      const int32_t column = panel * Config::kPanelColumns, first = warpgroup * kWarpgroupRows;
      if constexpr (Config::kPacksHeads) {
        const int32_t query = (work_tile.query + first) >> params_.packed.log2_group;
        return {column, h, static_cast<int32_t>(work_tile.offset_q) + query, batch};
      } else {
        return {column, row + first, h, batch};
      }
    };
    const uint32_t to = shared_ + q_state_.stage() * Config::kQBytes;
    // One copy per warpgroup: each releases its rows on its own.
#pragma unroll
    for (int warpgroup = 0; warpgroup < Config::kConsumers; ++warpgroup) {
      const uint32_t full = storage_.q.full_barrier(q_state_, warpgroup).address();
      storage_.q.producer_acquire(q_state_, warpgroup);
      if (!ptx::elect()) continue;
      storage_.q.producer_expect(q_state_, Config::kQBytes / Config::kConsumers, warpgroup);
#pragma unroll
      for (int p = 0; p < Config::kPanelsQk; ++p) {
        ptx::tma_load(to + (p * Config::kTileQ + warpgroup * kWarpgroupRows) * Config::kPanelBytes,
                      &params_.q, full, box(p, warpgroup), ptx::kEvictFirst);
      }
    }
    q_state_.advance();
  }

 private:
  const ForwardParams& params_;
  SharedStorage<Config>& storage_;
  const uint32_t shared_;
  PipelineState<Config::kQStages> q_state_;
};

// Producer of the dense bias, in the warp of the producer of Q.
template <class Config>
class BiasProducer {
  using BiasState = PipelineState<Config::kBiasStages>;

 public:
  __device__ __forceinline__ BiasProducer(const ForwardParams& params, uint32_t shared,
                                          SharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  // Loads the bias of the KV tiles that each warpgroup visits.
  __device__ __forceinline__ void load(const volatile WorkTile<Config::kConsumers>& work_tile) {
    using Panels = BiasPanels<Config::kTileKv>;
    const int32_t element = dtype_size(params_.problem.dtype_bias);
    const int32_t begin = work_tile.kv_begin;
#pragma unroll 1
    for (int32_t n = work_tile.kv_end - 1; n >= begin; --n) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < Config::kConsumers; ++warpgroup) {
        const volatile WarpgroupTile& rows = work_tile.warpgroups[warpgroup];
        if (n < rows.kv_begin || n >= rows.kv_end) continue;
#pragma unroll 1
        for (int32_t p = 0; p < Panels::count(element); ++p) {
          const BiasState at = bias_state_[warpgroup];
          bias_state_[warpgroup].advance();
          storage_.bias.producer_acquire(at, warpgroup);
          if (!ptx::elect()) continue;
          storage_.bias.producer_expect(at, kBiasPanelRows * Panels::row_bytes(element), warpgroup);
          ptx::tma_load(shared_ + Config::kBiasOffset +
                            (warpgroup * Config::kBiasStages + at.stage()) * kBiasPanelBytes,
                        &params_.bias, storage_.bias.full_barrier(at, warpgroup).address(),
                        {n * Config::kTileKv + p * Panels::columns(element),
                         work_tile.query + warpgroup * kWarpgroupRows, work_tile.h, work_tile.b},
                        ptx::kEvictNormal);
        }
      }
    }
  }

 private:
  const ForwardParams& params_;
  SharedStorage<Config>& storage_;
  const uint32_t shared_;
  BiasState bias_state_[Config::kConsumers];
};

// Producer of K, of V or of both. The producer of K also loads Q if Q has no producer warp.
template <class Config>
class KvProducer {
 public:
  __device__ __forceinline__ KvProducer(const ForwardParams& params, uint32_t shared,
                                        SharedStorage<Config>& storage, bool loads_k, bool loads_v)
      : params_(params),
        storage_(storage),
        loads_k_(loads_k),
        loads_v_(loads_v),
        q_producer_(params, shared, storage),
        walk_(params, storage),
        k_(shared + Config::kKOffset),
        v_(shared + Config::kVOffset),
        leader_(threadIdx.x % 32 == 0) {}

  __device__ __forceinline__ void run() {
    for_each_work_tile(storage_, [this](const auto& work_tile) { load(work_tile); });
    if constexpr (Config::kTransposesV) {
      begin_raw_v_tile(kNoMoreTiles);
      if (leader_) storage_.raw_v.producer_commit(raw_v_state_);
    }
  }

 private:
  // The L2 policy of the loads of K and V.
  __device__ __forceinline__ uint64_t kv_policy() const {
    if constexpr (Config::kPacksHeads) {
      if (params_.packed.evict_kv_first) return ptx::kEvictFirst;
    }
    return ptx::kEvictLast;
  }

  // Coordinates of a sequence in K and V: `first`, its first row, and `count`, its number of keys.
  // v_tile: with E4M3, index of its first tile of V^T, over (tile, KV head).
  struct KvSource {
    int32_t first, head, batch, count;
    int64_t v_tile;
  };

  // Paged KV: lane n holds the page, and the row in it, of TMA box n of a tile.
  struct PageBox {
    int32_t page, row;
  };

  using Walk = std::conditional_t<kMayHideTiles<Config>,
                                  BlockSparseWalk<Config, SharedStorage<Config>>, DenseWalk>;

  __device__ __forceinline__ void load(const volatile WorkTile<Config::kConsumers>& work_tile) {
    const bool varlen_kv = params_.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    const KvSource keys{static_cast<int32_t>(work_tile.offset_kv),
                        work_tile.h / params_.problem.q_heads_per_kv_head(),
                        varlen_kv ? 0 : work_tile.b, work_tile.len.kv,
                        Config::kIsFp8 && !Config::kTransposesV ? first_v_tile(work_tile) : 0};
    const int32_t begin = work_tile.kv_begin;
    int32_t n = work_tile.kv_end - 1;
    if (n < begin) {
      // Rows see no key. Q is still loaded, as the consumer's O may use its buffer.
      if (!Config::kQProducerWarp && loads_k_) q_producer_.load(work_tile);
      if (loads_v_) signal_prefetch_next();
      return;
    }
    walk_.start();
    PageBox page = look_up_page(keys, n);
    // K first, as its stage is free sooner; but Q where the work tile before may have been short.
    const bool loads_q = !Config::kQProducerWarp && loads_k_;
    if (kMayHideTiles<Config> && loads_q) q_producer_.load(work_tile);
    if (loads_k_) load_k_tile(keys, n, page);
    if (!kMayHideTiles<Config> && loads_q) q_producer_.load(work_tile);
    bool signalled = !loads_v_;
    // K of the next tile is loaded before V of this one: it is needed first.
#pragma unroll 1
    while (n >= begin) {
      if (!signalled && walk_.few_left(n, begin)) {
        signal_prefetch_next();
        signalled = true;
      }
      const PipelineState<Config::kStages> v_state = kv_state_;
      kv_state_.advance();
      const int32_t after = walk_.after(n, begin);
      const PageBox page_after = look_up_page(keys, after);
      if (after >= begin && loads_k_) load_k_tile(keys, after, page_after);
      if constexpr (Config::kTransposesV) {
        begin_raw_v_tile(min(keys.count - n * Config::kTileKv, Config::kTileKv));
        load_kv_tile<Config::kPanelsQk>(params_.v, v_, storage_.raw_v, raw_v_state_, keys, n, page);
        raw_v_state_.advance();
      } else if constexpr (Config::kIsFp8) {
        if (loads_v_) load_transposed_v_tile(v_state, keys, n);
      } else if (loads_v_) {
        load_kv_tile<Config::kPanelsV>(params_.v, v_, storage_.v, v_state, keys, n, page);
      }
      n = after;
      page = page_after;
    }
  }

  __device__ __forceinline__ int64_t
  first_v_tile(const volatile WorkTile<Config::kConsumers>& work_tile) const {
    const HeadTiles tiles =
        HeadTiles::of_keys(params_.problem, params_.args.shape, Config::kTileKv);
    return tiles.first(work_tile.offset_kv, work_tile.b) * params_.problem.heads_kv +
           work_tile.h / params_.problem.q_heads_per_kv_head();
  }

  // Few loads of this work tile are left: the scheduler may plan the next.
  __device__ __forceinline__ void signal_prefetch_next() {
    if (leader_) storage_.prefetch_next.arrive();
  }

  // Called before the wait for a buffer, which hides the latency of the page table. Boxes past the
  // last key get a page past the last, which TMA reads as 0.
  __device__ __forceinline__ PageBox look_up_page(const KvSource& keys, int32_t n) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return {};
    const int32_t lane = threadIdx.x % 32, own = n * Config::kTileKv + lane * params_.kv_box_rows;
    if (lane * params_.kv_box_rows >= Config::kTileKv || own < 0 || own >= keys.count) {
      return {INT32_MAX, 0};
    }
    const Inputs& in = params_.args.inputs;
    const int32_t page_idx = own / params_.problem.page_size;
    return {in.page_table[keys.batch * in.page_table_stride + page_idx],
            own - page_idx * params_.problem.page_size};
  }

  __device__ __forceinline__ void load_k_tile(const KvSource& keys, int32_t n, PageBox own) {
    if constexpr (kMayHideTiles<Config>) {
      storage_.k.producer_acquire(kv_state_);
      if (leader_)
        storage_.stage_tiles[kv_state_.stage()] = StageTile<Config::kConsumers>::of(walk_, n).word;
    }
    load_kv_tile<Config::kPanelsQk>(params_.k, k_, storage_.k, kv_state_, keys, n, own);
  }

  // Loads tile n of K or V once consumers have released the stage.
  template <int kPanels, int kStages>
  __device__ __forceinline__ void load_kv_tile(const CUtensorMap& map, uint32_t buffers,
                                               Pipeline<kStages>& pipeline,
                                               const PipelineState<kStages>& at,
                                               const KvSource& keys, int32_t n, PageBox own) {
    constexpr int kBytes = Config::kTileKv * kPanels * Config::kPanelBytes;
    const uint32_t to = buffers + at.stage() * kBytes, full = pipeline.full_barrier(at).address();
    pipeline.producer_acquire(at);
    if (leader_) pipeline.producer_expect(at, kBytes);
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) {
      if (!ptx::elect()) return;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load(
            to + p * Config::kTileKv * Config::kPanelBytes, &map, full,
            {p * Config::kPanelColumns, keys.first + n * Config::kTileKv, keys.head, keys.batch},
            kv_policy());
      }
      return;
    }
    const int32_t box = params_.kv_box_rows;
#pragma unroll 1
    for (int32_t x = 0, row = 0; row < Config::kTileKv; ++x, row += box) {
      const PageBox its{__shfl_sync(~0u, own.page, x), __shfl_sync(~0u, own.row, x)};
      if (!ptx::elect()) continue;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::tma_load(to + (p * Config::kTileKv + row) * Config::kPanelBytes, &map, full,
                      {p * Config::kPanelColumns, its.row, keys.head, its.page}, kv_policy());
      }
    }
  }

  // kTransposesV: waits for a stage, and says how many keys its tile has.
  __device__ __forceinline__ void begin_raw_v_tile(int32_t keys) {
    storage_.raw_v.producer_acquire(raw_v_state_);
    if (leader_) storage_.raw_v_keys[raw_v_state_.stage()] = keys;
  }

  // E4M3: loads tile n of V^T, which fp8_transpose_v.cu has written as it lies in shared memory.
  __device__ __forceinline__ void load_transposed_v_tile(const PipelineState<Config::kStages>& at,
                                                         const KvSource& keys, int32_t n) {
    storage_.v.producer_acquire(at);
    if (!ptx::elect()) return;
    storage_.v.producer_expect(at, Config::kVBytes);
    ptx::bulk_load(v_ + at.stage() * Config::kVBytes,
                   params_.v_transposed +
                       (keys.v_tile + n * int64_t{params_.problem.heads_kv}) * Config::kVBytes,
                   Config::kVBytes, storage_.v.full_barrier(at).address());
  }

  const ForwardParams& params_;
  SharedStorage<Config>& storage_;
  const bool loads_k_, loads_v_;
  QProducer<Config> q_producer_;
  Walk walk_;
  const uint32_t k_, v_;
  const bool leader_;
  PipelineState<Config::kStages> kv_state_;
  typename RawVPipeline<Config, Config::kTransposesV>::State raw_v_state_;
};

}  // namespace flashattn::cuda::sm90
