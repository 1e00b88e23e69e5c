// dQ to rows of the problem's type within the Hopper backward kernel, as far as there is time:
// tiles to which all have added, while they are in the L2 cache. backward_convert.cuh does the
// rest.
#pragma once

#include "cuda/kernels/sm90/bwd_config.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// Whether so many heads are prepared, (batch, head). The planner asks; what it starts from then on,
// or tells others of, comes after the preparation.
template <class Config>
__device__ __forceinline__ bool is_prepared(const BackwardParams& params,
                                            BackwardControl<Config>& control, int32_t heads) {
  if (!Config::kStartsEarly || !params.prepared) return true;
  volatile int32_t& known = control.prepared;
  if (known >= heads) return true;
  int32_t least = INT32_MAX;
#pragma unroll
  for (int n = 0; n < kMostPreparers; n += 4) {
    const int4 words = ptx::load_relaxed(params.prepared->heads + n);
    least = min(min(min(words.x, words.y), min(words.z, words.w)), least);
  }
  ptx::fence_gpu();
  ptx::fence_async_proxy_global();
  known = least;
  return least >= heads;
}

// Until the first heads are; before that, is_prepared() may see what another launch has left.
template <class Config>
__device__ __forceinline__ void wait_until_begun(const BackwardParams& params) {
  if (!Config::kStartsEarly || !params.prepared) return;
  while (ptx::load_acquire(&params.prepared->ready) != params.stamp) __nanosleep(50);
}

template <class Config>
__device__ __forceinline__ void wait_until_prepared(const BackwardParams& params,
                                                    BackwardControl<Config>& control,
                                                    int32_t heads) {
  while (!is_prepared(params, control, heads)) __nanosleep(50);
}

// One thread of the block looks for what is complete. Blocks take tiles of dQ by number, in the
// order in which they are likely to be complete.
template <class Config>
class DqScout {
 public:
  __device__ __forceinline__ DqScout(const BackwardParams& params, BackwardControl<Config>& control)
      : params_(params), control_(control), sums_(control.convert.sums) {}

  // Leaves the tile that was taken to those who convert, if it is complete.
  __device__ __forceinline__ void look() const {
    if (!sums_.taken) {
      const uint32_t empty = barrier_at(control_.convert.empty);
      if (!ptx::mbarrier_test(empty, sums_.handed & 1 ^ 1) || !take()) return;
    }
    if (sums_.rows < 0 || !is_prepared(params_, control_, sums_.heads)) return;
    const int32_t state = ptx::load_acquire(sums_.state);
    if (state >= kDqPendingTile) return;
    if (!(state & kDqClaimed)) sums_.from = nullptr;
    ptx::store_relaxed(sums_.state, kDqConverted);
    hand_over();
  }

  // What has been taken is left to the next kernel.
  __device__ __forceinline__ void end() const {
    ptx::mbarrier_wait(barrier_at(control_.convert.empty), sums_.handed & 1 ^ 1);
    sums_.rows = -1;
    hand_over();
  }

 private:
  __device__ __forceinline__ void hand_over() const {
    sums_.taken = 0;
    sums_.handed = sums_.handed + 1;
    ptx::mbarrier_arrive(barrier_at(control_.convert.full));
  }

  // The next. False: there are no queries in it.
  __device__ __forceinline__ bool take() const {
    static_assert(kBlocks<Config> == 1, "a tile has one part");
    constexpr int kTileQ = Config::kTileQ;
    const cuda::BackwardParams& common = params_.common;
    const int32_t n = atomicAdd(common.dq_work_counter, 1);
    if (n >= params_.q_swizzle.count()) {
      sums_.rows = -1;
    } else {
      const L2Swizzle::Tile at = params_.q_swizzle.tile(n);
      const int32_t b = at.head_idx / common.problem.heads_kv;
      const int32_t kv_head = at.head_idx - b * common.problem.heads_kv;
      const int32_t in_group = at.tile_idx / params_.sequence_tiles;
      const int32_t head = kv_head * common.q_heads_per_kv_head + in_group;
      const int32_t tile = at.tile_idx - in_group * params_.sequence_tiles;
      const SeqlenInfo sequence =
          seqlen_info(common.problem, common.args.shape, common.args.inputs, b);
      if (tile * kTileQ >= sequence.len.q) return false;
      sums_.rows = sequence.len.q - tile * kTileQ;
      sums_.heads = b * common.problem.heads_q + head + 1;
      sums_.to = tensor_row(common.args.dq, 2, b, head, sequence.offset_q + tile * kTileQ);
      const int32_t place =
          no_hoist(static_cast<int32_t>(common.query_tile(sequence, b, head, tile, kTileQ)));
      sums_.state = common.dq_states + place;
      sums_.from = reinterpret_cast<const float4*>(common.dq) +
                   static_cast<int64_t>(place) * (Config::kSumBytes / 16);
    }
    sums_.taken = 1;
    return true;
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
  volatile DqSums& sums_;
};

// The four warps that compute dQ: each converts the numbers that stand where it stores its own.
template <class Config>
class DqConverter {
  using T = typename Config::T;
  static constexpr uint32_t kEnded = ~0u;

