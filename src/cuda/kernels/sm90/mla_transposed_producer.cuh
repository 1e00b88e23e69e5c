// Producer warpgroup of the Hopper kernel for few rows and LATENT_KV: copies records to shared
// memory.
#pragma once

#include "cuda/kernels/sm90/mla_transposed_config.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashattn::cuda::sm90 {

// A bulk copy takes a run of records that follow each other in memory, or one record, or one of its
// three parts. One warp copies whole tiles; if runs are shorter, four have 16 rows each.
template <class Config>
class MlaTransposedProducer {
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileKv = Config::kTileKv, kRecordBytes = Config::kRecordBytes;
  static constexpr int kWarpRows = kTileKv / 4;  // of each of four warps
  static constexpr int32_t kLeastPrefetch = 8;   // rows: lanes prefetch one after another

 public:
  __device__ __forceinline__ MlaTransposedProducer(const MlaParams& params, uint32_t shared,
                                                   SharedStorage& storage)
      : params_(params), storage_(storage), stages_(shared + Config::kKOffset) {}

  // Warps that copy, each of which arrives at the full barrier of a stage.
  static __device__ __forceinline__ int32_t warps(const MlaParams& params) {
    return params.bulk_run >= kTileKv ? 1 : 4;
  }

  __device__ __forceinline__ void begin_redo() { redo_ = true; }
  __device__ __forceinline__ bool is_redo() const { return redo_; }

  // Loads all tiles. A second call loads them again, for a redo.
  __device__ __forceinline__ void load_tiles() {
    if (warp() >= warps(params_)) return;
    const Interval tiles{tile().tiles.begin, tile().tiles.end};
    const char* next = look_up(tiles.begin);
#pragma unroll 1
    for (int32_t n = tiles.begin; n < tiles.end; ++n) {
      const char* const from = next;
      const uint64_t present = presence(n);
      const int32_t stage = state_.index;
      storage_.k.producer_acquire(state_);
      const uint32_t to = stages_ + stage * Config::kStageBytes + first_row() * kRecordBytes;
      if (present != all_rows()) clear_rows(to, all_rows() & ~present);
      __syncwarp();
      if (lane() == 0) {
        store_shown(n, stage, present);
        storage_.k.producer_expect(state_, rows_of(present) * kRecordBytes);
      }
      __syncwarp();
      if (begins_run() && (present >> lane() & 1)) {
        copy(to + lane() * kRecordBytes, from, rows_of_run(n));
      }
      next = look_up(n + 1);
      if (++state_.index == Config::kStages) {
        state_.index = 0;
        state_.advance();
      }
    }
  }

 private:
  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ bool hides_pages() const {
    return params_.common.problem.mask & FLASHATTN_MASK_PAGES;
  }
  __device__ __forceinline__ bool is_paged() const {
    return params_.common.problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  }

  // The rows of a tile that a warp has, and the first; bits stand for these rows.
  __device__ __forceinline__ int32_t rows() const { return kTileKv / warps(params_); }
  __device__ __forceinline__ int32_t first_row() const { return warp() * rows(); }
  __device__ __forceinline__ uint64_t all_rows() const { return ~uint64_t{0} >> (64 - rows()); }
  // Rows of a copy. Lane n copies those from row n on.
  __device__ __forceinline__ int32_t run() const { return min(max(params_.bulk_run, 1), rows()); }
  __device__ __forceinline__ bool begins_run() const {
    return lane() < rows() && lane() % run() == 0;
  }
  __device__ __forceinline__ int32_t key(int32_t n) const {
    return n * kTileKv + first_row() + lane();
  }
  __device__ __forceinline__ int32_t rows_of_run(int32_t n) const {
    return min(run(), tile().len.kv - key(n));
  }
  static __device__ __forceinline__ int32_t rows_of(uint64_t bits) {
    return __popc(static_cast<uint32_t>(bits)) + __popc(static_cast<uint32_t>(bits >> 32));
  }

