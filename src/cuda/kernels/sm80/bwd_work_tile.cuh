// Which keys a block of the backward pass works on, which queries it sees, and whose turn it is to
// add to dQ.
#pragma once

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm80 {

// A tile of queries of one head.
struct alignas(16) Step {
  int32_t head, tile;
  bool shown;  // the block mask hides nothing
};

// Rows of one sequence, of any head.
struct alignas(16) SequenceRows {
  char* first;  // of head 0
  int64_t head_bytes;

  __device__ __forceinline__ char* of(int32_t head) const {
    return first + static_cast<uint32_t>(head) * head_bytes;
  }
};

// In shared memory: registers are scarce.
struct BackwardPlace {
  SeqlenInfo sequence;
  int32_t b, kv_head;
  int32_t swapped;    // 1: the first warps are the gradients'
  int32_t large_lse;  // whether there are rows with a base of their own
  Interval heads;
  Interval keys, full;  // queries that see all of the keys
  Interval tiles;       // of queries that see some
  Step steps[2];        // whose dS lies in each tile of scores; head -1: none
  SequenceRows q, dout, dq;
  SequenceRows numbers[2];  // lse2, D
  SequenceRows turns;       // of halves: see turn_of
};

// One thread calls it. Empty keys: nothing to do.
template <class Config>
__device__ __forceinline__ BackwardPlace find_place(const BackwardParams& params) {
  constexpr int32_t kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  const Problem& problem = params.problem;
  // Blocks that wait for others must not have started before them.
  const int32_t block = params.dq_order ? atomicAdd(params.work_counter, 1) : blockIdx.x;
  const L2Swizzle::Tile at = params.swizzle.tile(block);
  // Early keys first: under a causal mask they take longest. Where they wait for late ones, these.
  const int32_t key_block = params.dq_order ? params.key_blocks - 1 - at.tile_idx : at.tile_idx;
  BackwardPlace p;
  // Four warps stand before four schedulers: two blocks on a multiprocessor should not put their
  // exponentials before the same two.
  p.swapped = Config::kWarps == 4 ? ptx::warp_slot() / 4 % 2 : 0;
  p.large_lse = *params.large_lse == params.large_lse_stamp;
  p.b = params.by_heads_kv.quotient(at.head_idx);
  p.kv_head = at.head_idx - p.b * problem.heads_kv;
  p.sequence = seqlen_info(problem, params.args.shape, params.args.inputs, p.b);
  const Lengths len = p.sequence.len;
  p.keys.begin = min(key_block * kTileKv, len.kv);
  p.keys.end = p.keys.begin + min(kTileKv, len.kv - p.keys.begin);
  p.full = p.tiles = p.heads = {0, 0};
  p.steps[0] = p.steps[1] = {-1, 0, true};
  if (p.keys.begin >= p.keys.end) return p;
  Interval any{0, len.q}, all = any;
  if (!sees_all(problem.mask_rule())) {
    any = query_span(problem.mask_rule(), p.keys, len);
    all = full_queries(problem.mask_rule(), p.keys, len);
  }
  if (any.begin >= any.end) return p;
  p.tiles = {any.begin / kTileQ, (any.end + kTileQ - 1) / kTileQ};
  p.heads = {p.kv_head * params.q_heads_per_kv_head, (p.kv_head + 1) * params.q_heads_per_kv_head};
  if (p.keys.end - p.keys.begin == kTileKv) p.full = all;
  const auto rows_of = [&](const flashattn_tensor& t) -> SequenceRows {
    constexpr int32_t kSize = sizeof(typename Config::T);
    return {tensor_row(t, kSize, p.b, 0, p.sequence.offset_q), t.stride_head * kSize};
  };
  p.q = rows_of(params.args.inputs.q);
  p.dout = rows_of(params.dout);
  const int64_t row = params.row(p.b, 0, p.sequence.offset_q);
  const int64_t head_bytes = row_layout(problem, params.args.shape).head_stride * 4;
  p.dq = {reinterpret_cast<char*>(params.dq + row * problem.dim_qk), head_bytes * problem.dim_qk};
  p.numbers[0] = {reinterpret_cast<char*>(params.lse2 + row), head_bytes};
  p.numbers[1] = {reinterpret_cast<char*>(params.delta + row), head_bytes};
  if (Config::kHalves == 1 || !params.dq_order) return p;
  int32_t* const turns = params.dq_order + params.query_tile(p.sequence, p.b, 0, 0, kTileQ);
  p.turns = {reinterpret_cast<char*>(turns), params.head_tiles(kTileQ) * 4};
  return p;
}

template <class Config>
__device__ __forceinline__ Interval queries_of(const BackwardPlace& place, Step step) {
  const int32_t begin = step.tile * Config::kTileQ;
  return {begin, min(begin + Config::kTileQ, place.sequence.len.q)};
}

// Tiles of keys add to a tile of queries one after the other, the last that it sees first: all
// blocks begin with the queries next to the diagonal, so that under most masks nobody waits. A turn
// is passed in shares, one for each warp.
template <class Config>
__device__ __forceinline__ int32_t* turn_of(const BackwardParams& params,
                                            const BackwardPlace& place, Step step) {
  // The compiler keeps what this takes in six registers. Halves cannot spare them.
  if constexpr (Config::kHalves == 1) {
    return params.dq_order +
           params.query_tile(place.sequence, place.b, step.head, step.tile, Config::kTileQ);
  } else {
    return reinterpret_cast<int32_t*>(place.turns.of(step.head)) + step.tile;
  }
}

template <class Config>
__device__ __forceinline__ void await_turn(const BackwardParams& params, const BackwardPlace& place,
                                           Step step) {
  const KeySpan span =
      key_span(params.problem.mask_rule(), queries_of<Config>(place, step), place.sequence.len);
  const int32_t before = (span.any.end - 1) / Config::kTileKv - place.keys.begin / Config::kTileKv;
  const int32_t* turn = turn_of<Config>(params, place, step);
  while (ptx::load_acquire(turn) < before * Config::kWarps) __nanosleep(20);
}

// The next tile in which a query sees a key of the block; past the last one head = heads.end.
template <class Config>
__device__ __forceinline__ Step next_step(const BackwardParams& params, const BackwardPlace& place,
                                          Step step) {
  if (++step.tile >= place.tiles.end) step = {step.head + 1, place.tiles.begin, true};
  const bool masked = Config::kModified && (params.problem.mask & FLASHATTN_MASK_BLOCKS);
  // 32 tiles at a time, one a lane.
  while (masked && step.head < place.heads.end) {
    const BlockMask blocks = BlockMask::of(params.problem, params.args.inputs, place.b, step.head);
    const Step own{step.head, step.tile + static_cast<int32_t>(threadIdx.x) % 32, true};
    TileKind kind = TileKind::kEmpty;
    if (own.tile < place.tiles.end) {
      kind = blocks.kind(queries_of<Config>(place, own), place.keys);
    }
    const uint32_t some = __ballot_sync(~0u, kind != TileKind::kEmpty);
    const uint32_t all = __ballot_sync(~0u, kind == TileKind::kFull);
    const int32_t skipped = some ? __ffs(some) - 1 : min(32, place.tiles.end - step.tile);
    if (params.dq_order && threadIdx.x == 0) {
      for (int32_t n = 0; n < skipped; ++n) {
        const Step empty{step.head, step.tile + n, true};
        await_turn<Config>(params, place, empty);
        ptx::add_release(turn_of<Config>(params, place, empty), Config::kWarps);
      }
    }
    step.tile += skipped;
    step.shown = all >> (skipped & 31) & 1;
    if (some) break;
    if (step.tile >= place.tiles.end) step = {step.head + 1, place.tiles.begin, true};
  }
  return step;
}

}  // namespace flashattn::cuda::sm80
