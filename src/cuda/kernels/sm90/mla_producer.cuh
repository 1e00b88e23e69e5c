// Producer warpgroup of latent attention on Hopper: two warps for each stage of K.
#pragma once

#include "cuda/kernels/sm90/mla_config.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaProducer {
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileKv = Config::kTileKv, kPanelBytes = Config::kPanelBytes;
  static constexpr int kThreads = 64;  // per stage
  static constexpr int kRowStep = kThreads / 8, kRows = kTileKv / kRowStep;

 public:
  __device__ __forceinline__ MlaProducer(const MlaParams& params, uint32_t shared,
                                         SharedStorage& storage)
      : params_(params),
        storage_(storage),
        state_{static_cast<int32_t>(__shfl_sync(~0u, threadIdx.x / kThreads, 0))},
        to_(shared + Config::kKOffset + state_.index * Config::kStageBytes) {}

  // Arrivals at the full barrier of a substage.
  static __device__ __forceinline__ uint32_t arrivals(const MlaParams& params) {
    return params.kv_box_rows > 0 ? 1 : kThreads;
  }

  __device__ __forceinline__ void begin_redo() { redo_ = true; }
  __device__ __forceinline__ bool is_redo() const { return redo_; }

  // Loads the tiles of this warp's stage. A second call loads them again, for a redo.
  __device__ __forceinline__ void load_tiles() {
    const Interval tiles{tile().tiles.begin, tile().tiles.end};
    const bool by_tma = params_.kv_box_rows > 0;
    if (by_tma && threadIdx.x / 32 % 2 != 0) return;
    if (!by_tma) look_up_rows(tiles.begin + state_.index);
#pragma unroll 1
    for (int32_t n = tiles.begin + state_.index; n < tiles.end; n += Config::kStages) {
      if (by_tma) {
        load_boxes(n);
      } else {
        load_rows(n);
      }
      state_.advance();
    }
  }

 private:
  // Paged KV: lane n holds the page, and the row in it, of TMA box n of a tile.
  struct PageBox {
    int32_t page, row;
  };

  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  __device__ __forceinline__ bool is_paged() const {
    return params_.common.problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  }

  // The substage whose panels of V the n-th load fills. The warpgroup that computes the
  // scores of the stage releases its own half of V first.
  __device__ __forceinline__ int32_t substage(int n) const {
    return n == 0 ? state_.index : 1 - state_.index;
  }

  // Called before the wait for a buffer, which hides the latency of the page table. Boxes past the
  // last key get a page past the last, which TMA reads as 0.
  __device__ __forceinline__ PageBox look_up_page(int32_t n) const {
    const int32_t box = params_.kv_box_rows, lane = threadIdx.x % 32;
    const int32_t key = n * kTileKv + lane * box;
    if (!is_paged() || lane * box >= kTileKv || key >= tile().len.kv) return {INT32_MAX, 0};
    const Inputs& in = params_.common.args.inputs;
    const int32_t page_idx = params_.by_page_size.quotient(key);
    return {in.page_table[tile().b * in.page_table_stride + page_idx],
            key - page_idx * params_.common.problem.page_size};
  }

  __device__ __forceinline__ void load_boxes(int32_t n) {
    const PageBox own = look_up_page(n);
    const int32_t box = params_.kv_box_rows, head = tile().kv_head;
    const bool varlen = params_.common.problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
    // K that several CTAs or clusters read stays in L2.
    const uint64_t policy =
        params_.row_tiles > params_.cluster_size ? ptx::kEvictLast : ptx::kEvictFirst;
    // In a cluster each CTA loads every second panel for both. In a redo each loads its own.
    const bool for_both = params_.cluster_size > 1 && !storage_.is_redo();
    const int32_t first_panel = for_both ? static_cast<int32_t>(ptx::cluster_rank()) : 0;
#pragma unroll 1
    for (int x = 0; x < 2; ++x) {
      storage_.k.producer_acquire(state_, substage(x));
      const int32_t first = substage(x) * Config::kHalfPanels;
      const int32_t behind = x == 0 ? 0 : Config::kPanels - Config::kPanelsV;
      const int32_t panels = Config::kHalfPanels + behind;
      if (threadIdx.x % 32 == 0)
        storage_.k.producer_expect(state_, panels * kPanelBytes, substage(x));
      const uint32_t full = storage_.k.full_barrier(state_, substage(x)).address();
      __syncwarp();
#pragma unroll 1
      for (int32_t n_box = 0, row = 0; row < kTileKv; ++n_box, row += box) {
        const PageBox paged{__shfl_sync(~0u, own.page, n_box), __shfl_sync(~0u, own.row, n_box)};
        const int32_t batch = is_paged() ? paged.page : varlen ? 0 : tile().b;
        const int32_t from =
            is_paged() ? paged.row : static_cast<int32_t>(tile().offset_kv) + n * kTileKv;
        if (!ptx::elect()) continue;
#pragma unroll 1
        for (int32_t p = first_panel; p < panels; p += for_both ? 2 : 1) {
          const int32_t panel =
              p < Config::kHalfPanels ? first + p : Config::kPanelsV + p - Config::kHalfPanels;
          const uint32_t to = to_ + panel * kPanelBytes + row * 128;
          const ptx::TmaCoord at{panel * 64, from, head, batch};
          if (for_both) {
            ptx::tma_load_multicast(to, &params_.k, full, at, policy, 3);
          } else {
            ptx::tma_load(to, &params_.k, full, at, policy);
          }
        }
      }
    }
  }

  // Threads copy tiles whose rows lie in many pages: eight threads copy 128 bytes of a row.
  // first_row(): the first row that this thread copies; the others are kRowStep apart.
  static __device__ __forceinline__ int32_t first_row() { return threadIdx.x % kThreads / 8; }

  __device__ __forceinline__ void look_up_rows(int32_t n) {
    const Inputs& in = params_.common.args.inputs;
    const int32_t* const table = in.page_table + tile().b * in.page_table_stride;
#pragma unroll
    for (int x = 0; x < kRows; ++x) {
      const int32_t key = n * kTileKv + first_row() + x * kRowStep;
      pages_[x] = key < tile().len.kv ? table[params_.by_page_size.quotient(key)] : 0;
    }
  }

  // PAGES: stores which keys lie on pages that are not hidden. A warp has four rows of every eight,
  // and eight lanes for each.
  __device__ __forceinline__ void store_shown_kv() const {
    const int32_t warp = threadIdx.x / 32 % 2;
    uint64_t shown = 0;
#pragma unroll
    for (int x = 0; x < kRows; ++x) {
      const uint32_t lanes = __ballot_sync(~0u, pages_[x] >= 0);
      const uint32_t rows = (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
      shown |= static_cast<uint64_t>(rows) << (x * kRowStep + warp * 4);
    }
    if (threadIdx.x % 32 == 0) storage_.shown_kv[state_.index][warp] = shown;
  }

  // Copies tile n, whose pages have been looked up, in its two substages, and looks up
  // those of the next one meanwhile.
  __device__ __forceinline__ void load_rows(int32_t n) {
    const cuda::ForwardParams& common = params_.common;
    const Inputs& in = common.args.inputs;
    const PagedRowView view{{tensor_row(in.k, 2, 0, tile().kv_head, 0), in.k.stride_seq * 2},
                            nullptr,
                            common.problem.page_size,
                            in.k.stride_batch * 2,
                            in.pages};
    const int32_t chunk = threadIdx.x % 8, limit = tile().len.kv;
    const char* rows[kRows];  // NULL: past the last key, or hidden
#pragma unroll
    for (int x = 0; x < kRows; ++x) {
      const int32_t key = n * kTileKv + first_row() + x * kRowStep;
      rows[x] = key < limit && pages_[x] >= 0 ? view.row(pages_[x], key) : nullptr;
    }
#pragma unroll 1
    for (int y = 0; y < 2; ++y) {
      storage_.k.producer_acquire(state_, substage(y));
      if (y == 0 && common.problem.mask & FLASHATTN_MASK_PAGES) store_shown_kv();
      const int32_t first = substage(y) * Config::kHalfPanels;
      const int32_t panels =
          Config::kHalfPanels + (y == 0 ? 0 : Config::kPanels - Config::kPanelsV);
#pragma unroll 1
      for (int32_t p = 0; p < panels; ++p) {
        const int32_t panel =
            p < Config::kHalfPanels ? first + p : Config::kPanelsV + p - Config::kHalfPanels;
        const bool exists = panel * 64 + chunk * 8 < common.problem.dim_qk;
        const int32_t at = panel * 128 + chunk * 16;
#pragma unroll
        for (int x = 0; x < kRows; ++x) {
          const int32_t r = first_row() + x * kRowStep;
          ptx::cp_async_16(to_ + panel * kPanelBytes + r * 128 + ((chunk ^ (r & 7)) << 4),
                           rows[x] + at, exists && rows[x]);
        }
      }
      ptx::cp_async_commit();
    }
    look_up_rows(n + Config::kStages);
    ptx::cp_async_wait<1>();
    ptx::fence_async_proxy();
    storage_.k.producer_commit(state_, substage(0));
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    storage_.k.producer_commit(state_, substage(1));
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  StageState state_;
  const uint32_t to_;
  bool redo_ = false;
  int32_t pages_[kRows];
};

}  // namespace flashattn::cuda::sm90
