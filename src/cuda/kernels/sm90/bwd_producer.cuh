// Producer of all loads of the Hopper backward pass, one thread. The threads that add dQ:
// dq_reduce.cuh.
#pragma once

#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"

namespace flashattn::cuda::sm90 {

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
    // With one stage of K, consumers wait for the next K: it is brought to L2 ahead.
    if constexpr (Config::kKStages == 1 && Config::kEarlyReleaseK) {
      prefetch_kv_tile<Config::kPanelsQk>(params_.k, work_tile);
      prefetch_kv_tile<Config::kPanelsV>(params_.v, work_tile);
    }
    const auto load = [&](int32_t heads, int32_t tile, int32_t workspace_tile, QTileEntry entry) {
      // Two K stages: K is loaded before Q, while the previous work tile is still running.
      constexpr bool kEarly = Config::kKStages > 1;
      {
        const PipelineState<Config::kQStages> at{iter_};
        const uint32_t full = storage_.q.full_barrier(at).address();
        storage_.q.producer_acquire(at);
        if constexpr (Config::kHasScoreMod)
          storage_.alibi_slopes[at.stage()] = slope_of(work_tile, heads);
        if constexpr (Config::kHasBlockMask) storage_.q_tile_entries[at.stage()] = entry.word;
        expect<Config::kPanelsQk, kPeerKPanels>(storage_.q, at, first);
        if (kEarly && first) load_k(work_tile);
        load_q_tile<Config::kPanelsQk>(params_.q,
                                       shared_ + Config::kQ + at.stage() * Config::kQBytes, full,
                                       work_tile, heads, tile);
        load_row_stats(params_.common.lse2, Config::kLse, at.stage(), full, workspace_tile);
      }
      // The bias is loaded before dO, whose stage becomes free later than one of dS.
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
      // The scheduler may plan the next work tile 128 queries before the end of this one, or after
      // its first Q tile, whichever is later.
      if (iter_ == max(work_tile.iter_end, work_tile.iter_begin + 1 + kPrefetchNextTiles) -
                       kPrefetchNextTiles) {
        storage_.prefetch_next.arrive();
      }
    };
    for_each_tile<Config>(work_tile, params_, load);
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
    if (!Alibi::is_on(params_.common.problem)) return 0.0f;
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
    load_panels<kTileKv, kPanels, false, kInSlots>(map, to, full, kv_box(work_tile, key, column),
                                                   ptx::kEvictFirst);
  }

  // Brings K or V of a work tile to L2, while the work tile before it runs.
  template <int kPanels>
  __device__ __forceinline__ void prefetch_kv_tile(
      const CUtensorMap& map, const volatile BwdWorkTile<Config>& work_tile) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tma_prefetch_l2(&map, kv_box(work_tile, work_tile.key, p * 64));
  }

  __device__ __forceinline__ ptx::TmaCoord kv_box(const volatile BwdWorkTile<Config>& work_tile,
                                                  int32_t key, int32_t column) const {
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    return {column, work_tile.offset_kv + key, work_tile.kv_head, varlen ? 0 : work_tile.b};
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
