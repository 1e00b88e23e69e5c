// What the consumer warpgroups of the Hopper backward kernels know of a tile before its products:
// which weights the dropout drops, what the block mask leaves, biases.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"
#include "cuda/device/dropout.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardAhead : protected BackwardGroup<Config> {
  using Base = BackwardGroup<Config>;

 protected:
  using Base::item, Base::kTileQ, Base::lane, Base::row;
  using Base::params_;
  // Columns whose bias is on its way while those before are worked on.
  static constexpr int kFetched = Config::kWide || Config::kParked ? 2 : 4;

  // What is known of a tile before its products: which pairs the dropout drops,
  using Drops = DropoutSigns<kTileQ / 4, Config::kParked>;
  // and where scores may be any.
  struct All {
    uint32_t keep;                 // bit i: number i is kept
    uint32_t seen;                 // bit i: the block mask leaves number i
    const char* bias_at;           // of number 0
    int32_t queries, keys;         // left from there on
    uint32_t bias[kTileQ / 8][4];  // as it lies in memory; of the first columns
  };
  using Ahead = std::conditional_t<Config::kAny, All, Drops>;

  __device__ __forceinline__ BackwardAhead(const BackwardParams& params, uint32_t shared,
                                           BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  __device__ __forceinline__ void look_ahead(Ahead& ahead, int32_t place) const {
    if constexpr (Config::kDropped) {
      draw_signs<kTileQ / 8, true>(ahead, stream_of(head_at(place)),
                                   params_.common.dropout_threshold, first_key(),
                                   this->tile_of(place) * kTileQ, lane());
    }
    if constexpr (Config::kAny) {
      static_assert(!Config::kAny || kTileQ == 64, "a bit of a word for each number");
      const int32_t tile = this->tile_of(place);
      const int32_t head = head_at(place);
      ahead.queries = ahead.keys = 0;
      ahead.bias_at = nullptr;
      if (params_.common.problem.bias & FLASHATTN_BIAS_DENSE) {
        const Inputs& in = params_.common.args.inputs;
        const int32_t query = tile * kTileQ + lane() % 4 * 2;
        ahead.queries = item().len.q - query;
        ahead.keys = item().keys - row();
        ahead.bias_at = static_cast<const char*>(in.bias) +
                        (item().b * in.bias_stride_batch + head * in.bias_stride_head +
                         query * in.bias_stride_row + item().key + row()) *
                            dtype_size(params_.common.problem.dtype_bias);
      }
#pragma unroll
      for (int n = 0; n < kFetched; ++n) fetch_bias(ahead, n);
      ahead.keep = kept_numbers(tile, head);
      ahead.seen = seen_numbers(tile, head);
    }
  }

  // The bias of a column, where there is one.
  __device__ __forceinline__ void fetch_bias(Ahead& ahead, int n) const {
    const Problem& problem = params_.common.problem;
    // Or else they would be kept from tile to tile.
#pragma unroll
    for (int i = 0; i < 4; ++i) ahead.bias[n][i] = 0;
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) return;
    switch (problem.dtype_bias) {
      case FLASHATTN_DTYPE_F32: return fetch_bias_of<4>(ahead, n);
      case FLASHATTN_DTYPE_F16:
      case FLASHATTN_DTYPE_BF16: return fetch_bias_of<2>(ahead, n);
      default: fetch_bias_of<1>(ahead, n);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void fetch_bias_of(Ahead& ahead, int n) const {
    const int64_t stride = params_.common.args.inputs.bias_stride_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t query = 8 * n + i % 2, key = i / 2 * 8;
      // Opaque: not to be worked out before the main loop, and to lie in registers.
      ahead.bias[n][i] =
          ptx::load_if<kBytes>(ahead.bias_at + (no_hoist(query) * stride + key) * kBytes,
                               query < ahead.queries && key < ahead.keys);
    }
  }

 protected:
  // The bases of this lane's queries of a part, see BackwardParams::base; `count` tiles are done.
  __device__ __forceinline__ const volatile float* bases_at(int32_t place, uint32_t count,
                                                            int part) const {
    const int32_t tiles = item().tiles.end - item().tiles.begin;
    const int32_t head =
        Config::kHeads ? place / kPlaceHead : static_cast<int32_t>(count - item().before) / tiles;
    const int64_t tile = item().first_tile + head * params_.head_tiles + this->tile_of(place);
    return params_.common.base + (tile * kTileQ + part * Config::kPartQ + lane() % 4 * 2);
  }

 private:
  __device__ __forceinline__ int32_t head_at(int32_t place) const {
    return item().kv_head * params_.common.q_heads_per_kv_head + place / kPlaceHead;
  }

  // A row of blocks at a time. Of keys, this lane's two are each in one block, whose width is a
  // multiple of 8.
  __device__ __forceinline__ uint32_t seen_numbers(int32_t tile, int32_t head) const {
    const Problem& problem = params_.common.problem;
    if (!(problem.mask & FLASHATTN_MASK_BLOCKS)) return ~0u;
    const Inputs& in = params_.common.args.inputs;
    const int32_t first = tile * kTileQ, end = min(first + kTileQ, item().len.q);
    const int32_t keys = item().keys - row();
    int32_t y = first / problem.block_q;
    const uint8_t* on = in.block_mask + item().b * in.block_mask_stride_batch +
                        head * in.block_mask_stride_head + y * in.block_mask_stride_row;
    const int32_t upper = (item().key + row()) / problem.block_kv;
    const int32_t lower = (item().key + row() + 8) / problem.block_kv;
    uint32_t seen = 0;
#pragma unroll 1
    for (; y * problem.block_q < end; ++y, on += in.block_mask_stride_row) {
      const uint32_t halves = (0 < keys && on[upper] ? 1u : 0u) | (8 < keys && on[lower] ? 4u : 0u);
      // As seen from this lane's first query.
      const int32_t begin = y * problem.block_q - first - lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kTileQ / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool inside =
              static_cast<uint32_t>(8 * n + e - begin) < static_cast<uint32_t>(problem.block_q);
          if (inside) seen |= halves << (4 * n + e);
        }
      }
    }
    return seen;
  }

  __device__ __forceinline__ uint32_t kept_numbers(int32_t tile, int32_t head) const {
    const uint32_t threshold = params_.common.dropout_threshold;
    if (threshold == 0) return ~0u;
    uint32_t keep = ~0u;
    visit_dropped<1, kTileQ / 8, true>(stream_of(head), threshold, first_key(), tile * kTileQ,
                                       lane(),
                                       [&](int, int n, int x) { keep &= ~(1u << (4 * n + x)); });
    return keep;
  }

  __device__ __forceinline__ DropoutStream stream_of(int32_t head) const {
    return dropout_stream(params_.common.problem, params_.common.args.inputs, item().b, head);
  }

  // Of the warp.
  __device__ __forceinline__ int32_t first_key() const { return item().key + row() - lane() / 4; }
};

}  // namespace flashattn::cuda::sm90
