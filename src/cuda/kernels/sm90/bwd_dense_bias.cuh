// Dense bias of a consumer warpgroup of the Hopper backward kernels, and its gradient.
#pragma once

#include "cuda/device/dense_bias_panel.cuh"
#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdDenseBias : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using T = typename Config::T;
  using Base::params_, Base::work_tile, Base::kTileQ, Base::lane, Base::row;

 public:
  __device__ __forceinline__ BwdDenseBias(const BackwardParams& params, uint32_t shared,
                                          BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  // The bias panels of a Q tile: a warp waits for each, and releases it once it has read it.
  struct TilePanels {
    const BwdDenseBias& consumer;
    uint32_t first;

    __device__ __forceinline__ PipelineState<Config::kBiasStages> state(int p) const {
      return {first + p};
    }
    __device__ __forceinline__ uint32_t wait(int p) const {
      consumer.storage_.bias.consumer_wait(state(p), consumer.consumer_);
      return Base::bias_panel(consumer.shared_, state(p), consumer.consumer_);
    }
    __device__ __forceinline__ void release(int p) const {
      __syncwarp();
      if (consumer.lane() == 0)
        consumer.storage_.bias.consumer_release(state(p), consumer.consumer_);
    }
  };
  // As above, for a bias in a stage of dS: one barrier covers all panels of a stage.
  struct DsPanels {
    const BwdDenseBias& consumer;
    PipelineState<Config::kDsStages> state;

    __device__ __forceinline__ uint32_t wait(int p) const {
      if (p == 0) consumer.storage_.bias_full.wait(state);
      return Base::ds_bias_panel(consumer.shared_, state, p);
    }
    __device__ __forceinline__ void release(int) const {}
  };
  // Adds the bias of the CTA's Q tile `count`. kBiasInDs: P may then be stored in its place.
  __device__ __forceinline__ void add(typename Base::SAccum& s, float log2e, uint32_t count) const {
    if constexpr (!Config::kBiasInDs) {
      of_tile(count).add(StLayout<>(), s, log2e);
    } else {
      const PipelineState<Config::kDsStages> at{count};
      const int32_t dtype = params_.common.problem.dtype_bias;
      TransposedBiasPanels<T, DsPanels>{{*this, at}, dtype, this->warp(), lane()}.add(StLayout<>(),
                                                                                      s, log2e);
      if (dtype_size(dtype) == 2) {
        __syncwarp();  // a 16-bit bias lies where the same warp stores P
      } else {
        this->warpgroup_sync();
      }
      if (shares_peer_ds() && lane() == 0) this->storage_.peer_ds_free.at(at).arrive_peer();
    }
  }
  // kBiasInDs: whether the bias also fills the peer's half of a stage of dS.
  __device__ __forceinline__ bool shares_peer_ds() const {
    return dtype_size(params_.common.problem.dtype_bias) == 4;
  }

  // The bias of the CTA's Q tile `count`.
  __device__ __forceinline__ auto of_tile(uint32_t count) const {
    const int32_t dtype = params_.common.problem.dtype_bias;
    return TransposedBiasPanels<T, TilePanels>{
        {*this, count * Base::BiasTile::count(dtype_size(dtype))}, dtype, this->warp(), lane()};
  }

  // Addresses of dbias for this lane's elements.
  struct DbiasColumns {
    float* first;        // element of the lane's first query and key
    uint32_t row;        // elements from a query to the next
    int32_t queries[2];  // queries left, for the first key and for key 8; 0: add nothing

    // Adds dS of queries 8 n and 8 n + 1, and of key 8 * half. The 8 lanes of a query fill a
    // sector.
    __device__ __forceinline__ void add(int n, int half, float x, float y) const {
      float* const to = first + (8 * n * row + 8 * half);
      ptx::red_add_if(8 * n < queries[half], to, x);
      ptx::red_add_if(8 * n + 1 < queries[half], to + row, y);
    }
  };
  __device__ __forceinline__ DbiasColumns dbias_columns(int32_t q_coord, uint32_t count) const {
    if (!params_.adds_dbias) return {};
    const BackwardArgs& args = params_.common.args;
    const int32_t tiles = work_tile().q_tiles.end - work_tile().q_tiles.begin;
    const int32_t head = work_tile().kv_head * params_.common.q_heads_per_kv_head +
                         static_cast<int32_t>(count - work_tile().iter_begin) / tiles;
    const int32_t query = this->q_tile_of(q_coord) * kTileQ + lane() % 4 * 2;
    const int32_t queries = work_tile().len.q - query, keys = work_tile().keys - row();
    return {args.dbias + work_tile().b * args.dbias_stride_batch + head * args.dbias_stride_head +
                query * args.dbias_stride_row + work_tile().key + row(),
            static_cast<uint32_t>(args.dbias_stride_row),
            {keys > 0 ? queries : 0, keys > 8 ? queries : 0}};
  }
};

}  // namespace flashattn::cuda::sm90
