// Producer warpgroups of latent attention on Hopper for a quantised cache, LATENT_KV: E4M3 times
// its descale becomes a tile of 16 bits.
#pragma once

#include "cuda/device/e4m3.cuh"
#include "cuda/kernels/sm90/mla_config.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {

// All threads fill one substage after another. Four lanes have a row, 64 bytes of E4M3 at once,
// which become 128 bytes of a panel: eight lanes store 16 bytes each to different banks. While a
// substage is stored, the next one is loaded to registers; the next tile is brought to L2.
template <class Config>
class MlaLatentProducer {
  using T = typename Config::T;
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileKv = Config::kTileKv, kPanelBytes = Config::kPanelBytes;
  static constexpr int kHalfPanels = Config::kHalfPanels;
  static constexpr int kThreads = 128 * Config::kProducers, kLanes = kThreads / kTileKv;
  static constexpr int32_t kNone = INT32_MIN;
  static constexpr uint32_t kRedo = 1u << 31;  // in phases_: a register less than by itself
  static_assert(kLatentDescaleDim == 2 * 64, "two panels have a descale");
  static_assert(kLanes == 4, "four lanes have 64 bytes of a row");

 public:
  __device__ __forceinline__ MlaLatentProducer(const MlaParams& params, uint32_t shared,
                                               SharedStorage& storage)
      : params_(params), storage_(storage), stages_(shared + Config::kKOffset) {}

  // Arrivals at the full barrier of a substage.
  static __device__ __forceinline__ uint32_t arrivals(const MlaParams&) { return kThreads; }

  __device__ __forceinline__ void begin_redo() { phases_ |= kRedo; }
  __device__ __forceinline__ bool is_redo() const { return phases_ & kRedo; }

  // Loads all tiles. A second call loads them again, for a redo.
  __device__ __forceinline__ void load_tiles() {
    const int32_t begin = tile().tiles.begin;
    const char* from = record(begin, page_of(begin));
    prefetch(begin, from);
    int32_t next_page = page_of(begin + 1);
    Half halves[2];  // one is stored while the other is loaded
    load(halves[0], from, 0, 0);
#pragma unroll 1
    for (int32_t n = begin, stage = 0; n < tile().tiles.end; ++n, stage ^= 1) {
      // The warpgroup that computes the scores of the stage releases its own half of V first.
      load(halves[1], from, 1 - stage, zero_after(halves[0]));
      storage_.k.producer_acquire({stage, phases_ >> stage}, stage);
      store(halves[0], stage, stage);
      store_shown(n, stage);
      ptx::fence_async_proxy();
      storage_.k.producer_commit({stage}, stage);

      // Between the halves registers are free to compute addresses.
      storage_.k.producer_acquire({stage, phases_ >> stage}, 1 - stage);
      copy_rest(from, stage);
      from = record(n + 1, next_page);
      prefetch(n + 1, from);
      load(halves[0], from, 1 - stage, zero_after(halves[1]));
      next_page = page_of(n + 2);
      store(halves[1], 1 - stage, stage);
      ptx::cp_async_wait<0>();
      ptx::fence_async_proxy();
      storage_.k.producer_commit({stage}, 1 - stage);
      phases_ ^= 1u << stage;
    }
  }

 private:
  // This lane's columns of a substage, by panel, and the substage's descales.
  struct Half {
    int4 bits[kHalfPanels];
    float descales[kHalfPanels / 2];
  };

  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  static __device__ __forceinline__ int32_t lane_of_row() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int32_t row() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ bool hides_pages() const {
    return params_.common.problem.mask & FLASHATTN_MASK_PAGES;
  }

  __device__ __forceinline__ bool is_paged() const {
    return params_.common.problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  }

  // The page of this thread's row of tile n, as the table has it; without pages 0. kNone past the
  // last key or tile.
  __device__ __forceinline__ int32_t page_of(int32_t n) const {
    const int32_t key = n * kTileKv + row();
    if (n >= tile().tiles.end || key >= tile().len.kv) return kNone;
    return is_paged() ? page_of_key(params_, tile(), key) : 0;
  }

  // The address of V of this thread's row of tile n, which is on that page; NULL if there is none,
  // or if the page is hidden.
  __device__ __forceinline__ const char* record(int32_t n, int32_t page) const {
    if (page == kNone || (page < 0 && hides_pages())) return nullptr;
    const flashattn_tensor& v = params_.common.args.inputs.v;
    const char* const records = *const_cast<const char* const volatile*>(&storage_.records);
    const int32_t key = n * kTileKv + row();
    if (!is_paged()) return records + key * v.stride_seq;
    const int32_t pages = static_cast<int32_t>(params_.common.args.inputs.pages);
    const int32_t page_size = params_.common.problem.page_size;
    const int32_t at = key - params_.by_page_size.quotient(key) * page_size;
    // A page number out of range is clamped: the result is wrong, but no other memory is read.
    return records + min(max(page, 0), pages - 1) * v.stride_batch + at * v.stride_seq;
  }

