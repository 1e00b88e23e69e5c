// How dK and dV leave the Hopper backward kernel for small heads.
#pragma once

#include "cuda/sm90/backward_scores.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class KeyOutput : protected BackwardScores<Config> {
  using Base = BackwardScores<Config>;
  using T = typename Config::T;

 protected:
  using Base::control_, Base::group_, Base::params_, Base::shared_;
  using Base::item, Base::lane, Base::leader, Base::warp;
  using Sums = float[Config::kDim / 2];  // this lane's accumulators of dK or dV

  __device__ __forceinline__ KeyOutput(const BackwardParams& params, uint32_t shared,
                                       BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  // dV and dK by way of buffers that are free again when the leader's copies have read them: this
  // warpgroup's panels of those of dS, so that it need not wait for the other. place: in the ring
  // of dS.
  __device__ __forceinline__ void store(const Sums& dk, const Sums& dv,
                                        Ring<Config::kDsStages> place) const {
    constexpr int kPanelBytes = Config::kScoreBytes;
    const uint32_t from_dv = shared_ + Config::kDs + group_ * (kPanelBytes / 2);
    const uint32_t from_dk = from_dv + Config::kPanels * kPanelBytes;
    // An item without queries: the last one's results may still be leaving.
    if (leader()) ptx::bulk_wait_read();
    ptx::named_sync(kWarpgroupBarrier + group_, 128);
#pragma unroll
    for (int n = 0; n < Config::kDsStages; ++n, place.advance()) this->await_ds(place);
    stage<kPanelBytes>(dv, from_dv, this->kept_factor());
    stage<kPanelBytes>(dk, from_dk, params_.common.problem.scale);
    if (params_.store_boxes) {
      ptx::fence_async_proxy();
      ptx::named_sync(kWarpgroupBarrier + group_, 128);
      if (leader()) {
        store_boxes<kPanelBytes>(params_.dv, from_dv);
        store_boxes<kPanelBytes>(params_.dk, from_dk);
        ptx::bulk_commit();
      }
    } else {
      __syncwarp();
      store_rows<kPanelBytes>(params_.common.args.dv, from_dv, params_.common.problem.dim_v);
      store_rows<kPanelBytes>(params_.common.args.dk, from_dk, params_.common.problem.dim_qk);
    }
  }

 private:
  // In panels of 64 columns, rows 128 bytes apart.
  template <int kPanelBytes>
  static __device__ __forceinline__ uint32_t staged(uint32_t base, int32_t row, int32_t chunk) {
    return base + chunk / 8 * kPanelBytes + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }

  template <int kPanelBytes>
  __device__ __forceinline__ void stage(const Sums& x, uint32_t to, float factor) const {
    const int32_t r = warp() * 16 + lane() % 16;
#pragma unroll
    for (int n = 0; n < Config::kDim / 16; ++n) {
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        pairs[e] = ptx::pack<T>(x[8 * n + 2 * e] * factor, x[8 * n + 2 * e + 1] * factor);
      }
      ptx::stmatrix_x4(staged<kPanelBytes>(to, r, 2 * n + lane() / 16), pairs[0], pairs[1],
                       pairs[2], pairs[3]);
    }
  }

  template <int kPanelBytes>
  __device__ __forceinline__ void store_boxes(const CUtensorMap& map, uint32_t from) const {
#pragma unroll
    for (int p = 0; p < Config::kPanels; ++p) {
      ptx::tma_store(&map, from + p * kPanelBytes,
                     {p * 64, item().key + group_ * 64, item().kv_head, item().b});
    }
  }

  // Each warp its own 16.
  template <int kPanelBytes>
  __device__ __forceinline__ void store_rows(const flashattn_tensor& tensor, uint32_t from,
                                             int32_t dim) const {
    constexpr int kChunks = 8 * Config::kPanels;
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = warp() * 16 + x / kChunks, chunk = x % kChunks;
      const int32_t n = group_ * 64 + r;
      if (n >= item().keys || chunk * 8 >= dim) continue;
      char* to = tensor_row(tensor, 2, item().b, item().kv_head,
                            static_cast<int64_t>(item().first_kv) + item().key + n);
      *reinterpret_cast<int4*>(to + chunk * 16) =
          ptx::load_shared_16(staged<kPanelBytes>(from, r, chunk));
    }
  }
};

}  // namespace flashattn::cuda::sm90
