// Block masks in the Hopper backward pass: choice of kernels, workspace, launch.
#include "cuda/host/sm90_block_mask.h"

#include <algorithm>

#include "cuda/host/preload.h"
#include "cuda/kernels/sm90/bwd_block_mask.h"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int64_t kListAlignment = 32;  // entries: lists of two CTAs share no line of a cache

bool lists_q_tiles(const BackwardEntry& entry) {
  return entry.score_mod == ScoreModKind::kBlockMask || entry.score_mod == ScoreModKind::kRuntime;
}

}  // namespace

bool takes_blocks(const BackwardEntry& entry, const Problem& problem) {
  return !entry.whole_blocks ||
         (problem.block_q % entry.tile_q == 0 && problem.block_kv % entry.tile_kv == 0 &&
          !problem.has_mask(FLASHATTN_MASK_BLOCK_LENS));
}

bool fits_q_coord(const BackwardEntry& entry, const Problem& problem, const Shape& shape) {
  const int64_t tiles = ceil_div(shape.seqlen_q, entry.tile_q);
  const int32_t heads = problem.q_heads_per_kv_head();
  if (lists_q_tiles(entry)) return tiles <= kMaxListedTiles && heads <= kMaxListedHeads;
  return entry.score_mod != ScoreModKind::kDropout ||
         (tiles < kMaxDropoutTiles && heads < INT32_MAX / kMaxDropoutTiles);
}

cudaError_t preload_block_mask() { return preload(bwd_block_mask_kernel().kernel); }

void take_q_tile_lists(const BackwardEntry& entry, int32_t multiprocessors, BackwardParams* params,
                       WorkspaceAllocator* workspace) {
  if (!lists_q_tiles(entry)) return;
  BackwardParams& p = *params;
  const cuda::BackwardParams& common = p.common;
  const Problem& problem = common.problem;
  const Inputs& in = common.args.inputs;
  const Shape& shape = common.args.shape;
  // At most what fits_q_coord() takes.
  p.q_tile_list_size = ceil_div(static_cast<int64_t>(std::min(p.max_q_tiles, kMaxListedTiles)) *
                                    std::min(common.q_heads_per_kv_head, kMaxListedHeads),
                                kListAlignment) *
                       kListAlignment;
  p.q_tile_lists = workspace->take<uint32_t>(p.q_tile_list_size * (common.ordered ? 2 : 1) *
                                             kWorkTileStages * multiprocessors);
  if (!problem.has_mask(FLASHATTN_MASK_BLOCKS)) return;
  BlockMaskBits& mask = p.block_mask;
  const HeadTiles words = HeadTiles::of_queries(problem, shape, 32 * entry.tile_q);
  mask.max_q_words = static_cast<int32_t>(ceil_div(p.max_q_tiles, 32));
  mask.head_q_words = static_cast<int32_t>(words.count());
  mask.max_kv_tiles = static_cast<int32_t>(ceil_div(shape.seqlen_kv, entry.tile_kv));
  mask.shares_heads = in.block_mask_stride_head == 0;
  mask.shares_batch = in.block_mask_stride_batch == 0 && !reads_lengths(problem, in);
  // Strides are known only when a call's arrays are: there is memory for the bits of every head. No
  // launch has more tiles than fit 32 bits.
  const auto of_heads = [&](int64_t count) {
    return std::min<int64_t>(count * problem.heads_q, INT32_MAX);
  };
  mask.q_tiles = workspace->take<QTileBits>(of_heads(words.count()) * mask.max_kv_tiles);
  if (common.ordered) {
    mask.kv_tiles =
        workspace->take<KvTileBits>(of_heads(common.head_tiles(entry.tile_q)) * mask.kv_words());
  }
}

cudaError_t launch_block_mask(const BackwardParams& p, cudaStream_t stream) {
  const BlockMaskBits& mask = p.block_mask;
  if (!mask.q_tiles) return cudaSuccess;
  const int64_t heads = mask.shares_heads ? 1 : p.common.problem.heads_q;
  const int64_t sequences = mask.shares_batch ? 1 : p.common.args.shape.batch;
  const BwdBlockMaskKernel k = bwd_block_mask_kernel();
  return launch_pdl(k.kernel, dim3(static_cast<unsigned>(mask.max_q_words * heads * sequences)),
                    k.threads, 0, p, stream);
}

}  // namespace flashattn::cuda::sm90