  // Brings rows that begin with this thread's of tile n, at `own`, to L2, or where nothing is paged
  // those of the next tile. Eight warps have 8 rows each: one instruction for 64 keeps its warp
  // waiting. Single rows are not prefetched: the lanes of a warp would do it one after another.
  __device__ __forceinline__ void prefetch(int32_t n, const char* own) const {
    const int32_t run = min(params_.record_run, 8);
    if (!own || run == 0 || (row() & (run - 1)) != 0 || lane_of_row() != 0) return;
    const int32_t ahead = is_paged() ? 0 : kTileKv;  // pages are looked up for one tile only
    const int32_t left = tile().len.kv - n * kTileKv - row() - ahead;
    if (left <= 0) return;
    const int32_t stride = static_cast<int32_t>(params_.common.args.inputs.v.stride_seq);
    ptx::prefetch_l2(own + params_.record_begin + ahead * stride,
                     (min(left, run) - 1) * stride + params_.record_bytes);
  }

  // zero: zero_after() the half that is stored meanwhile. It fills rows that are not there, so that
  // no register of this half is in use before.
  __device__ __forceinline__ void load(Half& half, const char* from, int32_t substage,
                                       uint32_t zero) const {
    const bool valid = from != nullptr;
    from += zero;
    const char* const descales = from + params_.descales_of_record;
#pragma unroll
    for (int x = 0; x < kHalfPanels / 2; ++x) {
      half.descales[x] = __uint_as_float(
          ptx::load_in_order_4_if(descales + (substage * (kHalfPanels / 2) + x) * 4, valid, zero));
    }
    from += substage * (kHalfPanels * 64) + lane_of_row() * 16;
#pragma unroll
    for (int p = 0; p < kHalfPanels; ++p) {
      half.bits[p] = ptx::load_in_order_16_if(from + p * 64, valid, zero);
    }
  }

  // Returns 0 once a half, and all else that is being loaded, has arrived. ptxas has one scoreboard
  // for all loads under way from one turn of the loop to the next, so that none may be issued
  // between the loads of a half and its use.
  __device__ __forceinline__ uint32_t zero_after(const Half& half) const {
    return __float_as_uint(ptx::order_after(0.0f, half.descales[0], params_.zero));
  }

  static __device__ __forceinline__ uint32_t swizzled(int32_t chunk) {
    return row() * 128 + ((chunk ^ (row() & 7)) << 4);
  }

  __device__ __forceinline__ void store(const Half& half, int32_t substage, int32_t stage) const {
    const uint32_t to = stages_ + stage * Config::kStageBytes +
                        substage * (kHalfPanels * kPanelBytes) + swizzled(2 * lane_of_row());
#pragma unroll
    for (int p = 0; p < kHalfPanels; ++p) {
      uint32_t x[8];
      convert(half.bits[p], half.descales[p / 2], x);
      ptx::store_shared_16(to + p * kPanelBytes, x[0], x[1], x[2], x[3]);
      ptx::store_shared_16((to ^ 16) + p * kPanelBytes, x[4], x[5], x[6], x[7]);
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
        x[2 * n + m] = ptx::pack_saturated<T>(y.x * descale, y.y * descale);
      }
    }
  }

  // Copies the columns of K behind those of V. They belong to the substage that is filled last.
  __device__ __forceinline__ void copy_rest(const char* from, int32_t stage) const {
    const uint32_t to = stages_ + stage * Config::kStageBytes + Config::kPanelsV * kPanelBytes;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int32_t chunk = 2 * no_hoist(lane_of_row()) + n;
      ptx::cp_async_16(to + swizzled(chunk), from + params_.k_of_record + chunk * 16, from);
    }
    ptx::cp_async_commit();
  }

  // PAGES: stores which keys lie on pages that are not hidden. The first warp has two keys per
  // lane.
  __device__ __forceinline__ void store_shown(int32_t n, int32_t stage) const {
    if (!hides_pages() || threadIdx.x >= 32) return;
    const int32_t lane = threadIdx.x % 32, keys = tile().len.kv - n * kTileKv;
    const auto is_shown = [&](int32_t r) {
      return r >= keys || page_of_key(params_, tile(), n * kTileKv + r) >= 0;
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
  uint32_t phases_ = 0;  // parities, a bit for each stage; kRedo
};

}  // namespace flashattn::cuda::sm90
