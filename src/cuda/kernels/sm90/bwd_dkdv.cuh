// Accumulators and epilogue of dK and dV in the Hopper backward pass: a consumer warpgroup holds
// both for 64 keys in registers. A part of the mainloops for small heads and for long Q.
#pragma once

#include "cuda/kernels/sm90/bwd_warpgroup_base.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class BwdDkDv : BwdWarpgroupBase<Config> {
  using Base = BwdWarpgroupBase<Config>;
  using T = typename Config::T;
  using Base::storage_, Base::consumer_, Base::params_, Base::shared_;
  using typename Base::OutputTile, typename Base::DsState;
  static constexpr int kDimQk = Config::kDimQk, kDimV = Config::kDimV, kTileQ = Config::kTileQ;

 public:
  __device__ __forceinline__ BwdDkDv(const BackwardParams& params, uint32_t shared,
                                     BwdSharedStorage<Config>& storage, int32_t consumer)
      : Base(params, shared, storage, consumer) {}

  // Calls work(), which accumulates dK and dV and advances ds_count, the uses of this warpgroup's
  // stages of dS, for each work tile, and stores the result.
  template <class Work>
  __device__ __forceinline__ void for_each_work_tile(const uint32_t& ds_count, Work work) {
    Base::for_each_work_tile([&] {
      if (accumulate(work)) store(this->output_tile(), {ds_count});
    });
  }

  // As above, with S prefetched: start_s() issues the first S of a work tile, and dK and dV of the
  // tile before are stored before wait_s() waits for it. After the last tile: start_s(false).
  template <class StartS, class WaitS, class Work>
  __device__ __forceinline__ void for_each_work_tile(const uint32_t& ds_count, StartS start_s,
                                                     WaitS wait_s, Work work) {
    bool more = this->next_work_tile();
    start_s(more);
    wait_s();
    while (more) {
      const bool whole = accumulate(work);
      const OutputTile output_tile = this->output_tile();
      this->warpgroup_sync();
      more = this->next_work_tile();
      start_s(more);
      if (whole) store(output_tile, {ds_count});
      wait_s();
    }
  }

  float dk[kDimQk / 2], dv[kDimV / 2];

 private:
  // Accumulates dK and dV of a work tile. Returns false if another CTA will store them.
  template <class Work>
  __device__ __forceinline__ bool accumulate(Work work) {
#pragma unroll
    for (int i = 0; i < kDimQk / 2; ++i) {
      dk[i] = 0.0f;
      if (i < kDimV / 2) dv[i] = 0.0f;
    }
    work();
    this->release_kv();
    return this->template reduce_partials<Config::kAccRegs>(
        [&](int i) -> float& { return i < kDimV / 2 ? dv[i] : dk[i - kDimV / 2]; });
  }

  // Stores dK and dV of 64 keys.
  __device__ __forceinline__ void store(const OutputTile& output_tile, DsState at) const {
    const Problem& problem = params_.common.problem;
    const flashattn_tensor &to_dv = params_.common.args.dv, &to_dk = params_.common.args.dk;
    // store_via_smem() costs the kernel for long Q 0.7 %.
    if constexpr (Config::kConsumersComputeDq && !Config::kSplitsKPanel) {
      this->template store_rows<kDimV>(to_dv, output_tile, problem.dim_v, this->row(),
                                       this->p_scale(), [&](int i) { return dv[i]; });
      this->template store_rows<kDimQk>(to_dk, output_tile, problem.dim_qk, this->row(),
                                        problem.scale, [&](int i) { return dk[i]; });
    } else {
      // All parameters are read before the wait.
      const int32_t first = consumer_ * 64 + this->warp() * 16 + this->lane() / 8;
      const auto row = [&](const flashattn_tensor& tensor) {
        return tensor_row(tensor, 2, output_tile.b, output_tile.kv_head,
                          output_tile.first + first) +
               this->lane() % 8 * 16;
      };
      char *const dv_row = row(to_dv), *const dk_row = row(to_dk);
      const int32_t keys = output_tile.keys - first;
      storage_.ds.producer_acquire(at, this->ds_substage());
      store_via_smem(dv, this->p_scale(), at, dv_row, to_dv.stride_seq * 2, keys, problem.dim_v);
      store_via_smem(dk, problem.scale, at, dk_row, to_dk.stride_seq * 2, keys, problem.dim_qk);
    }
  }

  // Stores accumulators by whole rows: this lane stores every fourth of `keys` rows from `to` on, 8
  // of each 64 columns. Each warp transposes its 16 rows where it will store its dS of the next Q
  // tile, which no other warp touches. 128 bytes of a row are eight chunks, placed so that neither
  // one chunk of eight rows nor the chunks of one row conflict in banks.
  template <int kAccRegs>
  __device__ __forceinline__ void store_via_smem(const float (&acc)[kAccRegs], float factor,
                                                 DsState at, char* to, int64_t row_bytes,
                                                 int32_t keys, int32_t dim) const {
    const int32_t lane = this->lane();
    const uint32_t own =
        shared_ + Config::kDs + at.stage() * Config::kDsBytes + consumer_ * (kTileQ * 128);
    const int32_t columns = dim - lane % 8 * 8;
    const int64_t step = 4 * row_bytes;
    // Address of chunk c of key k. m * kRow: the address bits that flip if k is XORed with m < 8,
    // or if c is, apart from c * 1024.
    const auto chunk_address = [&](int32_t c, int32_t k) {
      return own + c * 1024 + ((k % 8 ^ c) * 128 | (this->warp() * 2 + k / 8 ^ k % 8 ^ c) << 4);
    };
    constexpr uint32_t kRow = 128 | 1 << 4;
    const uint32_t in = chunk_address(lane / 16, lane % 16),
                   out = chunk_address(lane % 8, lane / 8);
#pragma unroll
    for (int half = 0; half < kAccRegs / 32; ++half) {
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
};

}  // namespace flashattn::cuda::sm90
