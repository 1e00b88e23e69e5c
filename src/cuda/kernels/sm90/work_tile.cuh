// What the producer hands to the consumers of a block: one item per tile of queries.
#pragma once

#include "core/score_mod.h"
#include "cuda/host/schedule/warpgroup_rows.h"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

// The tiles of keys that one warpgroup's 64 rows need: [begin, end), from the last to the first. Of
// [full_begin, full_end) every row sees every key; below fast_end every row has seen one already.
struct Strip {
  int32_t begin, end;
  // Whether all that rows see of the first tile is in its upper half, of the last in its lower.
  bool upper_half, lower_half;
  int32_t full_begin, full_end, fast_end;
  // The key of the first query. All keys of tiles from line_begin on, and of those below line_end,
  // lie on one side of all queries.
  int32_t own, line_begin, line_end;
};

enum class ItemKind : int32_t {
  kTile,
  kDrain,  // say when everything before is done
  kEnd,
};

template <int kConsumers>
struct WorkItem {
  ItemKind kind;
  int32_t index;  // since the last drain
  int32_t tile;
  int32_t safe;  // done over: fast_end is 0
  int32_t b, h;
  int32_t query, query_end;  // of the tile
  Lengths len;
  int32_t begin, end;  // tiles of keys that any strip needs
  int64_t offset_q, offset_kv;
  float slope;  // of ALiBi or 0, in the units of the scores
  Strip strips[kConsumers];
};

// Plans a tile: one warp, lane n for warpgroup n. False: there is no row in it.
template <int kTileKv, ScoreModKind kScoreMod, int kConsumers>
__device__ __forceinline__ bool plan_item(const ForwardParams& params, int32_t tile, bool safe,
                                          WorkItem<kConsumers>& item) {
  constexpr bool kCanSlope =
      kScoreMod == ScoreModKind::kAlibi || kScoreMod == ScoreModKind::kRuntime;
  const Problem& problem = params.problem;
  const int32_t lane = threadIdx.x % 32;
  float slope = 0.0f;
  const L2Swizzle::Tile position = params.swizzle.tile(tile);
  int32_t query, query_end;
  Lengths len;
  {
    const int32_t b = position.head_idx / problem.heads_q;
    const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, params.args.inputs, b);
    len = sequence.len;
    const Interval strips =
        warpgroups_of_tile(static_cast<int32_t>(ceil_div(len.q, kWarpgroupRows)), kConsumers,
                           params.swizzle.tiles - 1 - position.tile_idx);
    query = strips.begin * kWarpgroupRows;
    query_end = min(strips.end * kWarpgroupRows, len.q);
    if (query >= query_end) return false;
    if (kCanSlope && problem.bias & FLASHATTN_BIAS_ALIBI) {
      const Inputs& in = params.args.inputs;
      const float unit = kScoreMod == ScoreModKind::kRuntime || safe ? kLog2E / kWideUnit : kLog2E;
      slope = in.alibi_slopes[b * in.alibi_stride_batch +
                              position.head_idx % problem.heads_q * in.alibi_stride_head] *
              unit;
    }
    if (lane == 0) {
      item.slope = slope;
      item.kind = ItemKind::kTile;
      item.tile = tile;
      item.safe = safe;
      item.b = b;
      item.h = position.head_idx % problem.heads_q;
      item.query = query;
      item.query_end = query_end;
      item.len = len;
      item.offset_q = sequence.offset_q;
      item.offset_kv = sequence.offset_kv;
    }
  }
  Strip strip{};
  const Interval rows = intersect(
      {query + kWarpgroupRows * lane, query + kWarpgroupRows * (lane + 1)}, {0, query_end});
  if (lane < kConsumers && rows.begin < rows.end) {
    const KeySpan span = key_span(problem.mask_rule(), rows, len);
    if (span.any.begin < span.any.end) {
      strip.begin = span.any.begin / kTileKv;
      strip.end = (span.any.end - 1) / kTileKv + 1;
      strip.upper_half = span.any.begin % kTileKv >= kTileKv / 2;
      strip.lower_half = (span.any.end - 1) % kTileKv < kTileKv / 2;
    }
    if (span.all.begin < span.all.end) {
      strip.full_begin = (span.all.begin + kTileKv - 1) / kTileKv;
      strip.full_end = span.all.end / kTileKv;
      // The tile of the first row's last key is the last of which some row may see its first.
      if (!safe) strip.fast_end = (span.all.end - 1) / kTileKv;
    }
    if constexpr (kCanSlope) {
      strip.own = query + kWarpgroupRows * lane + diagonal_offset(problem.mask_rule(), len);
      strip.line_begin = (max(strip.own + 63, 0) + kTileKv - 1) / kTileKv;
      strip.line_end = max(strip.own + 1, 0) / kTileKv;
      // Scores of a negative slope, or NaN, have no known maximum.
      if (!(slope >= 0.0f)) strip.fast_end = 0;
    }
  }
  const bool some = strip.begin < strip.end;
  const int32_t begin = __reduce_min_sync(~0u, some ? strip.begin : INT32_MAX);
  const int32_t end = __reduce_max_sync(~0u, some ? strip.end : 0);
  if (lane < kConsumers) item.strips[lane] = strip;
  if (lane == 0) {
    item.begin = begin;
    item.end = end;
  }
  return true;
}

}  // namespace flashattn::cuda::sm90
