// A consumer of the Hopper backward pass that holds dK and dV of 64 keys in registers and sees the
// tiles of queries pass by: what those for small heads and for many queries have in common.
#pragma once

#include "cuda/kernels/sm90/bwd_score_mod.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdDkDv : protected BwdScoreMod<Config> {
  using Base = BwdScoreMod<Config>;
  using T = typename Config::T;

 protected:
  using Base::storage_, Base::consumer_, Base::work_tile, Base::params_, Base::shared_;
  using typename Base::OutputTile;
  static constexpr int kDim = Config::kDim, kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;

  __device__ __forceinline__ BwdDkDv(const BackwardParams& params, uint32_t shared,
                                     BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  // For all items work(), which adds to the sums.
  template <class Work>
  __device__ __forceinline__ void for_each_work_tile(Work work) {
    for (;;) {
      this->take();
      if (work_tile().end) break;
      if (accumulate(work)) store(this->output_tile());
      warpgroup_sync();
    }
  }

  // The same; before it start() and settle(), of S, which is computed while the sums of the item
  // before are stored. start(false) after the last.
  template <class StartS, class WaitS, class Work>
  __device__ __forceinline__ void for_each_work_tile(StartS start_s, WaitS wait_s, Work work) {
    this->take();
    bool more = !work_tile().end;
    start_s(more);
    wait_s();
    while (more) {
      const bool whole = accumulate(work);
      const OutputTile output_tile = this->output_tile();
      warpgroup_sync();
      this->take();
      more = !work_tile().end;
      start_s(more);
      if (whole) store(output_tile);
      wait_s();
    }
  }

  // Zeros in place of keys past the last: their dS is 0, but they may be NaN.
  __device__ __forceinline__ void zero_k_tail(uint32_t keys) const {
    if (!params_.kv_has_tail || work_tile().keys >= kTileKv) return;
    ptx::mbarrier_wait(barrier_at(storage_.q_full[q_state_.slot()]), q_state_.phase());
    this->template clear_rows<Config::kPanels>(keys, kTileKv, work_tile().keys);
    this->fence_cleared_rows();
  }

  // Rows of Q and dO past the last query: their weights are 0, but they may be NaN.
  __device__ __forceinline__ void zero_q_tail(int32_t tile) const {
    if (!params_.q_has_tail || (tile + 1) * kTileQ <= work_tile().len.q) return;
    const uint32_t slot = q_state_.slot();
    const int32_t first = work_tile().len.q - tile * kTileQ;
    ptx::mbarrier_wait(barrier_at(storage_.q_full[slot]), q_state_.phase());
    ptx::mbarrier_wait(barrier_at(storage_.do_full[slot]), q_state_.phase());
    this->template clear_rows<Config::kPanels>(shared_ + Config::kQ + slot * Config::kQBytes,
                                               kTileQ, first);
    this->template clear_rows<Config::kPanels>(shared_ + Config::kDo + slot * Config::kQBytes,
                                               kTileQ, first);
    this->fence_cleared_rows();
  }

  // D and dO of the tile have been read. Each warp for itself: another may not have read its D yet.
  __device__ __forceinline__ void release_dout(uint32_t slot) const {
    __syncwarp();
    if (this->lane() == 0) ptx::mbarrier_arrive(barrier_at(storage_.do_empty[slot]));
  }

  // The sums of an item. False: another block will store them.
  template <class Work>
  __device__ __forceinline__ bool accumulate(Work work) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk_[i] = dv_[i] = 0.0f;
    work();
    this->release_kv();
    return this->template reduce_partials<kDim>(
        [&](int i) -> float& { return i < kDim / 2 ? dv_[i] : dk_[i - kDim / 2]; });
  }

  // Nobody reads the item any more.
  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kWarpgroupBarrier + consumer_, 128);
  }

  // dK and dV of 64 keys.
  __device__ __forceinline__ void store(const OutputTile& output_tile) const {
    const Problem& problem = params_.common.problem;
    const flashattn_tensor &dv = params_.common.args.dv, &dk = params_.common.args.dk;
    if constexpr (Config::kConsumersComputeDq) {  // the other way costs it 0.7 %
      this->template store_rows<kDim>(dv, output_tile, problem.dim_v, this->row(),
                                      this->dropout_scale(), [&](int i) { return dv_[i]; });
      this->template store_rows<kDim>(dk, output_tile, problem.dim_qk, this->row(), problem.scale,
                                      [&](int i) { return dk_[i]; });
    } else {
      // All that is to be read before the wait.
      const int32_t first = consumer_ * 64 + this->warp() * 16 + this->lane() / 8;
      const auto row = [&](const flashattn_tensor& tensor) {
        return tensor_row(tensor, 2, output_tile.b, output_tile.kv_head,
                          output_tile.first + first) +
               this->lane() % 8 * 16;
      };
      char *const to_dv = row(dv), *const to_dk = row(dk);
      const int32_t keys = output_tile.keys - first;
      this->wait_ds_empty({q_state_.count});
      store_via_smem(dv_, this->dropout_scale(), to_dv, dv.stride_seq * 2, keys, problem.dim_v);
      store_via_smem(dk_, problem.scale, to_dk, dk.stride_seq * 2, keys, problem.dim_qk);
    }
  }

  // Rows of `keys` keys, of which this lane stores every fourth from the first on, and 8 columns of
  // 64. Each warp sorts its 16 rows where it will leave its dS of the next tile, which nobody else
  // touches: 128 bytes of a row are eight chunks, which lie so that neither a chunk of eight rows
  // nor those of a row meet in a bank.
  __device__ __forceinline__ void store_via_smem(const float (&acc)[kDim / 2], float factor,
                                                 char* to, int64_t row_bytes, int32_t keys,
                                                 int32_t dim) const {
    const int32_t lane = this->lane();
    const uint32_t own =
        shared_ + Config::kDs +
        PipelineState<Config::kDsStages>{q_state_.count}.slot() * Config::kDsBytes +
        consumer_ * (kTileQ * 128);
    const int32_t columns = dim - lane % 8 * 8;
    const int64_t step = 4 * row_bytes;
    // Of chunk c and key k; and what changes in it for another chunk, or key, of the same eight.
    const auto chunk_address = [&](int32_t c, int32_t k) {
      return own + c * 1024 + ((k % 8 ^ c) * 128 | (this->warp() * 2 + k / 8 ^ k % 8 ^ c) << 4);
    };
    constexpr uint32_t kRow = 128 | 1 << 4;
    const uint32_t in = chunk_address(lane / 16, lane % 16),
                   out = chunk_address(lane % 8, lane / 8);
#pragma unroll
    for (int half = 0; half < kDim / 64; ++half) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* x = &acc[half * 32 + n * 8];  // two chunks
        const auto pair = [&](int i) { return ptx::pack<T>(x[i] * factor, x[i + 1] * factor); };
        ptx::stmatrix_x4((in ^ 2 * n * kRow) + 2 * n * 1024, pair(0), pair(2), pair(4), pair(6));
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int4 x = ptx::load_shared_16(out ^ n % 2 * 4 * kRow ^ n / 2 << 4);
        const uint32_t words[4] = {static_cast<uint32_t>(x.x), static_cast<uint32_t>(x.y),
                                   static_cast<uint32_t>(x.z), static_cast<uint32_t>(x.w)};
        ptx::store_streaming_if(n * 4 < keys && half * 64 < columns, to + half * 128 + n * step,
                                words);
      }
      __syncwarp();
    }
  }

  // This warpgroup's of V.
  __device__ __forceinline__ ptx::SmemDescriptor v() const {
    return ptx::SmemDescriptor::at(shared_ + Config::kV + consumer_ * 64 * 128, 0);
  }

  // Of the tile at work: Q and dO from the first query of a part on.
  __device__ __forceinline__ ptx::SmemDescriptor q(int mma_n = 0) const {
    return ptx::SmemDescriptor::at(shared_ + Config::kQ + q_state_.slot() * Config::kQBytes, 0)
        .advance(mma_n * Config::kMmaN * 128);
  }
  __device__ __forceinline__ ptx::SmemDescriptor dout(int mma_n = 0) const {
    return q(mma_n).advance(Config::kDo - Config::kQ);
  }

  PipelineState<Config::kStages> q_state_;  // tiles of queries so far
  float dk_[kDim / 2], dv_[kDim / 2];
};

}  // namespace flashattn::cuda::sm90
