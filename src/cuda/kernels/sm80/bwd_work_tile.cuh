// The work tile of a CTA of the portable backward pass: its keys, the Q tiles that see them, and
// the order in which CTAs add to dQ.
#pragma once

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm80 {

// A step of the mainloop: a Q tile of one head.
struct alignas(16) Step {
  int32_t head, tile;
  bool block_mask_full;  // the block mask hides no key
};

// Row 0 of a sequence for every head.
struct alignas(16) SequenceRows {
  char* first;  // row 0 of head 0
  int64_t head_bytes;

  __device__ __forceinline__ char* of(int32_t head) const {
    return first + static_cast<uint32_t>(head) * head_bytes;
  }
};

// Lies in shared memory, as registers are scarce.
struct BwdWorkTile {
  SeqlenInfo sequence;
  int32_t b, kv_head;
  int32_t roles_swapped;  // 1: the first half of the warps are dS warps
  int32_t large_lse;      // some rows have a base, see BackwardParams::softmax_base
  Interval heads;
  Interval keys, full;  // full: queries that see all of the keys
  Interval tiles;       // Q tiles with queries that see some of the keys
  Step steps[2];        // the step whose dS lies in each score tile; head -1: none
  SequenceRows q, dout, dq;
  SequenceRows row_stats[2];   // lse2, delta
  SequenceRows dq_semaphores;  // with kDimSplit = 2: see dq_semaphore()
};

// One thread calls this. Empty keys: the CTA has no work.
template <class Config>
__device__ __forceinline__ BwdWorkTile make_work_tile(const BackwardParams& params) {
  constexpr int32_t kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  const Problem& problem = params.problem;
  // With ordered additions to dQ a CTA may wait only for CTAs that have started before it.
  const int32_t cta_idx = params.dq_order ? atomicAdd(params.work_counter, 1) : blockIdx.x;
  const L2Swizzle::Tile at = params.swizzle.tile(cta_idx);
  // The first KV tiles run first: with a causal mask they take longest. With ordered additions they
  // wait for later KV tiles, so these run first.
  const int32_t kv_tile = params.dq_order ? params.kv_tiles - 1 - at.tile_idx : at.tile_idx;
  BwdWorkTile p;
  // Four warps run on four schedulers. Two CTAs of a multiprocessor should not have their P warps,
  // which compute the exponentials, on the same two.
  p.roles_swapped = Config::kWarps == 4 ? ptx::warp_slot() / 4 % 2 : 0;
  p.large_lse = *params.large_lse == params.large_lse_stamp;
  p.b = params.by_heads_kv.quotient(at.head_idx);
  p.kv_head = at.head_idx - p.b * problem.heads_kv;
  p.sequence = seqlen_info(problem, params.args.shape, params.args.inputs, p.b);
  const Lengths len = p.sequence.len;
  p.keys.begin = min(kv_tile * kTileKv, len.kv);
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
  p.row_stats[0] = {reinterpret_cast<char*>(params.lse2 + row), head_bytes};
  p.row_stats[1] = {reinterpret_cast<char*>(params.delta + row), head_bytes};
  if (Config::kDimSplit == 1 || !params.dq_order) return p;
  int32_t* const dq_semaphores = params.dq_order + params.query_tile(p.sequence, p.b, 0, 0, kTileQ);
  p.dq_semaphores = {reinterpret_cast<char*>(dq_semaphores), params.head_tiles(kTileQ) * 4};
  return p;
}

template <class Config>
__device__ __forceinline__ Interval q_range(const BwdWorkTile& work_tile, Step step) {
  const int32_t begin = step.tile * Config::kTileQ;
  return {begin, min(begin + Config::kTileQ, work_tile.sequence.len.q)};
}

// The semaphore of a Q tile, which fixes the order in which KV tiles add to its dQ: the last KV
// tile that it sees comes first. As all CTAs begin with the queries next to the diagonal, most
// masks cause no wait. Each warp of a CTA increments the semaphore by 1.
template <class Config>
__device__ __forceinline__ int32_t* dq_semaphore(const BackwardParams& params,
                                                 const BwdWorkTile& work_tile, Step step) {
  // The compiler keeps the operands of this in six registers, which kDimSplit = 2 cannot spare.
  if constexpr (Config::kDimSplit == 1) {
    return params.dq_order +
           params.query_tile(work_tile.sequence, work_tile.b, step.head, step.tile, Config::kTileQ);
  } else {
    return reinterpret_cast<int32_t*>(work_tile.dq_semaphores.of(step.head)) + step.tile;
  }
}

template <class Config>
__device__ __forceinline__ void wait_dq_semaphore(const BackwardParams& params,
                                                  const BwdWorkTile& work_tile, Step step) {
  const KeySpan span = key_span(params.problem.mask_rule(), q_range<Config>(work_tile, step),
                                work_tile.sequence.len);
  const int32_t before =
      (span.any.end - 1) / Config::kTileKv - work_tile.keys.begin / Config::kTileKv;
  const int32_t* semaphore = dq_semaphore<Config>(params, work_tile, step);
  while (ptx::load_acquire(semaphore) < before * Config::kWarps) __nanosleep(20);
}

// The next step with a query that sees one of the keys; after the last one head = heads.end.
// Skipped steps are counted in their semaphores.
template <class Config>
__device__ __forceinline__ Step next_step(const BackwardParams& params,
                                          const BwdWorkTile& work_tile, Step step) {
  if (++step.tile >= work_tile.tiles.end) step = {step.head + 1, work_tile.tiles.begin, true};
  const bool masked =
      Config::ScoreMod::template kHas<BlockMask> && (params.problem.mask & FLASHATTN_MASK_BLOCKS);
  // Lanes test 32 tiles at once.
  while (masked && step.head < work_tile.heads.end) {
    const BlockMask block_mask =
        BlockMask::of(params.problem, params.args.inputs, work_tile.b, step.head);
    const Step own{step.head, step.tile + static_cast<int32_t>(threadIdx.x) % 32, true};
    TileKind kind = TileKind::kEmpty;
    if (own.tile < work_tile.tiles.end) {
      kind = block_mask.kind(q_range<Config>(work_tile, own), work_tile.keys);
    }
    const uint32_t some = __ballot_sync(~0u, kind != TileKind::kEmpty);
    const uint32_t all = __ballot_sync(~0u, kind == TileKind::kFull);
    const int32_t skipped = some ? __ffs(some) - 1 : min(32, work_tile.tiles.end - step.tile);
    if (params.dq_order && threadIdx.x == 0) {
      for (int32_t n = 0; n < skipped; ++n) {
        const Step empty{step.head, step.tile + n, true};
        wait_dq_semaphore<Config>(params, work_tile, empty);
        ptx::red_add_release(dq_semaphore<Config>(params, work_tile, empty), Config::kWarps);
      }
    }
    step.tile += skipped;
    step.block_mask_full = all >> (skipped & 31) & 1;
    if (some) break;
    if (step.tile >= work_tile.tiles.end) step = {step.head + 1, work_tile.tiles.begin, true};
  }
  return step;
}

}  // namespace flashattn::cuda::sm80
