// Block mask of the Hopper forward pass: the KV tiles of a work tile in which it leaves a visible
// key. The scheduler finds the first and the last, and hands those between them to the producers in
// windows; the producer of K tells consumers which tile is in a stage.
#pragma once

#include "cuda/kernels/sm90/work_tile.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/pipeline.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
constexpr bool kMayHideTiles = Config::ScoreMod::template kHas<BlockMask>;

constexpr int kWindowStages = 8;

// Base class of SharedStorage. It is empty without a block mask, so that the addresses of other
// kernels stay as they are.
template <bool kMayHideTiles, int kStages, int kConsumers>
struct VisibleTiles {};
template <int kStages, int kConsumers>
struct VisibleTiles<true, kStages, kConsumers> {
  // The windows of a work tile that hold a visible KV tile, from the last to the first.
  Pipeline<kWindowStages> windows;
  KvTileWindow<kConsumers> window_of_stage[kWindowStages];
  uint32_t stage_tiles[kStages];  // the StageTile of each stage of K
};

// How a producer walks the KV tiles of a work tile, from the last to the first. few_left(): whether
// so few are left below n that the next work tile should be planned.
class DenseWalk {
 public:
  static constexpr int32_t kFew = 2;
  template <class Params, class Storage>
  __device__ __forceinline__ DenseWalk(const Params&, Storage&) {}
  __device__ __forceinline__ void start() {}
  __device__ __forceinline__ int32_t after(int32_t n, int32_t) { return n - 1; }
  __device__ __forceinline__ bool few_left(int32_t n, int32_t begin) const {
    return n <= begin + kFew;
  }
};

template <class Config, class Storage>
class BlockSparseWalk {
  static constexpr int32_t kFew = 7;  // to read the mask takes time

 public:
  __device__ __forceinline__ BlockSparseWalk(const ForwardParams& params, Storage& storage)
      : storage_(storage), masked_(params.problem.mask & FLASHATTN_MASK_BLOCKS) {}

  // At the last tile of a work tile.
  __device__ __forceinline__ void start() {
    if (masked_) take_window();
  }

  // The tile after n; begin - 1 or less: n is the first.
  __device__ __forceinline__ int32_t after(int32_t n, int32_t begin) {
    if (!masked_) return n - 1;
    uint32_t left = below(n);
    while (left == 0) {
      if (window_.idx <= begin / 32) return begin - 1;
      take_window();
      left = window_.visible();
    }
    return window_.idx * 32 + 31 - __clz(left);
  }

  // A window that is not yet taken counts as two tiles.
  __device__ __forceinline__ bool few_left(int32_t n, int32_t begin) const {
    if (!masked_) return n <= begin + DenseWalk::kFew;
    return __popc(below(n)) + 2 * (window_.idx - begin / 32) <= kFew;
  }

  // full(): whether the block mask shows all keys of tile n to all queries of a warpgroup.
  // visible(): whether it shows any key to any of them. n: the tile that was found last.
  __device__ __forceinline__ bool full(int32_t n, int32_t warpgroup) const {
    return !masked_ || (window_.all[warpgroup] >> n % 32 & 1);
  }
  __device__ __forceinline__ bool visible(int32_t n, int32_t warpgroup) const {
    return !masked_ || (window_.some[warpgroup] >> n % 32 & 1);
  }

 private:
  __device__ __forceinline__ uint32_t below(int32_t n) const {
    return window_.visible() & ((1u << n % 32) - 1);
  }

  __device__ __forceinline__ void take_window() {
    storage_.windows.consumer_wait(state_);
    const volatile auto& window = storage_.window_of_stage[state_.stage()];
    window_.idx = window.idx;
#pragma unroll
    for (int n = 0; n < Config::kConsumers; ++n) {
      window_.some[n] = window.some[n];
      window_.all[n] = window.all[n];
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) storage_.windows.consumer_release(state_);
    state_.advance();
  }

  Storage& storage_;
  const bool masked_;
  PipelineState<kWindowStages> state_;
  KvTileWindow<Config::kConsumers> window_;
};

// Index of a KV tile and, for each warpgroup, whether the block mask shows all or some of it, in a
// word.
template <int kConsumers>
struct StageTile {
  static_assert(kConsumers <= 2, "the bits of a word");
  uint32_t word;

  template <class Walk>
  static __device__ __forceinline__ StageTile of(const Walk& walk, int32_t n) {
    uint32_t word = n;
#pragma unroll
    for (int p = 0; p < kConsumers; ++p) word = 4 * word + 2 * walk.full(n, p) + walk.visible(n, p);
    return {word};
  }
  __device__ __forceinline__ int32_t n() const { return word >> 2 * kConsumers; }
  __device__ __forceinline__ bool full(int32_t warpgroup) const { return bits(warpgroup) & 2; }
  __device__ __forceinline__ bool visible(int32_t warpgroup) const { return bits(warpgroup) & 1; }

 private:
  __device__ __forceinline__ uint32_t bits(int32_t warpgroup) const {
    return word >> 2 * (kConsumers - 1 - warpgroup);
  }
};

}  // namespace flashattn::cuda::sm90
