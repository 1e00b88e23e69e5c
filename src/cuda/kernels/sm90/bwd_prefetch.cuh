// Inputs of score modifications that the consumers of the Hopper backward kernels prefetch before a
// tile's S is complete: dropout, block mask, dense bias.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"
#include "cuda/device/dropout.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdPrefetch : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using Base::params_;
  using Base::work_tile, Base::kTileQ, Base::lane, Base::row;

 public:
  // Columns whose bias is in flight while earlier ones are computed.
  static constexpr int kBiasColumnsAhead = Config::kSplitRoles || Config::kStagePInDs ? 2 : 4;

  // ScoreModKind::kDropout: signs of the pairs that dropout drops.
  using Signs = DropoutSigns<kTileQ / 4, Config::kStagePInDs>;
  // ScoreModKind::kRuntime.
  struct RuntimePrefetch {
    uint32_t keep_bits;            // bit i: dropout keeps element i
    uint32_t visible_bits;         // bit i: the block mask leaves element i
    const char* bias_address;      // of element 0
    int32_t queries, keys;         // left from there on
    uint32_t bias[kTileQ / 8][4];  // not converted; of the first columns
  };
  using TilePrefetch = std::conditional_t<Config::kIsRuntime, RuntimePrefetch, Signs>;

  __device__ __forceinline__ BwdPrefetch(const BackwardParams& params, uint32_t shared,
                                         BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  __device__ __forceinline__ void prefetch(TilePrefetch& prefetched, int32_t q_coord) const {
    if constexpr (Config::kIsDropout) {
      draw_signs<kTileQ / 8, true>(prefetched, stream_of(q_head_of(q_coord)),
                                   params_.common.dropout_threshold, first_key(),
                                   this->q_tile_of(q_coord) * kTileQ, lane());
    }
    if constexpr (Config::kIsRuntime) {
      static_assert(!Config::kIsRuntime || kTileQ == 64,
                    "kRuntime needs kTileQ == 64: keep_bits has one bit per element of a lane");
      const int32_t tile = this->q_tile_of(q_coord);
      const int32_t head = q_head_of(q_coord);
      prefetched.queries = prefetched.keys = 0;
      prefetched.bias_address = nullptr;
      if (params_.common.problem.bias & FLASHATTN_BIAS_DENSE) {
        const Inputs& in = params_.common.args.inputs;
        const int32_t query = tile * kTileQ + lane() % 4 * 2;
        prefetched.queries = work_tile().len.q - query;
        prefetched.keys = work_tile().keys - row();
        prefetched.bias_address =
            static_cast<const char*>(in.bias) +
            (work_tile().b * in.bias_stride_batch + head * in.bias_stride_head +
             query * in.bias_stride_row + work_tile().key + row()) *
                dtype_size(params_.common.problem.dtype_bias);
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
    // Otherwise registers would hold them from tile to tile.
#pragma unroll
    for (int i = 0; i < 4; ++i) prefetched.bias[n][i] = 0;
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) return;
    switch (problem.dtype_bias) {
      case FLASHATTN_DTYPE_F32: return fetch_bias_of<4>(prefetched, n);
      case FLASHATTN_DTYPE_F16:
      case FLASHATTN_DTYPE_BF16: return fetch_bias_of<2>(prefetched, n);
      default: fetch_bias_of<1>(prefetched, n);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void fetch_bias_of(TilePrefetch& prefetched, int n) const {
    const int64_t stride = params_.common.args.inputs.bias_stride_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t query = 8 * n + i % 2, key = i / 2 * 8;
      // no_hoist: otherwise addresses are computed before the mainloop and held in registers.
      prefetched.bias[n][i] =
          ptx::load_if<kBytes>(prefetched.bias_address + (no_hoist(query) * stride + key) * kBytes,
                               query < prefetched.queries && key < prefetched.keys);
    }
  }

 private:
  __device__ __forceinline__ int32_t q_head_of(int32_t q_coord) const {
    return work_tile().kv_head * params_.common.q_heads_per_kv_head + q_coord / kCoordHead;
  }

  // Reads the mask one row of blocks at a time. Each of this lane's two keys lies in one block,
  // whose width is a multiple of 8.
  __device__ __forceinline__ uint32_t block_mask_bits(int32_t tile, int32_t head) const {
    const Problem& problem = params_.common.problem;
    if (!(problem.mask & FLASHATTN_MASK_BLOCKS)) return ~0u;
    const Inputs& in = params_.common.args.inputs;
    const int32_t first = tile * kTileQ, end = min(first + kTileQ, work_tile().len.q);
    const int32_t keys = work_tile().keys - row();
    int32_t y = first / problem.block_q;
    const uint8_t* on = in.block_mask + work_tile().b * in.block_mask_stride_batch +
                        head * in.block_mask_stride_head + y * in.block_mask_stride_row;
    const int32_t upper = (work_tile().key + row()) / problem.block_kv;
    const int32_t lower = (work_tile().key + row() + 8) / problem.block_kv;
    uint32_t visible_bits = 0;
#pragma unroll 1
    for (; y * problem.block_q < end; ++y, on += in.block_mask_stride_row) {
      const uint32_t halves = (0 < keys && on[upper] ? 1u : 0u) | (8 < keys && on[lower] ? 4u : 0u);
      // Relative to this lane's first query.
      const int32_t begin = y * problem.block_q - first - lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kTileQ / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool inside =
              static_cast<uint32_t>(8 * n + e - begin) < static_cast<uint32_t>(problem.block_q);
          if (inside) visible_bits |= halves << (4 * n + e);
        }
      }
    }
    return visible_bits;
  }

  __device__ __forceinline__ uint32_t draw_keep_bits(int32_t tile, int32_t head) const {
    const uint32_t threshold = params_.common.dropout_threshold;
    if (threshold == 0) return ~0u;
    uint32_t keep_bits = ~0u;
    visit_dropped<1, kTileQ / 8, true>(
        stream_of(head), threshold, first_key(), tile * kTileQ, lane(),
        [&](int, int n, int x) { keep_bits &= ~(1u << (4 * n + x)); });
    return keep_bits;
  }

  __device__ __forceinline__ DropoutStream stream_of(int32_t head) const {
    return dropout_stream(params_.common.problem, params_.common.args.inputs, work_tile().b, head);
  }

  // The first key of this warp.
  __device__ __forceinline__ int32_t first_key() const {
    return work_tile().key + row() - lane() / 4;
  }
};

}  // namespace flashattn::cuda::sm90
