// Configuration of the Hopper kernel for latent attention, its shared memory, barriers, work tile.
#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

constexpr int kMlaTileKv = 64;

// The work tile of a CTA: rows and keys. KV tiles are visited in ascending order.
struct MlaWorkTile {
  int32_t b, kv_head, split_idx;
  int32_t first_row, rows;
  int32_t is_split;  // the sequence has several KV splits
  Lengths len;
  int64_t offset_q, offset_kv;
  Interval tiles;       // some row sees a key
  Interval full_tiles;  // every row sees every key, hidden pages aside
  int32_t fixed_begin;  // from this tile on every row has seen a key before
};

// T: type of Q and, in shared memory, of K. Heads are at most kDimQk and kDimV large; TMA pads
// smaller ones with 0. Cache: T, or ptx::E4m3 for LATENT_KV, whose heads have these very sizes.
template <class T_, int kDimQk_, int kDimV_, class Cache_>
struct MlaConfig {
  using T = T_;
  using Cache = Cache_;
  static constexpr bool kIsLatent = !std::is_same<T, Cache>::value;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;
  static constexpr int kConsumers =
      2;  // warpgroups; each has all rows and half of the columns of O
  static constexpr int kTileQ = 64, kTileKv = kMlaTileKv;
  static constexpr int kStages = 2;  // warpgroup w computes the scores of the tiles in stage w
  static constexpr int kProducers = kIsLatent ? 2 : 1;  // warpgroups
  static constexpr int kThreads = 128 * (kProducers + kConsumers);
  static constexpr int kProducerRegisters = kIsLatent ? 64 : 72;
  static constexpr int kConsumerRegisters = kIsLatent ? 192 : 216;

  // Panels have 64 columns, 128 bytes per row. The substages of a stage are the halves of V;
  // the panels behind V belong to the substage that the warpgroup of the other stage releases.
  static constexpr int kPanelBytes = kTileKv * 128;
  static constexpr int kPanels = kDimQk / 64, kPanelsV = kDimV / 64, kHalfPanels = kPanelsV / 2;
  static constexpr int kQBytes = kPanels * kTileQ * 128, kStageBytes = kPanels * kPanelBytes;
  static_assert(kPanels > kPanelsV, "P takes the place of the first panel behind V");
  static_assert(kTileQ == kTileKv, "P has the size of a panel");
  static constexpr int kKOffset = kQBytes, kPOffset = kPanelsV * kPanelBytes;
  static constexpr int kTensorBytes = kQBytes + kStages * kStageBytes;

  struct SharedStorage {
    Pipeline<kStages, 2, false, StageState> k;
    MlaWorkTile work_tile;
    const char* records;  // LATENT_KV: V of the sequence's first key, or of the pool's first page
    int32_t has_work;
    // PAGES: a bit for each key whose page is not hidden. Each word holds the bits of one producer
    // warp.
    uint64_t shown_kv[kStages][2];
    int32_t redo;  // the base overflowed: the tile is computed again, with online softmax
    Interval visible_kv[kTileQ];        // keys of the split that each row sees
    float row_max[kConsumers][kTileQ];  // per step, exchanged by the warpgroups
    float row_sum[kConsumers][kTileQ];  // over the tiles of a warpgroup

    __device__ __forceinline__ bool is_redo() const {
      return *static_cast<const volatile int32_t*>(&redo) != 0;
    }
  };
  static constexpr int kSharedBytes = kTensorBytes + static_cast<int>(sizeof(SharedStorage));
  static_assert(kSharedBytes <= 227 * 1024, "a CTA's shared memory");
};

