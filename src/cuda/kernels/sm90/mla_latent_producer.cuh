// Producer warpgroup of latent attention on Hopper for a quantised cache, LATENT_KV: E4M3 times its
// descale becomes a tile of 16 bits.
#pragma once

#include "cuda/device/e4m3.cuh"
#include "cuda/kernels/sm90/mla_config.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashattn::cuda::sm90 {

// All threads fill one substage after another. Four lanes have 64 bytes of E4M3 of a row,
// which become 128 bytes of a panel: eight lanes store 16 bytes each to different banks. Meanwhile
// the next half of a substage is loaded to registers, and rows of later tiles to L2.
template <class Config>
class MlaLatentProducer {
  using T = typename Config::T;
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileKv = Config::kTileKv, kPanelBytes = Config::kPanelBytes;
  static constexpr int kThreads = 128, kRowStep = kThreads / 4, kRows = kTileKv / kRowStep;
  static constexpr int kAhead = 2;  // tiles from the one that is stored to the one that goes to L2
  static constexpr float kMostF16 = 65504.0f;
  static_assert(kLatentDescaleDim == 2 * 64, "two panels have a descale");

 public:
  __device__ __forceinline__ MlaLatentProducer(const MlaParams& params, uint32_t shared,
                                               SharedStorage& storage)
      : params_(params), storage_(storage), stages_(shared + Config::kKOffset) {}

  // Arrivals at the full barrier of a substage.
  static __device__ __forceinline__ uint32_t arrivals(const MlaParams&) { return kThreads; }

