// Base of the mainloops of the Hopper backward kernels' consumer warpgroups and of their parts:
// work tiles, addresses, WGMMAs, dS to shared memory, stream-K, stores of dK and dV. It holds no
// state: what a mainloop and its parts copy of it costs no register.
#pragma once

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/sm90/bwd_q_tiles.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/smem_tile.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdWarpgroupBase {
 public:
  // Panels of the bias of a consumer's 64 keys and a Q tile.
  using BiasTile = BiasPanels<64>;
  static __device__ __forceinline__ uint32_t bias_panel(uint32_t shared,
                                                        PipelineState<Config::kBiasStages> at,
                                                        int32_t consumer) {
    return shared + Config::kBias + (consumer * Config::kBiasStages + at.stage()) * kBiasPanelBytes;
  }
  // As above, for a bias in a stage of dS (kBiasInDs).
  static __device__ __forceinline__ uint32_t ds_bias_panel(uint32_t shared,
                                                           PipelineState<Config::kDsStages> at,
                                                           int32_t panel) {
    static_assert(!Config::kBiasInDs || Config::kDsBytes == 2 * kBiasPanelBytes, "two panels");
    return shared + Config::kDs + at.stage() * Config::kDsBytes + panel * kBiasPanelBytes;
  }

 protected:
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kSliceQ = Config::kSliceQ;  // queries per WGMMA
  // This lane's accumulators of S^T or dP^T: element 4 n + 2 h + e is key row() + 8 h, query 8 n +
  // 2 (lane % 4) + e.
  using SAccum = float[kSliceQ / 2];
  using PFragment = uint32_t[kSliceQ / 4];  // P^T or dS^T, in pairs of queries: pair 2 n + h
  // Dropout on two slices of queries: signs of both are held.
  static constexpr bool kHasSlicedDropout = Config::kIsDropout && kTileQ > kSliceQ;
  // Registers are scarce then, and with dropout where P is staged.
  static constexpr bool kLacksRegisters =
      kHasSlicedDropout || (Config::kIsDropout && Config::kStagePInDs);
  using QState = PipelineState<Config::kQStages>;
  using DoutState = PipelineState<Config::kDoStages>;
  using DsState = PipelineState<Config::kDsStages>;

  __device__ __forceinline__ BwdWarpgroupBase(const BackwardParams& params, uint32_t shared,
                                              BwdSharedStorage<Config>& storage, int32_t consumer)
      : params_(params), storage_(storage), shared_(shared), consumer_(consumer) {}

  // Volatile: fields are read from shared memory at each use, which saves registers for the
  // mainloop.
  __device__ __forceinline__ const volatile BwdWorkTile<Config>& work_tile() const {
    return storage_.consumer_work_tile[consumer_];
  }
  __device__ __forceinline__ const volatile Interval& full() const {
    return work_tile().q_spans[Config::kSkipMaskedTiles ? consumer_ : 0].full;
  }
  __device__ __forceinline__ bool leader() const { return no_hoist(threadIdx.x) % 128 == 0; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return no_hoist(threadIdx.x) % 128 / 32; }
  // The first of this lane's two keys in the KV tile; the other is row() + 8.
  __device__ __forceinline__ int32_t row() const {
    return consumer_ * 64 + warp() * 16 + lane() / 4;
  }

  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kWarpgroupBarrier + consumer_, 128);
  }

  // Factor of dV, and of dP in dS: the unit of P, times the scale of the elements that dropout
  // keeps.
  __device__ __forceinline__ float p_scale() const {
    constexpr float kUnit = kPUnit<typename Config::T>;
    if constexpr (!Config::kIsRuntime && !Config::kIsDropout) return kUnit;
    // A division in each step takes registers. Other kernels would spill without, by chance.
    if constexpr (kHasSlicedDropout) return kUnit * params_.keep_scale;
    return kUnit * Dropout::keep_scale(params_.common.dropout_threshold);
  }

  // Copies the next work tile from its stage; false: there is none. The count of work tiles is in
  // shared memory, which saves registers for the mainloop.
  __device__ __forceinline__ bool next_work_tile() const {
    volatile uint32_t& taken = storage_.work_tiles_taken[consumer_];
    const WorkTileState at{taken};
    storage_.work.consumer_wait(at);
    constexpr int kWords = sizeof(BwdWorkTile<Config>) / 4;
    static_assert(kWords <= 128, "each thread of a warpgroup copies one word");
    const int32_t n = no_hoist(threadIdx.x) % 128;
    if (n < kWords) {
      reinterpret_cast<uint32_t*>(&storage_.consumer_work_tile[consumer_])[n] =
          reinterpret_cast<const uint32_t*>(&storage_.work_tiles[at.stage()])[n];
    }
    warpgroup_sync();
    if (leader()) {
      taken = at.count + 1;
      storage_.work.consumer_release(at);
    }
    return !work_tile().end;
  }

  // Calls work() for each work tile.
  template <class Work>
  __device__ __forceinline__ void for_each_work_tile(Work work) const {
    while (next_work_tile()) {
      work();
      warpgroup_sync();  // no warp reads the work tile any more
    }
  }

  // Finds the queries that see each key, unless every query sees every key. Two kinds of kernel
  // always need them: bwd_two_warpgroup.cuh masks the first Q tile in any case; with
  // kSplitsBlockMask, tiles that a block mask hides in part are masked.
  __device__ __forceinline__ void find_visible_queries() const {
    const bool all =
        full().begin <= work_tile().q_tiles.begin && full().end >= work_tile().q_tiles.end;
    if (all && !Config::kConsumersComputeDq && !Config::kSplitsBlockMask) return;
    const Lengths len{work_tile().len.q, work_tile().len.kv};
    const int32_t key = work_tile().key, keys = work_tile().keys;
    if (lane() < 16) {
      const int32_t r = row() - lane() / 4 + lane();
      Interval seen{0, 0};
      if (r < keys) seen = visible_queries(params_.common.problem.mask_rule(), key + r, len);
      storage_.visible_queries[r] = {seen.begin, max(seen.end, seen.begin)};
    }
    __syncwarp();
  }

  // Kinds of a Q tile, as bits. kFull: every query sees every key. kLast: it is the work tile's
  // last. kFullyMasked: no query sees a key of this warpgroup. kLargeLse: rows may have a
  // BackwardParams::softmax_base. kPartlyMasked: a block mask hides some of the warpgroup's keys.
  static constexpr uint32_t kNoTile = 0, kValid = 1, kFull = 2, kLast = 4, kFullyMasked = 8,
                            kLargeLse = 16, kPartlyMasked = 32;

  // The Q tile of a q_coord, see kCoordHead.
  static __device__ __forceinline__ int32_t q_tile_of(int32_t q_coord) {
    return Config::kCoordHasHead ? q_coord & (kCoordHead<Config> - 1) : q_coord;
  }

  // Sets q_coord and its kind to the first Q tile of the work tile. count: Q tiles done before.
  __device__ __forceinline__ void begin(int32_t& q_coord, uint32_t& kind, uint32_t count) const {
    if constexpr (Config::kHasBlockMask) return take_entry(q_coord, kind, count);
    q_coord = work_tile().first_q_tile;
    kind = next_kind(q_coord, count);
  }

  __device__ __forceinline__ void advance(int32_t& q_coord, uint32_t& kind, uint32_t count) const {
    if constexpr (Config::kHasBlockMask) return take_entry(q_coord, kind, count);
    if constexpr (Config::kCoordHasHead) {
      kind = kNoTile;
      if (count == work_tile().iter_end) return;
      const int32_t tile = next_q_tile(work_tile(), q_tile_of(q_coord));
      q_coord = (q_coord & ~(kCoordHead<Config> - 1)) +
                (tile == work_tile().first_q_tile ? kCoordHead<Config> : 0) + tile;
    } else {
      q_coord = next_q_tile(work_tile(), q_coord);
    }
    kind = next_kind(q_coord, count);
  }

  // Takes the entry of the next Q tile, which arrives with Q: all that follows needs Q, too.
  __device__ __forceinline__ void take_entry(int32_t& q_coord, uint32_t& kind,
                                             uint32_t count) const {
    kind = kNoTile;
    if (count == work_tile().iter_end) return;
    const QState at{count};
    storage_.q.consumer_wait(at);
    const QTileEntry entry{
        static_cast<const volatile uint32_t&>(storage_.q_tile_entries[at.stage()])};
    if (Config::kSplitsDs && !entry.shows_any(consumer_)) {
      kind = kValid | kFullyMasked | (count + 1 == work_tile().iter_end ? kLast : 0);
      return;
    }
    q_coord = entry.q_coord();
    kind = next_kind(q_coord, count, entry);
  }

  // The kind of a Q tile. count: Q tiles done before it, in this work tile and earlier ones.
  __device__ __forceinline__ uint32_t next_kind(int32_t q_coord, uint32_t count,
                                                QTileEntry entry = {}) const {
    const int32_t tile = q_tile_of(q_coord);
    const uint32_t left = work_tile().iter_end - count;
    if (left == 0) return kNoTile;
    const int32_t full_end = full().end;
    const bool all = tile >= full().begin && tile < full_end;
    uint32_t kind = kValid | (all ? kFull : 0) | (left == 1 ? kLast : 0) |
                    (full_end == kHasLargeLse ? kLargeLse : 0);
    if constexpr (Config::kSkipMaskedTiles && !Config::kSplitsDs) {
      const volatile Interval& any = work_tile().q_spans[consumer_].any;
      if (tile < any.begin || tile >= any.end) kind |= kFullyMasked;
    }
    if constexpr (Config::kSplitsBlockMask) {
      // A CTA of a cluster has half of the keys, otherwise a consumer.
      const int32_t half =
          Config::kSplitRoles ? static_cast<int32_t>(cta_rank<Config>()) : consumer_;
      if (!entry.shows_all(half)) kind = (kind & ~kFull) | kPartlyMasked;
      if (!entry.shows_any(half)) kind |= kFullyMasked;
    }
    return kind;
  }

  __device__ __forceinline__ uint32_t q_address(QState at) const {
    return shared_ + Config::kQ + at.stage() * Config::kQBytes;
  }
  __device__ __forceinline__ uint32_t dout_address(DoutState at) const {
    return shared_ + Config::kDo + at.stage() * Config::kDoBytes;
  }

  // Q and dO of a Q tile, from the first query of a slice on.
  __device__ __forceinline__ ptx::SmemDescriptor q(QState at, int slice = 0) const {
    return ptx::SmemDescriptor::at(q_address(at), 0).advance(slice * kSliceQ * 128);
  }
  __device__ __forceinline__ ptx::SmemDescriptor dout(DoutState at, int slice = 0) const {
    // Small heads have as many stages of dO as of Q: one address serves both.
    if constexpr (!Config::kSplitRoles && Config::kQBytes == Config::kDoBytes)
      return q(at, slice).advance(Config::kDo - Config::kQ);
    return ptx::SmemDescriptor::at(dout_address(at), 0);
  }

  // Small heads: this warpgroup's rows of V.
  __device__ __forceinline__ ptx::SmemDescriptor v() const {
    return ptx::SmemDescriptor::at(shared_ + Config::kV + consumer_ * 64 * 128, 0);
  }

  // x = keys * rows^T for this warpgroup's 64 keys: S^T = K Q^T (kIsS) or dP^T = V dO^T.
  template <int kWidth, bool kIsS = false>
  __device__ __forceinline__ void gemm_ss(SAccum& x, ptx::SmemDescriptor keys,
                                          ptx::SmemDescriptor rows) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      const int panel = kIsS ? k_slot<Config>(n / 4) : n / 4;
      ptx::wgmma_ss<T, 0, 0>(x, keys.advance(panel * kTileKv * 128 + n % 4 * 32).descriptor(),
                             rows.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // acc += a * rows: dV += P^T dO or dK += dS^T Q.
  template <int kAccRegs>
  __device__ __forceinline__ void gemm_rs(float (&acc)[kAccRegs], const PFragment& a,
                                          ptx::SmemDescriptor rows) const {
    const ptx::SmemDescriptor across{rows.low | kTileQ * 128 >> 4 << 16};
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kSliceQ / 16; ++n) {
      ptx::wgmma_rs<T, 1>(acc, &a[4 * n], across.advance(n * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  // Address of this lane's first two values of lse or delta, in a slice (kSliceQ queries, those of
  // one WGMMA) of a Q tile.
  template <int kFirst>
  __device__ __forceinline__ uint32_t row_stat_address(uint32_t stage, int slice) const {
    return shared_ + kFirst + stage * Config::kRowStatBytes + slice * kSliceQ * 4 + lane() % 4 * 8;
  }

  // The substage of dS that this warpgroup fills.
  __device__ __forceinline__ int32_t ds_substage() const {
    return Config::kSplitsDs ? consumer_ : 0;
  }
  // Signals the dQ warpgroup that this warp has stored its dS.
  __device__ __forceinline__ void commit_ds(DsState at) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) storage_.ds.producer_commit(at, ds_substage());
  }

  // The bases of this lane's queries of a slice, see BackwardParams::softmax_base. count: Q
  // tiles done.
  __device__ __forceinline__ const volatile float* bases_at(int32_t q_coord, uint32_t count,
                                                            int slice) const {
    const int32_t tiles = work_tile().q_tiles.end - work_tile().q_tiles.begin;
    const int32_t head = Config::kCoordHasHead
                             ? q_coord / kCoordHead<Config>
                             : static_cast<int32_t>(count - work_tile().iter_begin) / tiles;
    const int64_t tile =
        work_tile().workspace_tile + head * params_.head_q_tiles + q_tile_of(q_coord);
    return params_.common.softmax_base + (tile * kTileQ + slice * kSliceQ + lane() % 4 * 2);
  }

  // Address at which this lane stores dS of the first 16 queries of a slice: one row per query,
  // keys in panels of 64, one panel per warpgroup.
  __device__ __forceinline__ uint32_t ds_address(uint32_t stage, int slice) const {
    const int32_t panel = Config::kTileKv == 64 ? 0 : consumer_;
    const int32_t query = lane() % 8 + lane() / 16 * 8, chunk = warp() * 2 + lane() / 8 % 2;
    return shared_ + Config::kDs + stage * Config::kDsBytes + panel * kTileQ * 128 +
           (slice * kSliceQ + query) * 128 + ((chunk ^ (query & 7)) << 4);
  }

  // Stores dS, for dQ over all keys, or P that is staged there.
  __device__ __forceinline__ void store_ds(const PFragment& ds, uint32_t stage,
                                           int slice = 0) const {
    const uint32_t to = ds_address(stage, slice);
#pragma unroll
    for (int n = 0; n < kSliceQ / 16; ++n) {
      ptx::stmatrix_x4_trans(to + n * 2048, ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    }
  }

  // Both warpgroups write the same zeros, and each waits for its own writes only.
  __device__ __forceinline__ void fence_cleared_rows() const {
    ptx::fence_async_proxy();
    warpgroup_sync();
  }

  // Small heads: zeros rows of K past the last key: their dS is 0, but they may be NaN.
  __device__ __forceinline__ void zero_k_tail(QState at, uint32_t keys) const {
    if (!params_.kv_has_tail || work_tile().keys >= kTileKv) return;
    storage_.q.consumer_wait(at);
    clear_rows<Config::kPanelsQk>(keys, kTileKv, work_tile().keys);
    fence_cleared_rows();
  }

  // Whether rows of the Q tile lie past the last query and may hold anything.
  __device__ __forceinline__ bool has_q_tail(int32_t tile) const {
    return params_.q_has_tail && (tile + 1) * kTileQ > work_tile().len.q;
  }

  // Small heads: zeros rows of Q and dO past the last query: their P is 0, but they may be NaN. The
  // condition is spelled out: the value of has_q_tail() would be computed in every step.
  __device__ __forceinline__ void zero_q_tail(QState at, int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= work_tile().len.q) return;
    const int32_t first = work_tile().len.q - tile * kTileQ;
    storage_.q.consumer_wait(at);
    storage_.dout.consumer_wait(at);
    clear_rows<Config::kPanelsQk>(q_address(at), kTileQ, first);
    clear_rows<Config::kPanelsV>(dout_address(at), kTileQ, first);
    fence_cleared_rows();
  }

  // Releases delta and dO of the Q tile. Each warp arrives for itself: another may not have read
  // its delta yet.
  __device__ __forceinline__ void release_dout(QState at) const {
    __syncwarp();
    if (lane() == 0) storage_.dout.consumer_release(at);
  }

  // Releases Q and lse of the Q tile. With kSplitsDs each warp arrives for
  // itself: a skipped tile has no barrier of the warpgroup.
  __device__ __forceinline__ void release_q(QState at) const {
    if constexpr (Config::kSplitsDs) __syncwarp();
    if (Config::kSplitsDs ? lane() == 0 : leader()) storage_.q.consumer_release(at);
  }

  // Releases K and V of the work tile, unless they were released early.
  __device__ __forceinline__ void release_kv() const {
    if (Config::kEarlyReleaseK && Config::kEarlyReleaseV) return;
    if (!leader() || work_tile().iter_end == work_tile().iter_begin) return;
    release_k(storage_, work_tile());
    if (!Config::kEarlyReleaseV) release_v();
  }
  __device__ __forceinline__ void release_v() const { storage_.v_empty.arrive({}); }

  // Stream-K: stores this CTA's partial dK and dV of a split KV tile. The last CTA to arrive adds
  // up all partials, in the order of their indices. Returns false if another CTA will store the
  // result.
  template <int kAccRegs, class Acc>
  __device__ __forceinline__ bool reduce_partials(Acc acc) const {
    const int32_t partials = work_tile().partials;
    if (!Config::kStreamK || partials == 1) return true;
    constexpr int kQuads = kAccRegs / 4,
                  kClusterConsumers = kClusterSize<Config> * Config::kConsumers;
    int32_t consumer = static_cast<int32_t>(cta_rank<Config>()) * Config::kConsumers + consumer_;
    if constexpr (kHasSlicedDropout) consumer = no_hoist(consumer);
    const auto at = [&](int32_t partial) {
      return reinterpret_cast<float4*>(params_.partials) +
             (static_cast<int64_t>(partial) * kClusterConsumers + consumer) *
                 (Config::kAccRegs / 4 * 128) +
             no_hoist(threadIdx.x) % 128;
    };
    float4* const own = at(work_tile().partial);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      own[n * 128] = make_float4(acc(4 * n), acc(4 * n + 1), acc(4 * n + 2), acc(4 * n + 3));
    }
    ptx::fence_gpu();
    warpgroup_sync();
    volatile int32_t& arrived = storage_.partials_arrived[consumer_];
    if (leader())
      arrived = atomicAdd(
          params_.common.arrived + work_tile().split_tile * kClusterConsumers + consumer, 1);
    warpgroup_sync();
    if (arrived != partials - 1) return false;
    ptx::fence_gpu();
#pragma unroll
    for (int i = 0; i < kAccRegs; ++i) acc(i) = 0.0f;
#pragma unroll 1
    for (int32_t partial = 0; partial < partials; ++partial) {
      const float4* const from = at(work_tile().first_partial + partial);
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        const float4 x = ptx::load_cg(from + n * 128);
        acc(4 * n) += x.x;
        acc(4 * n + 1) += x.y;
        acc(4 * n + 2) += x.z;
        acc(4 * n + 3) += x.w;
      }
    }
    return true;
  }

  // Rows of dK and dV that a work tile stores.
  struct OutputTile {
    int32_t b, kv_head, keys;
    int64_t first;  // row of its first key
  };
  __device__ __forceinline__ OutputTile output_tile() const {
    return {work_tile().b, work_tile().kv_head, work_tile().keys,
            static_cast<int64_t>(work_tile().offset_kv) + work_tile().key};
  }

  // Stores dK or dV from registers: this lane's accumulators of keys `row` and `row + 8`, times the
  // factor.
  template <int kDim, class Acc>
  __device__ __forceinline__ void store_rows(const flashattn_tensor& tensor,
                                             const OutputTile& output_tile, int32_t dim,
                                             int32_t row, float factor, Acc acc) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = row + half * 8;
      char* to = tensor_row(tensor, 2, output_tile.b, output_tile.kv_head, output_tile.first + key);
      const int32_t columns = key < output_tile.keys ? dim : 0;
#pragma unroll
      for (int n = 0; n < kDim / 32; ++n) {
        PackedPair<T> pairs[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int i = (4 * n + w) * 4 + 2 * half;
          pairs[w] = PackedPair<T>::of(acc(i) * factor, acc(i + 1) * factor);
        }
        store_quad(pairs, to + n * 64, columns - n * 32, lane());
      }
    }
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
  const int32_t consumer_;  // warp-uniform
};

}  // namespace flashattn::cuda::sm90
