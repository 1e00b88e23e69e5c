// A consumer of the Hopper backward pass that holds dK and dV of 64 keys in registers and sees the
// tiles of queries pass by: what those for small heads and for many queries have in common.
#pragma once

#include "cuda/sm90/backward_scores.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BackwardSums : protected BackwardScores<Config> {
  using Base = BackwardScores<Config>;

 protected:
  using Base::control_, Base::group_, Base::item, Base::params_, Base::shared_;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;

  __device__ __forceinline__ BackwardSums(const BackwardParams& params, uint32_t shared,
                                          BackwardControl<Config>& control, int32_t group)
      : Base(params, shared, control, group) {}

  // Calls work() for all items, which adds to the sums.
  template <class Work>
  __device__ __forceinline__ void for_each_item(Work work) {
    for (;;) {
      this->take();
      if (item().end) break;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
      work();
      this->free_keys();
      const auto sums = [&](int i) -> float& { return i < kDim / 2 ? dv_[i] : dk_[i - kDim / 2]; };
      if (this->template unite<kDim>(sums)) {
        const Problem& problem = params_.common.problem;
        this->template store_rows<kDim>(params_.common.args.dv, problem.dim_v, this->row(),
                                        this->kept_factor(), [&](int i) { return dv_[i]; });
        this->template store_rows<kDim>(params_.common.args.dk, problem.dim_qk, this->row(),
                                        problem.scale, [&](int i) { return dk_[i]; });
      }
      ptx::named_sync(kWarpgroupBarrier + group_, 128);  // nobody reads the item any more
    }
  }

  // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
  __device__ __forceinline__ void clear_keys(uint32_t keys) const {
    if (!params_.kv_has_tail || item().keys >= kTileKv) return;
    ptx::mbarrier_wait(barrier_at(control_.q_full[place_.slot()]), place_.phase());
    this->template clear_rows<Config::kPanels>(keys, kTileKv, item().keys);
    this->settle_cleared();
  }

  // Rows of Q and dO past the last query: their weights are 0, but they may be NaN.
  __device__ __forceinline__ void clear_queries(int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= item().len.q) return;
    const uint32_t slot = place_.slot();
    const int32_t first = item().len.q - tile * kTileQ;
    ptx::mbarrier_wait(barrier_at(control_.q_full[slot]), place_.phase());
    ptx::mbarrier_wait(barrier_at(control_.do_full[slot]), place_.phase());
    this->template clear_rows<Config::kPanels>(shared_ + Config::kQ + slot * Config::kQueryBytes,
                                               kTileQ, first);
    this->template clear_rows<Config::kPanels>(shared_ + Config::kDo + slot * Config::kQueryBytes,
                                               kTileQ, first);
    this->settle_cleared();
  }

  // D and dO of the tile have been read. Each warp for itself: another may not have read its D yet.
  __device__ __forceinline__ void free_dout(uint32_t slot) const {
    __syncwarp();
    if (this->lane() == 0) ptx::mbarrier_arrive(barrier_at(control_.do_empty[slot]));
  }

  // This warpgroup's of V.
  __device__ __forceinline__ ptx::Matrix values() const {
    return ptx::Matrix::at(shared_ + Config::kV + group_ * 64 * 128, 0);
  }

  // Of the tile at work: Q and dO from the first query of a part on.
  __device__ __forceinline__ ptx::Matrix q(int part = 0) const {
    return ptx::Matrix::at(shared_ + Config::kQ + place_.slot() * Config::kQueryBytes, 0)
        .further(part * Config::kPartQ * 128);
  }
  __device__ __forceinline__ ptx::Matrix dout(int part = 0) const {
    return q(part).further(Config::kDo - Config::kQ);
  }

  Ring<Config::kStages> place_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
