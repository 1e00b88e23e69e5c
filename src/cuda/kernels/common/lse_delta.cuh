// What the backward pass wants to know of each query, whoever prepares it.
#pragma once

#include "cuda/params.h"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda {

// Whether an LSE is too large for fp32 to hold the sum of a row's weights, too.
__device__ __forceinline__ bool is_large_lse(float lse) {
  return fabsf(lse) >= kLargeLse && fabsf(lse) < INFINITY;
}

// A score beside the base of its row, see BackwardParams::softmax_base: at most 0, in the direction
// of `unit`. Of a row without one the score itself.
__device__ __forceinline__ float subtract_base(float score, float base, float unit) {
  const float x = __fsub_rn(score, base);
  if (base != base) return score;
  return x * unit > 0.0f ? 0.0f : x;
}

// Of a row of a sequence's head, or one past the last to the end of a tile: lse2, delta of `sum`,
// its o dout, and with the first of a tile what has yet to be added to dq. The sequence's first
// query is number lse_delta_offset, with tile_q of tile first_tile.
__device__ __forceinline__ void store_lse_delta(const BackwardParams& params,
                                                const SeqlenInfo& sequence,
                                                int64_t lse_delta_offset, int64_t first_tile,
                                                int32_t row, float lse, float dlse, float sum) {
  params.lse2[lse_delta_offset + row] = lse == -INFINITY ? INFINITY : lse * kLog2E;
  params.softmax_base[lse_delta_offset + row] = NAN;
  params.delta[lse_delta_offset + row] = row < sequence.len.q ? sum - dlse : 0.0f;
  if (params.tile_q == 0 || row % params.tile_q != 0) return;
  const Interval rows{row, min(row + params.tile_q, sequence.len.q)};
  const Interval tiles = key_tiles(params.problem.mask_rule(), rows, sequence.len, params.tile_kv);
  const int64_t tile = first_tile + row / params.tile_q;
  const int32_t state = kDqPendingTile * max(tiles.end - tiles.begin, 0);
  params.dq_states[tile * params.dq_parts] = state;
  if (params.dq_parts > 1) params.dq_states[tile * 2 + 1] = state;  // a loop would spill
  if (params.ordered) params.dq_first[tile] = tiles.begin;
}

// By the first block, of which `threads` threads call it.
__device__ __forceinline__ void clear_counters(const BackwardParams& params, int32_t threads,
                                               int32_t first_work_item) {
  const int32_t thread = threadIdx.x;
  if (thread == 0 && params.work_counter) *params.work_counter = first_work_item;
  if (thread == 0 && params.dq_work_counter) *params.dq_work_counter = first_work_item;
  for (int32_t n = thread; n < params.arrived_count; n += threads) params.arrived[n] = 0;
}

}  // namespace flashattn::cuda
