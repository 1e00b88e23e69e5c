// What the consumer warpgroups of the Hopper backward kernels have in common: their items, their
// products, and dS on its way.
#pragma once

#include "cuda/kernels/sm90/bwd_config.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/smem_tile.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardGroup {
 protected:
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kPartQ = Config::kPartQ;  // queries a product
  // This lane's: number 4 n + 2 h + e is of key row() + 8 h and query 8 n + 2 (lane % 4) + e.
  using Tile = float[kPartQ / 2];
  using Operand = uint32_t[kPartQ / 4];  // pairs of queries: number 2 n + h

  __device__ __forceinline__ BackwardGroup(const BackwardParams& params, uint32_t shared,
                                           BackwardControl<Config>& control, int32_t group)
      : params_(params), control_(control), shared_(shared), group_(group) {}

  // Read anew each time: registers are better used in the main loop.
  __device__ __forceinline__ const volatile BackwardItem<Config>& item() const {
    return control_.own[group_];
  }
  __device__ __forceinline__ const volatile Interval& full() const {
    return item().groups[Config::kSkips ? group_ : 0].full;
  }
  __device__ __forceinline__ bool leader() const { return no_hoist(threadIdx.x) % 128 == 0; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return no_hoist(threadIdx.x) % 128 / 32; }
  // Of the tile: the upper of this lane's two keys; the other is 8 below.
  __device__ __forceinline__ int32_t row() const { return group_ * 64 + warp() * 16 + lane() / 4; }

  // Copies the next item from its slot. Its number lies in shared memory: registers are better used
  // in the main loop.
  __device__ __forceinline__ void take() const {
    volatile uint32_t& taken = control_.taken[group_];
    const Items at{taken};
    ptx::mbarrier_wait(barrier_at(control_.item_full[at.slot()]), at.phase());
    constexpr int kWords = sizeof(BackwardItem<Config>) / 4;
    const int32_t n = no_hoist(threadIdx.x) % 128;
    if (n < kWords) {
      reinterpret_cast<uint32_t*>(&control_.own[group_])[n] =
          reinterpret_cast<const uint32_t*>(&control_.items[at.slot()])[n];
    }
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
    if (leader()) {
      taken = at.count + 1;
      ptx::mbarrier_arrive(barrier_at(control_.item_empty[at.slot()]));
    }
  }

  // Which queries see this lane's keys, if some do not. The kernel for many queries asks at all
  // events, of the first tile.
  __device__ __forceinline__ void look() const {
    const bool all = full().begin <= item().tiles.begin && full().end >= item().tiles.end;
    if (all && !Config::kLong) return;
    const Lengths len{item().len.q, item().len.kv};
    const int32_t key = item().key, keys = item().keys;
    if (lane() < 16) {
      const int32_t r = row() - lane() / 4 + lane();
      Interval seen{0, 0};
      if (r < keys) seen = visible_queries(params_.common.problem.mask_rule(), key + r, len);
      control_.visible[r] = {seen.begin, max(seen.end, seen.begin)};
    }
    __syncwarp();
  }

  // A tile of queries is there, sees all keys, is the item's last, sees none of this warpgroup's.
  static constexpr uint32_t kNone = 0, kSome = 1, kFull = 2, kLast = 4, kHidden = 8;

  // Consumers go from place to place: that is a tile of queries, and for some kernels a head of the
  // group too.
  static __device__ __forceinline__ int32_t tile_of(int32_t place) {
    return Config::kHeads ? place & kPlaceTile : place;
  }
  __device__ __forceinline__ bool is_seen_at(int32_t place) const {
    return is_seen<Config>(item(), params_, place / kPlaceHead, tile_of(place));
  }

  // `count` tiles are done. The first place, and its kind.
  __device__ __forceinline__ void begin(int32_t& place, uint32_t& kind, uint32_t count) const {
    place = item().start;
    kind = next_kind(tile_of(place), count);
    if (!Config::kAny || kind == kNone || is_seen_at(place)) return;
    advance(place, kind, count);
  }

  __device__ __forceinline__ void advance(int32_t& place, uint32_t& kind, uint32_t count) const {
    if constexpr (Config::kHeads) {
      kind = kNone;
      if (count == item().done) return;
      do {
        const int32_t tile = tile_after(item(), tile_of(place));
        place = (place & ~kPlaceTile) + (tile == item().start ? kPlaceHead : 0) + tile;
      } while (!is_seen_at(place));
    } else {
      place = tile_after(item(), place);
    }
    kind = next_kind(tile_of(place), count);
  }

  // After `count` tiles, of the item and of those before.
  __device__ __forceinline__ uint32_t next_kind(int32_t tile, uint32_t count) const {
    const uint32_t left = item().done - count;
    if (left == 0) return kNone;
    const bool all = tile >= full().begin && tile < full().end;
    uint32_t kind = kSome | (all ? kFull : 0) | (left == 1 ? kLast : 0);
    if constexpr (Config::kSkips) {
      const volatile Interval& some = item().groups[group_].some;
      if (tile < some.begin || tile >= some.end) kind |= kHidden;
    }
    return kind;
  }

  // x = keys rows^T of this warpgroup's 64 keys: S^T or dP^T.
  template <int kWidth>
  __device__ __forceinline__ void multiply_rows(Tile& x, ptx::SmemDescriptor keys,
                                                ptx::SmemDescriptor rows) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      ptx::wgmma_ss<T, 0, 0>(x, keys.advance(n / 4 * kTileKv * 128 + n % 4 * 32).descriptor(),
                             rows.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // sum += weights rows: P^T dO or dS^T Q.
  template <int kSums>
  __device__ __forceinline__ void add_product(float (&sum)[kSums], const Operand& weights,
                                              ptx::SmemDescriptor rows) const {
    const ptx::SmemDescriptor across{rows.low | kTileQ * 128 >> 4 << 16};
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      ptx::wgmma_rs<T, 1>(sum, &weights[4 * n], across.advance(n * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  // Where this lane's first two lse, or D, of a part of the tile lie.
  template <int kFirst>
  __device__ __forceinline__ uint32_t numbers(uint32_t slot, int part) const {
    return shared_ + kFirst + slot * Config::kNumberBytes + part * kPartQ * 4 + lane() % 4 * 8;
  }

  // Until dQ of the tile whose dS lay there is done, the partner's too.
  __device__ __forceinline__ void await_ds(PipelineState<Config::kDsStages> at) const {
    ptx::mbarrier_wait(barrier_at(control_.ds_empty[at.slot()]), at.phase() ^ 1);
  }

  // dS has been stored for the warpgroup that computes dQ.
  __device__ __forceinline__ void hand_over_ds(PipelineState<Config::kDsStages> at) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.ds_full[at.slot()]));
  }

  // Where this lane stores dS, of the first 16 queries of a part: a row a query, keys in panels of
  // 64, one a warpgroup.
  __device__ __forceinline__ uint32_t ds_place(uint32_t slot, int part) const {
    const int32_t panel = Config::kTileKv == 64 ? 0 : group_;
    const int32_t query = lane() % 8 + lane() / 16 * 8, chunk = warp() * 2 + lane() / 8 % 2;
    return shared_ + Config::kDs + slot * Config::kScoreBytes + panel * kTileQ * 128 +
           (part * kPartQ + query) * 128 + ((chunk ^ (query & 7)) << 4);
  }

  // dS for the dQ of all keys; or weights that wait there.
  __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t slot, int part = 0) const {
    const uint32_t to = ds_place(slot, part);
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      ptx::stmatrix_x4_trans(to + n * 2048, ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    }
  }

  // Rows from `first` on of a tile: both warpgroups write the same zeros, and each waits for its
  // own.
  template <int kPanels>
  __device__ __forceinline__ void clear_rows(uint32_t tile, int32_t rows, int32_t first) const {
    const int32_t count = rows - max(first, 0);
    for (int32_t x = no_hoist(threadIdx.x) % 128; x < count * 8 * kPanels; x += 128) {
      const int32_t r = rows - count + x / 8 % count, panel = x / 8 / count;
      ptx::store_shared(tile + (panel * rows + r) * 128 + x % 8 * 16, 0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ __forceinline__ void settle_cleared() const {
    ptx::fence_async_proxy();
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
  }

  // This warpgroup needs K of the item no more, nor V, which may be free already.
  __device__ __forceinline__ void free_keys() const {
    if (!leader() || item().done == item().before) return;
    free_k(control_, item());
    if (!Config::kFreesV) free_v();
  }
  __device__ __forceinline__ void free_v() const {
    ptx::mbarrier_arrive(barrier_at(control_.v_empty));
  }

  // Of a tile of keys that several blocks share: leaves this one's sums; who comes last has those
  // of all, added up in the order of the pieces. False: another will store them.
  template <int kSums, class Sums>
  __device__ __forceinline__ bool unite(Sums sums) const {
    const int32_t pieces = item().partials;
    if (!Config::kStreamK || pieces == 1) return true;
    constexpr int kQuads = kSums / 4, kGroups = kBlocks<Config> * Config::kConsumers;
    const int32_t group = static_cast<int32_t>(block_rank<Config>()) * Config::kConsumers + group_;
    const auto at = [&](int32_t piece) {
      return reinterpret_cast<float4*>(params_.partials) +
             (static_cast<int64_t>(piece) * kGroups + group) * (Config::kSums / 4 * 128) +
             no_hoist(threadIdx.x) % 128;
    };
    float4* const own = at(item().partial);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      own[n * 128] = make_float4(sums(4 * n), sums(4 * n + 1), sums(4 * n + 2), sums(4 * n + 3));
    }
    ptx::fence_gpu();
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
    volatile int32_t& arrived = control_.arrived[group_];
    if (leader())
      arrived = atomicAdd(params_.common.arrived + item().split_tile * kGroups + group, 1);
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
    if (arrived != pieces - 1) return false;
    ptx::fence_gpu();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums(i) = 0.0f;
#pragma unroll 1
    for (int32_t piece = 0; piece < pieces; ++piece) {
      const float4* const from = at(item().first_partial + piece);
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        const float4 x = ptx::load_uncached(from + n * 128);
        sums(4 * n) += x.x;
        sums(4 * n + 1) += x.y;
        sums(4 * n + 2) += x.z;
        sums(4 * n + 3) += x.w;
      }
    }
    return true;
  }

  // Where the sums of an item go.
  struct Target {
    int32_t b, kv_head, keys;
    int64_t first;  // row of its first key
  };
  __device__ __forceinline__ Target target() const {
    return {item().b, item().kv_head, item().keys,
            static_cast<int64_t>(item().offset_kv) + item().key};
  }

  // dK or dV, from the registers: this lane's `sums`, of keys `row` and 8 below, times the factor.
  template <int kDim, class Sums>
  __device__ __forceinline__ void store_rows(const flashattn_tensor& tensor, const Target& target,
                                             int32_t dim, int32_t row, float factor,
                                             Sums sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = row + half * 8;
      char* to = tensor_row(tensor, 2, target.b, target.kv_head, target.first + key);
      const int32_t columns = key < target.keys ? dim : 0;
#pragma unroll
      for (int n = 0; n < kDim / 32; ++n) {
        PackedPair<T> pairs[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int i = (4 * n + w) * 4 + 2 * half;
          pairs[w] = PackedPair<T>::of(sums(i) * factor, sums(i + 1) * factor);
        }
        store_quad(pairs, to + n * 64, columns - n * 32, lane());
      }
    }
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  const uint32_t shared_;
  const int32_t group_;  // uniform
};

}  // namespace flashattn::cuda::sm90
