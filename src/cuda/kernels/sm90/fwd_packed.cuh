// Hopper forward with packed heads: short sequences of queries beside many keys. The query heads of
// a KV head share a Q tile, so that K and V are loaded once for all of them, and the keys of a
// sequence may be split over CTAs, whose partial results the combine kernel merges. Masks by
// position, and trees of drafted tokens; no score modification.
#pragma once

#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDim, int kConsumers, int kTileKv>
struct PackedForwardConfig : ForwardConfig<T, kDim, kDim, kConsumers, kTileKv, ScoreModChain<>, 1> {
  static constexpr bool kPacksHeads = true, kUseStreamK = false;
};

// Plans a work tile as plan_work_tile() does: rows of a KV head, and a split. Splits begin at
// multiples of the KV tile.
template <class Config>
__device__ __forceinline__ bool plan_packed_tile(const ForwardParams& params, int32_t work_idx,
                                                 bool redo, WorkTile<Config::kConsumers>& work_tile,
                                                 PackedTile& packed_tile) {
  constexpr int kTileKv = Config::kTileKv, kConsumers = Config::kConsumers;
  const Problem& problem = params.problem;
  const PackedHeads& packed = params.packed;
  const int32_t lane = threadIdx.x % 32, log2_group = packed.log2_group;
  const L2Swizzle::Tile position = params.swizzle.tile(work_idx);
  // The last Q tiles come first: with a causal mask they take longest.
  const int32_t from_end = packed.by_splits.quotient(position.tile_idx);
  const int32_t split_idx = position.tile_idx - from_end * packed.max_splits;
  const int32_t q_tile = params.swizzle.tiles / packed.max_splits - 1 - from_end;
  const int32_t b = position.head_idx / problem.heads_kv;
  const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, params.args.inputs, b);
  const Lengths len = sequence.len;
  const int32_t rows = len.q << log2_group;
  const Interval warpgroups =
      warpgroups_of_tile(static_cast<int32_t>(ceil_div(rows, kWarpgroupRows)), kConsumers, q_tile);
  const int32_t first = warpgroups.begin * kWarpgroupRows;
  const int32_t end = min(warpgroups.end * kWarpgroupRows, rows);
  Interval keys{0, len.kv};
  if (packed.max_splits > 1) keys = split_range(packed.split, len, split_idx);
  if (first >= end || (split_idx > 0 && keys.begin >= keys.end)) return false;
  if (lane == 0) {
    work_tile.kind = WorkKind::kTile;
    work_tile.work_idx = work_idx;
    work_tile.redo_online = redo;
    work_tile.b = b;
    work_tile.h = (position.head_idx - b * problem.heads_kv) * problem.q_heads_per_kv_head();
    work_tile.query = first;
    work_tile.query_end = end;
    work_tile.len = len;
    work_tile.offset_q = sequence.offset_q;
    work_tile.offset_kv = sequence.offset_kv;
    packed_tile.split_idx = split_idx;
    work_tile.is_partial = keys.end - keys.begin < len.kv;
    packed_tile.keys = keys;
  }
  WarpgroupTile warpgroup{};
  const Interval own =
      intersect({first + kWarpgroupRows * lane, first + kWarpgroupRows * (lane + 1)}, {0, end});
  if (lane < kConsumers && own.begin < own.end) {
    const Interval queries{own.begin >> log2_group, ((own.end - 1) >> log2_group) + 1};
    const bool is_tree = problem.mask & FLASHATTN_MASK_TREE;
    const KeySpan span = is_tree ? tree_span(packed.tree.rule, queries, len)
                                 : key_span(problem.mask_rule(), queries, len);
    set_kv_tiles<kTileKv>(warpgroup, {intersect(span.any, keys), intersect(span.all, keys)}, redo);
    // Bits of a tree are applied to whole tiles.
    if (is_tree) warpgroup.first_upper_only = warpgroup.last_lower_only = false;
  }
  const bool sees_keys = warpgroup.kv_begin < warpgroup.kv_end;
  const int32_t kv_begin = __reduce_min_sync(~0u, sees_keys ? warpgroup.kv_begin : INT32_MAX);
  const int32_t kv_end = __reduce_max_sync(~0u, sees_keys ? warpgroup.kv_end : 0);
  if (lane < kConsumers) work_tile.warpgroups[lane] = warpgroup;
  if (lane == 0) {
    work_tile.kv_begin = kv_begin;
    work_tile.kv_end = kv_end;
  }
  return true;
}

}  // namespace flashattn::cuda::sm90
