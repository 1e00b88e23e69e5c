// Configuration of the portable kernel for the gradient of a dense bias: its tiles in shared
// memory, and the steps that a CTA visits.
#pragma once

#include "cuda/device/block_mask.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda::sm80 {

// A CTA computes kTileQ x kTileKv elements of the gradient, a warp 16 kMmaM x kWarpTileKv of them.
// ScoreMod: RuntimeScoreMod, or the chain of a dense bias that is the same for all steps of a tile.
template <class T_, int kDim_, int kTileQ_, int kTileKv_, int kMmaM_, int kKeyWarps_, int kStages_,
          int kMinCtasPerSm_, class ScoreMod_>
struct DbiasConfig {
  using T = T_;
  using ScoreMod = ScoreMod_;
  static constexpr int kDim = kDim_, kMmaM = kMmaM_, kStages = kStages_;
  static constexpr int kTileQ = kTileQ_, kTileKv = kTileKv_, kMinCtasPerSm = kMinCtasPerSm_;
  static constexpr int kKeyWarps = kKeyWarps_, kWarpTileKv = kTileKv / kKeyWarps;
  static constexpr int kWarps = kTileQ / (16 * kMmaM) * kKeyWarps, kThreads = 32 * kWarps;
  static constexpr bool kIsDense = !ScoreMod::kIsRuntime;
  static_assert(kStages == 1 || kStages == 2, "see DbiasKernel::run()");

  using QTile = SmemTile<kTileQ, kDim, sizeof(T)>;
  using KvTile = SmemTile<kTileKv, kDim, sizeof(T)>;
  // A stage: Q | K | dO | V. Row statistics of a stage: lse2 | base | delta.
  static constexpr int kDout = QTile::kBytes + KvTile::kBytes, kStageBytes = 2 * kDout;
  static constexpr int kStatBytes = kTileQ * 4;
  // Stages | statistics | bias, each thread's elements in its own order, fp32 | steps.
  static constexpr int kStats = kStages * kStageBytes, kBias = kStats + kStages * 3 * kStatBytes;
  static constexpr int kBiasBytes = kIsDense ? kTileQ * kTileKv * 4 : 0;
  static constexpr int kSteps = kBias + kBiasBytes;

  // Steps found at once, a lane each: fewer where shared memory is full.
  static constexpr int kStepsAtOnce = kDim * sizeof(T) > 256 ? 8 : 32;
};

// A step: the part of the gradient that comes from a sequence, a head and a Q tile.
struct alignas(16) DbiasStep {
  const char *q, *dout, *k, *v;  // first rows
  int64_t row_stats;             // index of the first row's lse2, base and delta
  int32_t b, h;
  Interval queries;  // of the sequence
  int32_t keys;      // in the tile
  Lengths len;
  int32_t full;             // every query of the tile sees every key of the tile
  int32_t block_mask_full;  // the block mask hides no key
};

// A tile of dbias and what is summed into it.
struct DbiasTile {
  int32_t query, key;  // the first
  int32_t row_tiles;   // Q tiles, sequences and heads that are summed
  Interval batches, heads;
};

template <class Config>
struct DbiasSharedStorage {
  DbiasStep steps[2 * Config::kStepsAtOnce];  // a ring
  DbiasTile tile;
  Interval range;  // steps that have not been looked at
  int32_t found;   // steps found
  int32_t cta_idx;
};

template <class Config>
constexpr int kDbiasSharedBytes =
    Config::kSteps + static_cast<int>(sizeof(DbiasSharedStorage<Config>));