 public:
  __device__ __forceinline__ DqConverter(const BackwardParams& params,
                                         BackwardControl<Config>& control)
      : params_(params), control_(control) {}

  // Converts what the scout has found.
  __device__ __forceinline__ void work() const {
    const uint32_t full = barrier_at(control_.convert.full), n = times();
    if (__all_sync(~0u, n != kEnded && ptx::mbarrier_test(full, n & 1))) take();
  }

  // That, until there is no more.
  __device__ __forceinline__ void finish() const {
    while (times() != kEnded) {
      ptx::mbarrier_wait(barrier_at(control_.convert.full), times() & 1);
      take();
    }
  }

 private:
  __device__ __forceinline__ int32_t thread() const { return no_hoist(threadIdx.x) % 128; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }

  // That this warp has converted, or kEnded. In shared memory: registers are scarce.
  __device__ __forceinline__ volatile uint32_t& times() const {
    return control_.convert.sums.converted[thread() / 32];
  }

  __device__ __forceinline__ void take() const {
    const volatile DqSums& sums = control_.convert.sums;
    const bool some = sums.rows >= 0;
    if (some) convert(sums);
    __syncwarp();
    if (lane() == 0) {
      times() = some ? times() + 1 : kEnded;
      ptx::mbarrier_arrive(barrier_at(control_.convert.empty));
    }
    __syncwarp();
  }

  // Shares of 64 x 64, by columns or by queries.
  __device__ __forceinline__ void convert(const volatile DqSums& sums) const {
    constexpr int kTileQ = Config::kTileQ;
    constexpr int kHalves = Config::kAny ? 1 : 2;  // of a share, 32 columns each, at once
    const float scale = params_.common.problem.scale;
#pragma unroll 1
    for (int32_t n = 0; n < 2 * Config::kShares; n += kHalves) {
      const float4* from = sums.from;
      float4 x[4 * kHalves];
#pragma unroll
      for (int i = 0; i < 4 * kHalves; ++i) {
        x[i] = from ? ptx::load_uncached(from + n * 512 + i * 128 + thread())
                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      const int32_t row = (kTileQ == 64 ? 0 : n / 2 * 64) + thread() / 32 * 16 + lane() / 4;
      const int32_t column = (kTileQ == 64 ? n : n % 2) * 32;
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        PackedPair<T> upper[4], lower[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float4& y = x[i * 4 + w];
          upper[w] = PackedPair<T>::of(y.x * scale, y.y * scale);
          lower[w] = PackedPair<T>::of(y.z * scale, y.w * scale);
        }
        store(sums, row, column + i * 32, upper);
        store(sums, row + 8, column + i * 32, lower);
      }
    }
  }

  // To a row of the tile 32 columns, by a quad of lanes.
  __device__ __forceinline__ void store(const volatile DqSums& sums, int32_t row, int32_t column,
                                        const PackedPair<T> (&pairs)[4]) const {
    char* to = sums.to + row * params_.common.args.dq.stride_seq * 2 + column * 2;
    const int32_t columns = row < sums.rows ? params_.common.problem.dim_qk - column : 0;
    store_quad(pairs, to, columns, lane());
  }

  const BackwardParams& params_;
  BackwardControl<Config>& control_;
};

}  // namespace flashattn::cuda::sm90