  // Loads all tiles. A second call loads them again, for a redo.
  __device__ __forceinline__ void load_tiles() {
    const int32_t begin = tile().tiles.begin;
#pragma unroll 1
    for (int n = 0; n < kAhead; ++n) prefetch(begin + n, run_of(begin + n));
    const char* ahead = run_of(begin + kAhead);
    point_at(begin);
    Half first, second;
    load(first, 0);
#pragma unroll 1
    for (int32_t n = begin, stage = 0; n < tile().tiles.end; ++n, stage ^= 1) {
      prefetch(n + kAhead, ahead);
      ahead = run_of(n + 1 + kAhead);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        // The warpgroup that computes the scores of the stage releases its own half of V first.
        const int32_t substage = y == 0 ? stage : 1 - stage;
        load(second, 2 * substage + 1);
        storage_.k.producer_acquire({stage, phases_ >> stage}, substage);
        if (y == 0) {
          store_shown(n, stage);
        } else {
          copy_rest(stage);
        }
        store(first, 2 * substage, stage);
        if (y == 1) point_at(n + 1);
        load(first, 2 * (1 - stage));
        __syncwarp();  // otherwise ptxas loads where registers are free, too late
        store(second, 2 * substage + 1, stage);
        if (y == 1) ptx::cp_async_wait<0>();
        ptx::fence_async_proxy();
        storage_.k.producer_commit({stage}, substage);
      }
      phases_ ^= 1u << stage;
    }
  }

 private:
  // Half of a substage: the columns that share a descale.
  struct Half {
    int4 bits[2][kRows];  // by panel and row
    float descale[kRows];
  };

  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  static __device__ __forceinline__ int32_t lane_of_row() { return threadIdx.x % 4; }
  static __device__ __forceinline__ int32_t first_row() { return threadIdx.x % kThreads / 4; }
  // The first row of a tile that this thread prefetches: that of a run of rows, or a single row, of
  // which it prefetches every other cache line.
  __device__ __forceinline__ int32_t prefetched_row() const {
    const int32_t thread = no_hoist(threadIdx.x) % kThreads;  // saves a register
    return params_.record_run > 0 ? thread * params_.record_run : thread / 2;
  }
  __device__ __forceinline__ bool hides_pages() const {
    return params_.common.problem.mask & FLASHATTN_MASK_PAGES;
  }

  __device__ __forceinline__ int32_t page_of(int32_t page_idx) const {
    const Inputs& in = params_.common.args.inputs;
    return in.page_table[tile().b * in.page_table_stride + page_idx];
  }

  // The address of V of row r of tile n; NULL past the last key or tile, and on a hidden page.
  __device__ __forceinline__ const char* record(int32_t n, int32_t r) const {
    const int32_t key = n * kTileKv + r;
    if (n >= tile().tiles.end || key >= tile().len.kv) return nullptr;
    const Problem& problem = params_.common.problem;
    const Inputs& in = params_.common.args.inputs;
    if (!(problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) {
      return tensor_row(in.v, 1, tile().b, tile().kv_head, tile().offset_kv + key);
    }
    const int32_t page_idx = params_.by_page_size.quotient(key);
    int32_t page = page_of(page_idx);
    if (page < 0 && hides_pages()) return nullptr;
    // A page number out of range is clamped: the result is wrong, but no other memory is read.
    page = page < 0 ? 0 : page >= in.pages ? static_cast<int32_t>(in.pages) - 1 : page;
    return tensor_row(in.v, 1, page, tile().kv_head, key - page_idx * problem.page_size);
  }

  // Points records_ at this thread's rows of tile n, which are loaded next.
  __device__ __forceinline__ void point_at(int32_t n) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) records_[i] = record(n, first_row() + i * kRowStep);
  }

  __device__ __forceinline__ const char* run_of(int32_t n) const {
    const int32_t r = prefetched_row();
    return r < kTileKv && params_.record_bytes > 0 ? record(n, r) : nullptr;
  }

  // Brings rows of tile n to L2. A run of rows is one bulk prefetch. Single rows are prefetched by
  // cache lines, as the lanes of a warp issue bulk prefetches one after another.
  __device__ __forceinline__ void prefetch(int32_t n, const char* first) const {
    if (!first) return;
    first += params_.record_begin;
    if (params_.record_run > 0) {
      const int32_t left = tile().len.kv - n * kTileKv - prefetched_row();
      const int32_t stride = static_cast<int32_t>(params_.common.args.inputs.v.stride_seq);
      ptx::prefetch_l2(first, (min(left, params_.record_run) - 1) * stride + params_.record_bytes);
    } else {
#pragma unroll 1
      for (int32_t at = threadIdx.x % 2 * 64; at < params_.record_bytes; at += 128) {
        ptx::prefetch_l2_line(first + at);
      }
    }
  }

  __device__ __forceinline__ void load(Half& half, int32_t descale) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        half.bits[p][i] = ptx::load_in_order_16_if(
            records_[i] + (descale * kLatentDescaleDim + lane_of_row() * 16) + p * 64, records_[i]);
      }
      const char* const from = records_[i] + params_.descales_of_record + descale * 4;
      half.descale[i] = __uint_as_float(ptx::load_in_order_4_if(from, records_[i]));
    }
  }

  __device__ __forceinline__ uint32_t swizzled(int32_t chunk) const {
    return first_row() * 128 + ((chunk ^ (first_row() & 7)) << 4);
  }

  __device__ __forceinline__ void store(const Half& half, int32_t descale, int32_t stage) const {
    const uint32_t to = stages_ + stage * Config::kStageBytes + descale * 2 * kPanelBytes;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t x[8];
        convert(half.bits[p][i], half.descale[i], x);
        const uint32_t at = to + p * kPanelBytes + i * kRowStep * 128;
        ptx::store_shared_16(at + swizzled(2 * lane_of_row()), x[0], x[1], x[2], x[3]);
        ptx::store_shared_16(at + swizzled(2 * lane_of_row() + 1), x[4], x[5], x[6], x[7]);
      }
    }
  }

  // Converts 16 elements of E4M3 to T, times their descale. fp16 saturates at its largest number;
  // bf16 has the range of the product.
  static __device__ __forceinline__ void convert(const int4& bits, float descale,
                                                 uint32_t (&x)[8]) {
    const int32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t pairs[2];
      f16_of_e4m3<1>(static_cast<uint32_t>(words[n]), pairs);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float2 y = ptx::unpack<__half>(pairs[m]);
        x[2 * n + m] = ptx::pack<T>(y.x * descale, y.y * descale);
      }
    }
    if constexpr (Config::kIsF16) {
      if (descale <= kMostF16 / ptx::kMaxE4m3) return;
#pragma unroll
      for (uint32_t& pair : x) {
        const float2 y = ptx::unpack<T>(pair);
        pair = ptx::pack<T>(saturate(y.x), saturate(y.y));
      }
    }
  }
  static __device__ __forceinline__ float saturate(float x) {
    return fabsf(x) > kMostF16 ? copysignf(kMostF16, x) : x;
  }

  // Copies the columns of K behind those of V. They belong to the substage that is filled last.
  __device__ __forceinline__ void copy_rest(int32_t stage) const {
    const uint32_t to = stages_ + stage * Config::kStageBytes + Config::kPanelsV * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const char* const from = records_[i] + params_.k_of_record;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int32_t chunk = 2 * lane_of_row() + n;
        ptx::cp_async_16(to + i * kRowStep * 128 + swizzled(chunk), from + chunk * 16, records_[i]);
      }
    }
    ptx::cp_async_commit();
  }

  // PAGES: stores which keys lie on pages that are not hidden. The first warp has two keys per
  // lane.
  __device__ __forceinline__ void store_shown(int32_t n, int32_t stage) const {
    if (!hides_pages() || threadIdx.x % kThreads >= 32) return;
    const int32_t lane = threadIdx.x % 32, keys = tile().len.kv - n * kTileKv;
    const auto is_shown = [&](int32_t r) {
      return r >= keys || page_of(params_.by_page_size.quotient(n * kTileKv + r)) >= 0;
    };
    const uint64_t low = __ballot_sync(~0u, is_shown(lane));
    const uint64_t high = __ballot_sync(~0u, is_shown(lane + 32));
    if (lane == 0) {
      storage_.shown_kv[stage][0] = low | high << 32;
      storage_.shown_kv[stage][1] = 0;
    }
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  const uint32_t stages_;
  uint32_t phases_ = 0;  // parities, a bit for each stage
  const char* records_[kRows];
};

}  // namespace flashattn::cuda::sm90