// Decodes a tile index: keys vary fastest, then queries, heads and sequences.
template <class Config>
__device__ __forceinline__ DbiasTile dbias_tile(const BackwardParams& params, int32_t tile) {
  const BackwardArgs& args = params.args;
  int32_t rest = tile;
  const auto take = [&rest](int64_t stride, int32_t count) {
    if (stride == 0) return Interval{0, count};
    const int32_t own = rest % count;
    rest /= count;
    return Interval{own, own + 1};
  };
  DbiasTile t;
  t.key = take(1, (args.shape.seqlen_kv + Config::kTileKv - 1) / Config::kTileKv).begin;
  t.key *= Config::kTileKv;
  const Interval tiles =
      take(args.dbias_stride_row, (args.shape.seqlen_q + Config::kTileQ - 1) / Config::kTileQ);
  t.query = tiles.begin * Config::kTileQ;
  t.row_tiles = tiles.end - tiles.begin;
  t.heads = take(args.dbias_stride_head, params.problem.heads_q);
  t.batches = take(args.dbias_stride_batch, args.shape.batch);
  return t;
}

// Describes step n of a tile: Q tiles vary fastest, then heads and sequences. Returns false if no
// query sees a key.
template <class Config>
__device__ __forceinline__ bool make_step(const BackwardParams& params, const DbiasTile& tile,
                                          int32_t n, DbiasStep& step) {
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  const MaskRule mask = problem.mask_rule();
  const int32_t head_idx = n / tile.row_tiles, heads = tile.heads.end - tile.heads.begin;
  step.b = tile.batches.begin + head_idx / heads;
  step.h = tile.heads.begin + head_idx % heads;
  const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, in, step.b);
  const Lengths len = step.len = sequence.len;
  const int32_t query = tile.query + (n - head_idx * tile.row_tiles) * Config::kTileQ;
  step.queries = {query, min(query + Config::kTileQ, len.q)};
  const Interval keys{tile.key, min(tile.key + Config::kTileKv, len.kv)};
  if (query >= len.q || keys.begin >= keys.end) return false;
  const KeySpan span = key_span(mask, step.queries, len);
  const Interval seen = intersect(keys, span.any);
  if (seen.begin >= seen.end) return false;
  const TileKind kind = BlockMask::of(problem, in, step.b, step.h).kind(step.queries, seen);
  if (kind == TileKind::kEmpty) return false;
  step.keys = keys.end - keys.begin;
  step.block_mask_full = kind == TileKind::kFull;
  step.full = kind == TileKind::kFull && step.keys == Config::kTileKv &&
              step.queries.end - query == Config::kTileQ && span.all.begin <= keys.begin &&
              keys.end <= span.all.end;
  constexpr int kSize = sizeof(typename Config::T);
  const int32_t kv_head = step.h / problem.q_heads_per_kv_head();
  const int64_t row = sequence.offset_q + query, key = sequence.offset_kv + tile.key;
  step.q = tensor_row(in.q, kSize, step.b, step.h, row);
  step.dout = tensor_row(params.dout, kSize, step.b, step.h, row);
  step.k = tensor_row(in.k, kSize, step.b, kv_head, key);
  step.v = tensor_row(in.v, kSize, step.b, kv_head, key);
  step.row_stats = params.lse_delta_offset(sequence, step.b, step.h) + query;
  return true;
}

// Finds the next steps of the range that add something, if there are any. The first warp calls it.
template <class Config>
__device__ __forceinline__ void find_steps(const BackwardParams& params,
                                           DbiasSharedStorage<Config>& storage, int32_t lane) {
  const int32_t before = storage.found, end = storage.range.end;
  int32_t found = before, n = storage.range.begin;
  while (found == before && n < end) {
    DbiasStep step;
    const bool adds = lane < Config::kStepsAtOnce && n + lane < end &&
                      make_step<Config>(params, storage.tile, n + lane, step);
    const uint32_t all = __ballot_sync(~0u, adds);
    if (adds) {
      const int32_t own = found + __popc(all & ((1u << lane) - 1));
      storage.steps[own % (2 * Config::kStepsAtOnce)] = step;
    }
    found += __popc(all);
    n = min(n + Config::kStepsAtOnce, end);
  }
  __syncwarp();  // all lanes have read found and range
  if (lane > 0) return;
  storage.found = found;
  storage.range.begin = n;
}

}  // namespace flashattn::cuda::sm80
