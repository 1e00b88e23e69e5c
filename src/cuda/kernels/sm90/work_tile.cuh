// Work tiles of the Hopper forward pass: the scheduler warp plans Q tiles; producers and consumers
// read the plan, one WorkTile per Q tile.
#pragma once

#include "core/score_mod.h"
#include "cuda/host/schedule/warpgroup_rows.h"
#include "cuda/device/alibi.cuh"
#include "cuda/device/dense_bias.cuh"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

// One warpgroup's 64 rows. Bounds are indices of KV tiles, which are visited from kv_end - 1 down
// to kv_begin.
struct WarpgroupTile {
  int32_t kv_begin, kv_end;  // KV tiles of which some row sees a key
  // Rows see only the upper half of tile kv_begin; only the lower half of tile kv_end - 1.
  bool first_upper_only, last_lower_only;
  int32_t full_begin, full_end;  // KV tiles of which every row sees every key
  int32_t fixed_base_end;        // below: every row has seen a key in a tile visited before
  int32_t diagonal;              // the key position of the first row
  // ALiBi is linear in the key, since all keys lie on one side of all rows, from linear_begin on
  // and below linear_end.
  union {
    int32_t linear_begin;
    int32_t first_descales;  // BlockDescales: KV tile 0 in ForwardParams::half_descales
  };
  union {
    int32_t linear_end;
    float score_scale;  // BlockDescales: of scores in units of log2(e), with the descale of Q
  };
};

enum class WorkKind : int32_t {
  kTile,
  kDrain,  // consumers arrive at all_done once the tiles before are finished
  kEnd,
};

template <int kConsumers>
struct WorkTile {
  WorkKind kind;
  int32_t redo_slot;    // the tile's entry in redo_queue: the count of tiles since the last drain
  int32_t work_idx;     // index of the work tile: see SchedulerWarp
  int16_t redo_online;  // a redo, with online softmax in every step: fixed_base_end is 0
  int16_t is_partial;   // packed heads, stream-K: it covers only a range of its rows' keys
  int32_t b, h;
  int32_t query, query_end;  // the rows of the tile
  Lengths len;
  int32_t kv_begin, kv_end;  // KV tiles that any warpgroup needs
  int64_t offset_q, offset_kv;
  int64_t lse_row;    // the index of row `query` in lse
  float alibi_slope;  // in the units of the scores; 0: no ALiBi
  WarpgroupTile warpgroups[kConsumers];
};

// sequence_of() and q_head_of() decode a head_idx of the L2 swizzle. A dense bias that all
// sequences share may exceed L2: then consecutive head_idx are the sequences of one head, so that
// they read its bias at about the same time.
template <class ScoreMod>
__device__ __forceinline__ bool sequences_come_first(const ForwardParams& params) {
  return !ScoreMod::kIsRuntime && ScoreMod::template kHas<DenseBias> &&
         params.args.inputs.bias_stride_batch == 0;
}
template <class ScoreMod>
__device__ __forceinline__ int32_t sequence_of(const ForwardParams& params, int32_t head_idx) {
  if (sequences_come_first<ScoreMod>(params)) return head_idx % params.args.shape.batch;
  return head_idx / params.problem.heads_q;
}
template <class ScoreMod>
__device__ __forceinline__ int32_t q_head_of(const ForwardParams& params, int32_t head_idx) {
  if (sequences_come_first<ScoreMod>(params)) return head_idx / params.args.shape.batch;
  return head_idx % params.problem.heads_q;
}

// Sets a warpgroup's KV tiles from the keys that its rows see. redo: see WorkTile::redo_online.
template <int kTileKv>
__device__ __forceinline__ void set_kv_tiles(WarpgroupTile& warpgroup, const KeySpan& span,
                                             bool redo) {
  if (span.any.begin < span.any.end) {
    warpgroup.kv_begin = span.any.begin / kTileKv;
    warpgroup.kv_end = (span.any.end - 1) / kTileKv + 1;
    warpgroup.first_upper_only = span.any.begin % kTileKv >= kTileKv / 2;
    warpgroup.last_lower_only = (span.any.end - 1) % kTileKv < kTileKv / 2;
  }
  if (span.all.begin < span.all.end) {
    warpgroup.full_begin = (span.all.begin + kTileKv - 1) / kTileKv;
    warpgroup.full_end = span.all.end / kTileKv;
    // Every row sees key all.end - 1: after that key's tile each has seen one.
    if (!redo) warpgroup.fixed_base_end = (span.all.end - 1) / kTileKv;
  }
}

