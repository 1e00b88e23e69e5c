// Split-KV within a cluster: its CTAs have the same rows and a split of their keys each. Every CTA
// sends its results to the others' shared memory: CTA n merges the n-th range of columns, of all
// rows, and stores it. One launch, no trip through global memory.
#pragma once

#include "cuda/host/schedule/split_kv.h"
#include "cuda/params.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda::sm80 {

// A lane's share of the merge of a row: vectors of four columns of one split.
struct MergeLane {
  int32_t split;   // beyond the last for a lane without work
  int32_t vector;  // the first; the next ones are `lanes` apart
  int32_t lanes;   // lanes that share a split
};

// Shared memory: a barrier | row maxima and sums | O, each by (split, row). Nothing else uses it.
template <class Config>
class ClusterMerge {
  static constexpr int kRows = Config::kTileQ, kDimV = Config::kDimV;
  static constexpr int kStatsOffset = 16, kOOffset = kStatsOffset + (kRows * 8 << kMaxLog2Cluster);

 public:
  static constexpr int kBytes = Config::kMerges ? kOOffset + kRows * kDimV * 4 : 0;

  __device__ __forceinline__ ClusterMerge(const ForwardParams& params, uint32_t shared)
      : log2_ctas_(params.log2_cluster), shared_(shared) {}

  __device__ __forceinline__ int32_t ctas() const { return 1 << log2_ctas_; }

  // All threads call expect() at the start, and wait_for_others() before this CTA first sends.
  __device__ __forceinline__ void expect(int32_t rows) const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(shared_, 1);
      ptx::mbarrier_arrive_expect_tx(shared_, rows * (kDimV * 4 + ctas() * 8));
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void wait_for_others() const { ptx::cluster_wait(); }

  // Sends row r's maximum and sum to all CTAs. A whole warp calls this.
  __device__ __forceinline__ void send_stats(int32_t r, float2 stats) const {
    const int32_t to = threadIdx.x % 32;
    if (to >= ctas()) return;
    ptx::st_async_8(ptx::mapa(stats_address(ptx::cluster_rank(), r), to), __float_as_uint(stats.x),
                    __float_as_uint(stats.y), ptx::mapa(shared_, to));
  }
  // Sends four columns of row r to the CTA that merges them.
  __device__ __forceinline__ void send(int32_t r, int32_t column, const float (&o)[4]) const {
    const int32_t to = column >> log2_columns(), own = column & (columns() - 1);
    ptx::st_async_16(ptx::mapa(o_address(ptx::cluster_rank(), r) + own * 4, to),
                     __float_as_uint(o[0]), __float_as_uint(o[1]), __float_as_uint(o[2]),
                     __float_as_uint(o[3]), ptx::mapa(shared_, to));
  }
  // Waits until all splits have arrived. No other CTA accesses this CTA's memory afterwards.
  __device__ __forceinline__ void wait_for_splits() const {
    ptx::mbarrier_wait_cluster(shared_, 0);
  }

  // The columns of O that this CTA merges.
  __device__ __forceinline__ int32_t columns() const { return 1 << log2_columns(); }
  __device__ __forceinline__ int32_t first_column() const {
    return ptx::cluster_rank() * columns();
  }

  __device__ __forceinline__ MergeLane lane() const {
    const int32_t log2_vectors = log2_columns() - 2, most = 5 - log2_ctas_;
    const int32_t log2_lanes = log2_vectors < most ? log2_vectors : most, lane = threadIdx.x % 32;
    return {lane >> log2_lanes, lane & ((1 << log2_lanes) - 1), 1 << log2_lanes};
  }
  // Maximum and sum of row r in the lane's split.
  __device__ __forceinline__ float2 stats(const MergeLane& lane, int32_t r) const {
    return lane.split < ctas() ? ptx::load_shared_pair(stats_address(lane.split, r))
                               : float2{-INFINITY, 0.0f};
  }
  // Sums a vector of row r over the splits, times each lane's weight.
  __device__ __forceinline__ void sum_splits(const MergeLane& lane, int32_t r, int32_t vector,
                                             float weight, float (&o)[4]) const {
    if (weight != 0.0f) ptx::load_shared(o, o_address(lane.split, r) + vector * 16);
#pragma unroll
    for (float& x : o) x = weight == 0.0f ? 0.0f : x * weight;
    for (int32_t step = lane.lanes; step < lane.lanes << log2_ctas_; step *= 2) {
#pragma unroll
      for (float& x : o) x += __shfl_xor_sync(~0u, x, step);
    }
  }

 private:
  static_assert(kDimV == 64 || kDimV == 128 || kDimV == 256, "columns divide into powers of two");
  __device__ __forceinline__ int32_t log2_columns() const {
    return (kDimV == 64 ? 6 : kDimV == 128 ? 7 : 8) - log2_ctas_;
  }
  __device__ __forceinline__ uint32_t stats_address(int32_t split, int32_t r) const {
    return shared_ + kStatsOffset + (split * kRows + r) * 8;
  }
  __device__ __forceinline__ uint32_t o_address(int32_t split, int32_t r) const {
    return shared_ + kOOffset + (split * kRows + r) * columns() * 4;
  }

  const int32_t log2_ctas_;
  const uint32_t shared_;
};

}  // namespace flashattn::cuda::sm80