  // The rows of tile n that are keys.
  __device__ __forceinline__ uint64_t before_end(int32_t n) const {
    const int32_t keys = tile().len.kv - n * kTileKv - first_row();
    return keys >= rows() ? all_rows() : keys <= 0 ? 0 : (uint64_t{1} << keys) - 1;
  }

  // The rows of tile n that are keys whose page is not hidden.
  __device__ __forceinline__ uint64_t presence(int32_t n) const {
    const uint64_t bits = before_end(n);
    if (!hides_pages()) return bits;
    const bool hidden =
        lane() < kWarpRows && (bits >> lane() & 1) && page_of_key(params_, tile(), key(n)) < 0;
    const uint32_t found = __ballot_sync(~0u, hidden);
    // A tile that one warp copies lies on one page.
    return rows() == kTileKv ? (found & 1 ? 0 : bits) : bits & ~uint64_t{found};
  }

  // PAGES: stores which keys lie on pages that are not hidden.
  __device__ __forceinline__ void store_shown(int32_t n, int32_t stage, uint64_t present) const {
    if (!hides_pages()) return;
    const uint64_t shown = present | ~before_end(n);
    for (int32_t x = 0; x < rows() / kWarpRows; ++x) {
      storage_.shown_kv[stage][warp() + x] = static_cast<uint16_t>(shown >> x * kWarpRows);
    }
  }

  // The address of V of this lane's row of tile n, if a run begins there, which it brings to L2.
  __device__ __forceinline__ const char* look_up(int32_t n) const {
    const int32_t key = this->key(n);
    if (n >= tile().tiles.end || key >= tile().len.kv || !begins_run()) return nullptr;
    const flashattn_tensor& v = params_.common.args.inputs.v;
    const char* const records = *const_cast<const char* const volatile*>(&storage_.records);
    const char* from = records + key * v.stride_seq;
    if (is_paged()) {
      const int32_t pages = static_cast<int32_t>(params_.common.args.inputs.pages);
      const int32_t page = page_of_key(params_, tile(), key),
                    page_size = params_.common.problem.page_size;
      const int32_t at = key - params_.by_page_size.quotient(key) * page_size;
      // A page number out of range is clamped: the result is wrong, but no other memory is read.
      from = records + min(max(page, 0), pages - 1) * v.stride_batch + at * v.stride_seq;
    }
    if (run() >= kLeastPrefetch) {
      ptx::prefetch_l2(from + params_.record_begin, rows_of_run(n) * kRecordBytes);
    }
    return from;
  }

  __device__ __forceinline__ void copy(uint32_t to, const char* from, int32_t rows) const {
    const uint32_t barrier = storage_.k.full_barrier(state_).address();
    if (params_.bulk_run > 0) {
      ptx::bulk_load(to, from + params_.record_begin, rows * kRecordBytes, barrier);
      return;
    }
    ptx::bulk_load(to + params_.v_in_record, from, Config::kDimV, barrier);
    ptx::bulk_load(to + params_.descales_in_record, from + params_.descales_of_record,
                   Config::kGroups * 4, barrier);
    ptx::bulk_load(to + params_.k_in_record, from + params_.k_of_record, Config::kDimRotary * 2,
                   barrier);
  }

  // Clears rows that no copy fills: their P is 0, but they may be NaN.
  __device__ __forceinline__ void clear_rows(uint32_t to, uint64_t absent) const {
#pragma unroll 1
    for (int32_t r = 0; r < rows(); ++r) {
      if (!(absent >> r & 1)) continue;
#pragma unroll 1
      for (int32_t x = lane(); x < kRecordBytes / 16; x += 32) {
        ptx::clear_shared_16(to + r * kRecordBytes + x * 16);
      }
    }
    ptx::fence_async_proxy();  // before later copies
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  const uint32_t stages_;
  StageState state_{0};
  bool redo_ = false;
};

}  // namespace flashattn::cuda::sm90
