// What a consumer warpgroup of the Hopper forward pass knows of its tile, and how its rows of O
// leave.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

// Named barriers; 0 is that of the block.
constexpr int kTurnBarrier = 1;   // + warpgroup: it may issue its products
constexpr int kGroupBarrier = 8;  // + warpgroup: its four warps

template <class Config>
class TileOutput {
 protected:
  using T = typename Config::T;
  using Sums = float[Config::kDimV / 2];  // this lane's accumulators of O
  static constexpr int kConsumers = Config::kConsumers, kTileQ = Config::kTileQ;
  // Of a piece of O.
  static constexpr int kPanels = Config::kPanelsV / Config::kOPieces;
  static constexpr int kColumns = Config::kDimV / Config::kOPieces;

  __device__ __forceinline__ TileOutput(const ForwardParams& params, uint32_t shared,
                                        Control<Config>& control, int32_t group)
      : params_(params),
        control_(control),
        shared_(shared),
        group_(group),
        leader_(threadIdx.x % 128 == 0) {}

  // Read anew each time: registers are better used in the main loop.
  __device__ __forceinline__ const volatile WorkItem<kConsumers>& item() const {
    return control_.items[items_.slot()];
  }
  __device__ __forceinline__ const volatile Strip& strip() const { return item().strips[group_]; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  // Of the tile: the upper of this lane's two rows; the other is 8 below.
  __device__ __forceinline__ int32_t row() const {
    return group_ * 64 + no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }

  __device__ __forceinline__ void release_q() const {
    if (leader_) ptx::mbarrier_arrive(address(control_.q_empty[q_place_.slot()][group_]));
  }

  __device__ __forceinline__ char* o_row(int32_t i, int32_t size) const {
    return tensor_row(params_.args.o, size, item().b, item().h, item().offset_q + i);
  }

  // How many keys a row of this lane's sees, block masks and biases aside.
  __device__ __forceinline__ int32_t keys_of(int half) const {
    const volatile Interval& keys = control_.visible[row() + half * 8];
    return max(keys.end - keys.begin, 0);
  }

  __device__ __forceinline__ void store_fp32(const Sums& o) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t i = item().query + row() + half * 8;
      const int32_t columns = i < item().query_end ? params_.problem.dim_v : 0;
      float* out = reinterpret_cast<float*>(o_row(i, 4)) + lane() % 4 * 2;
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        ptx::store_if(x * 8 < columns, out + x * 8, o[4 * x + half * 2], o[4 * x + half * 2 + 1]);
      }
    }
  }

  // Where this warpgroup's rows of a piece of O are staged: in panels, like Q.
  __device__ __forceinline__ uint32_t staged(int32_t row, int32_t chunk) const {
    return shared_ + Config::kO + chunk / 8 * kTileQ * 128 + (group_ * 64 + row) * 128 +
           ((chunk % 8 ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void stage(const Sums& o, int piece) const {
    // The last piece of O may still be leaving; a tile done over must not overtake its first
    // result.
    if (leader_) {
      if (item().safe) {
        ptx::bulk_wait();
        ptx::fence_async_proxy_global();
      } else {
        ptx::bulk_wait_read();
      }
    }
    ptx::named_sync(kGroupBarrier + group_, 128);
    const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const float* x = &o[piece * (kColumns / 2) + 8 * j];
      ptx::stmatrix_x4(staged(r, 2 * j + lane() / 16), ptx::pack<T>(x[0], x[1]),
                       ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                       ptx::pack<T>(x[6], x[7]));
    }
  }

  __device__ __forceinline__ void store_boxes(int piece) const {
    ptx::fence_async_proxy();
    ptx::named_sync(kGroupBarrier + group_, 128);
    if (!leader_ || item().query + group_ * 64 >= item().query_end) return;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_store(&params_.o, staged(0, p * 8),
                     {(piece * kPanels + p) * 64, item().query + group_ * 64, item().h, item().b});
    }
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void store_rows(int piece) const {
    constexpr int kChunks = 8 * kPanels;
    __syncwarp();
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + x / kChunks, chunk = x % kChunks;
      const int32_t i = item().query + group_ * 64 + r;
      const int32_t column = (piece * kChunks + chunk) * 8;
      if (i >= item().query_end || column >= params_.problem.dim_v) continue;
      *reinterpret_cast<int4*>(o_row(i, 2) + column * 2) = ptx::load_shared_16(staged(r, chunk));
    }
  }

  const ForwardParams& params_;
  Control<Config>& control_;
  const uint32_t shared_;
  const int32_t group_;
  const bool leader_;
  PipelineState<kItems> items_;
  PipelineState<Config::kQStages> q_place_;
};

}  // namespace flashattn::cuda::sm90