// Plans the work tile of the CTA, of up to kTileQ rows. Returns false if it has none.
template <int kTileQ>
__device__ __forceinline__ bool plan_mla_work_tile(const MlaParams& params, MlaWorkTile& tile) {
  const cuda::ForwardParams& common = params.common;
  const Problem& problem = common.problem;
  // The CTAs of all rows of a sequence follow each other: they read the same K, from L2.
  const int32_t sequence_split = params.by_row_tiles.quotient(blockIdx.x);
  // The last rows run first: with a causal mask they take longest.
  const int32_t row_tile =
      params.row_tiles - 1 - static_cast<int32_t>(blockIdx.x) + sequence_split * params.row_tiles;
  const int32_t batch_kv_head = common.by_splits.quotient(sequence_split);
  tile.split_idx = sequence_split - batch_kv_head * common.max_splits;
  tile.b = common.by_heads_kv.quotient(batch_kv_head);
  tile.kv_head = batch_kv_head - tile.b * problem.heads_kv;
  const SeqlenInfo sequence = seqlen_info(problem, common.args.shape, common.args.inputs, tile.b);
  tile.len = sequence.len;
  tile.offset_q = sequence.offset_q;
  tile.offset_kv = sequence.offset_kv;
  tile.first_row = row_tile * kTileQ;
  const int32_t all_rows = tile.len.q * common.q_heads_per_kv_head;
  tile.rows = min(all_rows - tile.first_row, kTileQ);
  Interval keys{0, tile.len.kv};
  if (common.max_splits > 1) keys = split_range(common.split, tile.len, tile.split_idx);
  tile.is_split = keys.end - keys.begin < tile.len.kv;
  if (tile.rows <= 0 || (tile.split_idx > 0 && keys.begin == keys.end)) return false;
  // The CTAs of a cluster visit the same KV tiles. All CTAs take those of two row tiles, so that
  // the bits of a row do not depend on whether there are clusters.
  const int32_t first = tile.first_row & -128;
  const Interval queries{params.by_group.quotient(first),
                         params.by_group.quotient(min(first + 128, all_rows) - 1) + 1};
  const bool tree = problem.mask & FLASHATTN_MASK_TREE;
  const KeySpan span = tree ? tree_span(common.tree.rule, queries, tile.len)
                            : key_span(problem.mask_rule(), queries, tile.len);
  const Interval any = intersect(span.any, keys), all = intersect(span.all, keys);
  tile.tiles = tile.full_tiles = {0, 0};
  tile.fixed_begin = INT32_MAX;
  if (any.begin < any.end) {
    tile.tiles = {any.begin / kMlaTileKv, (any.end - 1) / kMlaTileKv + 1};
  }
  if (all.begin < all.end) {
    tile.full_tiles = {(all.begin + kMlaTileKv - 1) / kMlaTileKv, all.end / kMlaTileKv};
    tile.fixed_begin = all.begin / kMlaTileKv + 1;
  }
  return true;
}

// LATENT_KV: the address of V of the first key of a tile's sequence, or of the first page of all.
__device__ __forceinline__ const char* first_record(const MlaParams& params,
                                                    const MlaWorkTile& tile) {
  const bool paged = params.common.problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  return tensor_row(params.common.args.inputs.v, 1, paged ? 0 : tile.b, tile.kv_head,
                    paged ? 0 : tile.offset_kv);
}

// PAGED_KV: the page of a key of a tile's sequence, as the table has it.
__device__ __forceinline__ int32_t page_of_key(const MlaParams& params,
                                               const volatile MlaWorkTile& tile, int32_t key) {
  const Inputs& in = params.common.args.inputs;
  return in.page_table[tile.b * in.page_table_stride + params.by_page_size.quotient(key)];
}

// Synchronises the CTA after the first pass over the keys. In a cluster it also arrives at the
// cluster barrier, which ends shared work: neither CTA exits before both have come here.
__device__ __forceinline__ void end_first_pass(const MlaParams& params) {
  __syncthreads();
  if (params.cluster_size > 1) ptx::cluster_arrive();
}

// The query and the query head of a row of a work tile.
struct MlaRow {
  int32_t query, head;
};
__device__ __forceinline__ MlaRow mla_row(const MlaParams& params, int32_t first_row,
                                          int32_t kv_head, int32_t r) {
  const int32_t group = params.common.q_heads_per_kv_head, row = first_row + r;
  const int32_t query = params.by_group.quotient(row);
  return {query, kv_head * group + row - query * group};
}

}  // namespace flashattn::cuda::sm90
