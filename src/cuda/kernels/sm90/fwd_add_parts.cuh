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
#pragma unroll
  for (int x = 0; x < Config::kDimV / 2; ++x) o[x] = 0.0f;
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
    const int32_t i = consumer.row() + mi * 8;
    if (work_tile.query + i >= work_tile.query_end) continue;
    const int64_t first = static_cast<int64_t>(part.first) * Config::kTileQ + i;
    const PartialSum* const sums = params.partial_sums + first;
    float base = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int32_t p = 0; p < part.count; ++p) base = fmaxf(base, sums[p * Config::kTileQ].base);
    if (base == -INFINITY) base = 0.0f;
    const auto weight_of = [&](int32_t p) {
      const PartialSum x = sums[p * Config::kTileQ];
      return x.sum * ptx::exp2((x.base - base) * kLog2E);
    };
#pragma unroll 1
    for (int32_t p = 0; p < part.count; ++p) total += weight_of(p);
    const float inverse = total == 0.0f ? 0.0f : ptx::reciprocal(total);
#pragma unroll 1
    for (int32_t p = 0; p < part.count; ++p) {
      const float weight = weight_of(p) * inverse;
      const float* const from =
          params.partial_o + (first + int64_t{p} * Config::kTileQ) * columns + quad_lane * 2;
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        if (x * 8 >= columns) continue;
        const float2 pair = *reinterpret_cast<const float2*>(from + x * 8);
        o[4 * x + mi * 2] = fmaf(weight, pair.x, o[4 * x + mi * 2]);
        o[4 * x + mi * 2 + 1] = fmaf(weight, pair.y, o[4 * x + mi * 2 + 1]);
      }
    }
    if (params.args.lse && quad_lane == mi) {
      params.args.lse[work_tile.lse_row + i] = total == 0.0f ? -INFINITY : base + logf(total);
    }
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