// Plans Q tile `linear_idx` in the order of L2Swizzle, or the part of it that sees `keys`; all
// lanes of the scheduler warp call it, and lane n fills warpgroups[n]. Returns false if the tile
// has no row.
template <class Config>
__device__ __forceinline__ bool plan_work_tile(const ForwardParams& params, int32_t work_idx,
                                               int32_t linear_idx, const Interval& keys, bool redo,
                                               WorkTile<Config::kConsumers>& work_tile) {
  using ScoreMod = typename Config::ScoreMod;
  constexpr int32_t kTileKv = Config::kTileKv, kConsumers = Config::kConsumers;
  constexpr bool kHasAlibi = ScoreMod::template kHas<Alibi>;
  const Problem& problem = params.problem;
  const int32_t lane = threadIdx.x % 32;
  float slope = 0.0f;
  const L2Swizzle::Tile position = params.swizzle.tile(linear_idx);
  int32_t query, query_end;
  Lengths len;
  {
    const int32_t b = sequence_of<ScoreMod>(params, position.head_idx);
    const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, params.args.inputs, b);
    len = sequence.len;
    const Interval warpgroups =
        warpgroups_of_tile(static_cast<int32_t>(ceil_div(len.q, kWarpgroupRows)), kConsumers,
                           params.swizzle.tiles - 1 - position.tile_idx);
    query = warpgroups.begin * kWarpgroupRows;
    query_end = min(warpgroups.end * kWarpgroupRows, len.q);
    if (query >= query_end) return false;
    if (kHasAlibi && problem.bias & FLASHATTN_BIAS_ALIBI) {
      const bool wide = ScoreMod::kIsRuntime || (redo && !Config::kIsFp8);
      const float unit = wide ? kLog2E / kWideUnit : kLog2E;
      slope = Alibi::slope_of(problem, params.args.inputs, b,
                              q_head_of<ScoreMod>(params, position.head_idx)) *
              unit;
    }
    if (lane == 0) {
      work_tile.alibi_slope = slope;
      work_tile.kind = WorkKind::kTile;
      work_tile.work_idx = work_idx;
      work_tile.redo_online = redo;
      work_tile.b = b;
      work_tile.h = q_head_of<ScoreMod>(params, position.head_idx);
      work_tile.query = query;
      work_tile.query_end = query_end;
      work_tile.len = len;
      work_tile.offset_q = sequence.offset_q;
      work_tile.offset_kv = sequence.offset_kv;
    }
  }
  WarpgroupTile warpgroup{};
  const Interval rows = intersect(
      {query + kWarpgroupRows * lane, query + kWarpgroupRows * (lane + 1)}, {0, query_end});
  if (lane < kConsumers && rows.begin < rows.end) {
    KeySpan span = key_span(problem.mask_rule(), rows, len);
    if constexpr (Config::kUseStreamK) {
      span = {intersect(span.any, keys), intersect(span.all, keys)};
    }
    set_kv_tiles<kTileKv>(warpgroup, span, redo);
    if constexpr (kHasAlibi) {
      warpgroup.diagonal =
          query + kWarpgroupRows * lane + diagonal_offset(problem.mask_rule(), len);
      warpgroup.linear_begin = (max(warpgroup.diagonal + 63, 0) + kTileKv - 1) / kTileKv;
      warpgroup.linear_end = max(warpgroup.diagonal + 1, 0) / kTileKv;
      // With a negative slope, or NaN, the maximum of the scores is not known from the first tiles.
      if (!(slope >= 0.0f)) warpgroup.fixed_base_end = 0;
    }
  }
  const bool sees_keys = warpgroup.kv_begin < warpgroup.kv_end;
  const int32_t begin = __reduce_min_sync(~0u, sees_keys ? warpgroup.kv_begin : INT32_MAX);
  const int32_t end = __reduce_max_sync(~0u, sees_keys ? warpgroup.kv_end : 0);
  if (lane < kConsumers) work_tile.warpgroups[lane] = warpgroup;
  if (lane == 0) {
    work_tile.kv_begin = begin;
    work_tile.kv_end = end;
    // Read back from shared memory, as registers are scarce.
    const volatile WorkTile<kConsumers>& at = work_tile;
    const RowLayout layout = row_layout(problem, params.args.shape);
    work_tile.lse_row =
        at.b * layout.batch_stride + at.h * layout.head_stride + at.offset_q + at.query;
  }
  return true;
}

}  // namespace flashattn::cuda::sm90
