// Inputs of score modifications that the consumers of the Hopper backward kernels prefetch before a
// tile's S is complete: dropout, block mask, dense bias.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdPrefetch : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using Base::params_;
  using Base::work_tile, Base::kTileQ, Base::lane, Base::row;

 public:
  // Columns whose bias is in flight while earlier ones are computed.
  static constexpr int kBiasColumnsAhead = Config::kSplitRoles || Config::kStagePInDs ? 2 : 4;

  // Kernels compiled for dropout: sign bits that mark the dropped elements of each pair.
  using Signs = DropoutSigns<kTileQ / 4, Base::kLacksRegisters>;
  // Runtime kernels.
  struct RuntimePrefetch {
    uint32_t keep_bits;     // bit i: dropout keeps element i
    uint32_t visible_bits;  // bit 16 h + 2 n + e: the block mask leaves element 4 n + 2 h + e
    DenseBiasColumns bias_columns;
    uint32_t bias[kTileQ / 8][4];  // the columns that have been loaded
  };
  // Kernels with a block mask alone, whose blocks may cut tiles.
  struct BlockMaskPrefetch {
    uint32_t visible_bits;  // as above
  };
  using TilePrefetch =
      std::conditional_t<Config::kIsRuntime, RuntimePrefetch,
                         std::conditional_t<Config::kSplitsBlockMask, BlockMaskPrefetch, Signs>>;

  __device__ __forceinline__ BwdPrefetch(const BackwardParams& params, uint32_t shared,
                                         BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  __device__ __forceinline__ void prefetch(TilePrefetch& prefetched, int32_t q_coord) const {
    if constexpr (Config::kIsDropout) {
      const Dropout dropout = dropout_of(q_head_of(q_coord));
      dropout.template draw_signs<kTileQ / 8, true>(prefetched, params_.common.dropout_threshold,
                                                    first_key(), this->q_tile_of(q_coord) * kTileQ,
                                                    lane());
    }
    static_assert(!Config::kHasBlockMask || Config::kWholeBlocks || kTileQ == 64,
                  "kTileQ must be 64: visible_bits has one bit per element of a lane");
    if constexpr (Config::kSplitsBlockMask) {
      prefetched.visible_bits = block_mask_bits(this->q_tile_of(q_coord), q_head_of(q_coord));
    }
    if constexpr (Config::kIsRuntime) {
      const int32_t tile = this->q_tile_of(q_coord);
      const int32_t head = q_head_of(q_coord);
      prefetched.bias_columns = {nullptr, 0, 0};
      if (DenseBias::is_on(params_.common.problem)) {
        const DenseBias bias =
            DenseBias::of(params_.common.problem, params_.common.args.inputs, work_tile().b, head);
        const int32_t query = tile * kTileQ + lane() % 4 * 2;
        prefetched.bias_columns =
            DenseBiasColumns::of(bias, query, work_tile().key + row(), work_tile().len.q - query,
                                 work_tile().keys - row());
      }
#pragma unroll
      for (int n = 0; n < kBiasColumnsAhead; ++n) fetch_bias(prefetched, n);
      prefetched.keep_bits = draw_keep_bits(tile, head);
      prefetched.visible_bits = block_mask_bits(tile, head);
    }
  }

  // Loads the bias of a column, if there is a bias.
  __device__ __forceinline__ void fetch_bias(TilePrefetch& prefetched, int n) const {
    const Problem& problem = params_.common.problem;
    // Cleared: otherwise registers would hold these words from tile to tile.
#pragma unroll
    for (int i = 0; i < 4; ++i) prefetched.bias[n][i] = 0;
    if (!DenseBias::is_on(problem)) return;
    // no_hoist: otherwise addresses are computed before the mainloop and held in registers.
    prefetched.bias_columns.load(StLayout<>{no_hoist(8 * n)}, prefetched.bias[n],
                                 params_.common.args.inputs.bias_stride_row, problem.dtype_bias);
  }

 private:
  __device__ __forceinline__ int32_t q_head_of(int32_t q_coord) const {
    return work_tile().kv_head * params_.common.q_heads_per_kv_head + q_coord / kCoordHead<Config>;
  }

  __device__ __forceinline__ uint32_t block_mask_bits(int32_t tile, int32_t head) const {
    const Problem& problem = params_.common.problem;
    if (!(problem.mask & FLASHATTN_MASK_BLOCKS)) return ~0u;
    const BlockMask blocks =
        BlockMask::of(problem, params_.common.args.inputs, work_tile().b, head);
    if (blocks.pairs_keys<kTileQ>()) {
      return blocks.shown_to_pair<kTileQ / 8>(work_tile().key + row(), work_tile().len.kv,
                                              tile * kTileQ, work_tile().len.q);
    }
    uint32_t visible_bits = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int32_t key = row() + half * 8;
      const uint32_t shown =
          blocks
              .shown_queries<kTileQ / 8>(min(work_tile().key + key, work_tile().len.kv - 1),
                                         tile * kTileQ, work_tile().len.q, lane())
              .shown;
      if (key < work_tile().keys) visible_bits |= shown << half * 16;
    }
    return visible_bits;
  }

  __device__ __forceinline__ uint32_t draw_keep_bits(int32_t tile, int32_t head) const {
    const uint32_t threshold = params_.common.dropout_threshold;
    if (threshold == 0) return ~0u;
    uint32_t keep_bits = ~0u;
    const Dropout dropout = dropout_of(head);
    dropout.template visit_dropped<1, kTileQ / 8, true>(
        threshold, first_key(), tile * kTileQ, lane(),
        [&](int, int n, int x) { keep_bits &= ~(1u << (4 * n + x)); });
    return keep_bits;
  }

  __device__ __forceinline__ Dropout dropout_of(int32_t head) const {
    return Dropout::of(params_.common.problem, params_.common.args.inputs, work_tile().b, head);
  }

  // The first key of this warp.
  __device__ __forceinline__ int32_t first_key() const {
    return work_tile().key + row() - lane() / 4;
  }
};

}  // namespace flashattn::cuda::sm90
