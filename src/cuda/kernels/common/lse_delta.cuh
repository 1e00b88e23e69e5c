// Row statistics of the backward pass, stored by the preprocess kernels of both backends.
#pragma once

#include <type_traits>

#include "cuda/params.h"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda {

// Backward kernels hold P times 2^kPExponent: a weight of a long sequence may be below 2^-14, the
// least normal number of fp16. lse2 and delta are stored for that: P = 2^(s - lse2), dS =
// P (dP kPUnit - delta), and dV is P^T dO kPUnit.
template <class T>
constexpr int kPExponent = std::is_same<T, __half>::value ? 10 : 0;
template <class T>
constexpr float kPUnit = 1.0f / (1 << kPExponent<T>);

// dP - D in the unit of a stored delta.
template <class T>
__device__ __forceinline__ float subtract_delta(float dp, float delta) {
  return kPExponent<T> == 0 ? dp - delta : fmaf(dp, kPUnit<T>, -delta);
}

// Whether an lse is so large that fp32 has no digits left for the sum of the row's weights.
__device__ __forceinline__ bool is_large_lse(float lse) {
  return fabsf(lse) >= kLargeLse && fabsf(lse) < INFINITY;
}

// A row's base, see BackwardParams::softmax_base. The unit of the scores is not negative.
class RowBase {
 public:
  // stored: NaN if the row has none; its scores stay as they are.
  __device__ __forceinline__ explicit RowBase(float stored)
      : base_(stored == stored ? stored : 0.0f), limit_(stored == stored ? 0.0f : INFINITY) {}

  // The score relative to the base. The base is the largest score: if rounding makes the difference
  // positive, it becomes 0.
  __device__ __forceinline__ float subtract_from(float score) const {
    return fminf(__fsub_rn(score, base_), limit_);
  }

 private:
  float base_, limit_;
};

// Stores lse2, base and delta of a row, and with the first row of a tile the state of its dq: the
// number of KV tiles still to be added; with a block mask bwd_block_mask.cu has stored it. Rows
// past the last, up to the end of the tile, are stored, too. sum: sum of o dout over the row.
// lse_delta_offset: index of the sequence's first query, whose tile is first_tile.
template <class T>
__device__ __forceinline__ void store_lse_delta(const BackwardParams& params,
                                                const SeqlenInfo& sequence,
                                                int64_t lse_delta_offset, int64_t first_tile,
                                                int32_t row, float lse, float dlse, float sum) {
  params.lse2[lse_delta_offset + row] =
      lse == -INFINITY ? INFINITY : fmaf(lse, kLog2E, -kPExponent<T>);
  params.softmax_base[lse_delta_offset + row] = NAN;
  params.delta[lse_delta_offset + row] = row < sequence.len.q ? (sum - dlse) * kPUnit<T> : 0.0f;
  if (params.tile_q == 0 || row % params.tile_q != 0) return;
  if (params.problem.mask & FLASHATTN_MASK_BLOCKS) return;
  const Interval rows{row, min(row + params.tile_q, sequence.len.q)};
  const Interval tiles = key_tiles(params.problem.mask_rule(), rows, sequence.len, params.tile_kv);
  const int64_t tile = first_tile + row / params.tile_q;
  const int32_t state = kDqPendingTile * max(tiles.end - tiles.begin, 0);
  params.dq_states[tile * params.dq_ctas] = state;
  if (params.dq_ctas > 1) params.dq_states[tile * 2 + 1] = state;  // a loop spills registers
  if (params.ordered) params.dq_first[tile] = tiles.begin;
}

// Sets the work counters, and clears `arrived`. `threads` threads of the first CTA call this.
__device__ __forceinline__ void clear_counters(const BackwardParams& params, int32_t threads,
                                               int32_t first_work_item) {
  const int32_t thread = threadIdx.x;
  if (thread == 0 && params.work_counter) *params.work_counter = first_work_item;
  if (thread == 0 && params.dq_work_counter) *params.dq_work_counter = first_work_item;
  for (int32_t n = thread; n < params.arrived_count; n += threads) params.arrived[n] = 0;
}

}  // namespace flashattn::cuda
