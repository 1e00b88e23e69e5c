// Stream-K in the Hopper forward pass: a tile's O and lse from the results of its parts.
#pragma once

#include "cuda/kernels/sm90/fwd_consumer.cuh"

namespace flashattn::cuda::sm90 {

// Adds up the parts in their order, so that bits do not depend on which CTA does it, and stores
// lse. o: this lane's accumulators of O.
template <class Config>
__device__ __forceinline__ void add_parts(const FwdConsumer<Config>& consumer,
                                          float (&o)[Config::kDimV / 2]) {
  const ForwardParams& params = consumer.params_;
  const auto& work_tile = consumer.work_tile();
  const StreamK::Partial part = partial_of(params, work_tile.work_idx);
  const int32_t columns = params.problem.dim_v, quad_lane = consumer.lane() % 4;
  // Both rows of the lane at once: latency.
  int32_t row[2];
  int64_t first[2];
  float base[2] = {-INFINITY, -INFINITY}, total[2] = {}, inverse[2];
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
    row[mi] = consumer.row() + mi * 8;
    if (work_tile.query + row[mi] >= work_tile.query_end) row[mi] = -1;  // reads the first
    first[mi] = static_cast<int64_t>(part.first) * Config::kTileQ + max(row[mi], 0);
  }
  const auto sum_of = [&](int mi, int32_t p) {
    return params.partial_sums[first[mi] + int64_t{p} * Config::kTileQ];
  };
  const auto weight_of = [&](int mi, int32_t p) {
    const PartialSum x = sum_of(mi, p);
    return x.sum * ptx::exp2((x.base - base[mi]) * kLog2E);
  };
#pragma unroll 1
  for (int32_t p = 0; p < part.count; ++p) {
    for (int mi = 0; mi < 2; ++mi) base[mi] = fmaxf(base[mi], sum_of(mi, p).base);
  }
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
    if (base[mi] == -INFINITY) base[mi] = 0.0f;
  }
#pragma unroll 1
  for (int32_t p = 0; p < part.count; ++p) {
    for (int mi = 0; mi < 2; ++mi) total[mi] += weight_of(mi, p);
  }
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) inverse[mi] = total[mi] == 0 ? 0 : ptx::reciprocal(total[mi]);
#pragma unroll
  for (int x = 0; x < Config::kDimV / 2; ++x) o[x] = 0.0f;
#pragma unroll 1
  for (int32_t p = 0; p < part.count; ++p) {
    const float weight[2] = {weight_of(0, p) * inverse[0], weight_of(1, p) * inverse[1]};
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float* const from =
          params.partial_o + (first[mi] + int64_t{p} * Config::kTileQ) * columns + quad_lane * 2;
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        const float2 pair =
            x * 8 < columns ? *reinterpret_cast<const float2*>(from + x * 8) : float2{};
        float* const to = &o[4 * x + mi * 2];
        to[0] = fmaf(weight[mi], pair.x, to[0]);
        to[1] = fmaf(weight[mi], pair.y, to[1]);
      }
    }
  }
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
    if (params.args.lse == nullptr || quad_lane != mi || row[mi] < 0) continue;
    params.args.lse[work_tile.lse_row + row[mi]] =
        total[mi] == 0.0f ? -INFINITY : base[mi] + logf(total[mi]);
  }
}

// Called by all consumers of a CTA once they have stored a part, and it is known whether its bases
// overflowed. Returns whether this CTA has stored the last part of the tile. A part that is queued
// for a redo is not stored yet.
template <class Config>
__device__ __forceinline__ bool stored_last_part(const FwdConsumer<Config>& consumer, bool redo) {
  volatile int32_t& is_last = consumer.storage_.is_last_part;
  consumer.consumers_sync();
  if (consumer.warpgroup_ == 0 && consumer.leader_) {
    const volatile int32_t& queued = consumer.storage_.redo_queue[consumer.work_tile().redo_slot];
    ptx::fence_gpu();  // of what the barriers order before and after it, too
    is_last =
        (redo || queued == 0) && is_last_part(consumer.params_, consumer.work_tile().work_idx);
    ptx::fence_gpu();
  }
  consumer.consumers_sync();
  return is_last;
}

}  // namespace flashattn::cuda::sm90
