// Epilogue of latent attention on Hopper: each warpgroup stores its columns of O, the first also
// lse. A KV split stores partial O and sums instead.
#pragma once

#include "cuda/kernels/sm90/mla_consumer.cuh"
#include "cuda/kernels/sm90/mla_output.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaEpilogue : MlaOutput {
  using Consumer = MlaConsumer<Config>;
  using T = typename Config::T;
  static constexpr int kColumns = Consumer::kColumns;

 public:
  __device__ __forceinline__ explicit MlaEpilogue(Consumer& consumer)
      : MlaOutput(consumer.params_, consumer.tile()),
        consumer_(consumer),
        base_(consumer.base_),
        row_sum_(consumer.row_sum_),
        o_(consumer.o_),
        shared_(consumer.shared_),
        warpgroup_(consumer.warpgroup_) {}

  // Called after the last pass, when no warpgroup reads Q any more.
  __device__ __forceinline__ void store() {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t r = row() + mi * 8;
      float factor = 1.0f;
      if (r < tile().rows) {
        const MlaRow at = row_at(r);
        factor = add_sink(at.head, base_[mi], row_sum_[mi]);
        if (warpgroup_ == 0 && lane() % 4 == 0) store_lse(at, base_[mi], row_sum_[mi]);
      }
      const float scale = row_sum_[mi] == 0.0f ? 0.0f : factor / row_sum_[mi];
#pragma unroll
      for (int x = 0; x < kColumns / 4; ++x) {
        o_[x / 2 * 4 + mi * 2 + x % 2] *= scale;
      }
    }
    if (stores_fp32()) {
      store_fp32();
    } else {
      store_rows();
    }
  }

 private:
  __device__ __forceinline__ int32_t lane() const { return consumer_.lane(); }
  __device__ __forceinline__ int32_t row() const { return consumer_.row(); }

  __device__ __forceinline__ void store_fp32() const {
    const int32_t dim_v = params_.common.problem.dim_v;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t r = row() + mi * 8;
      const int32_t first = warpgroup_ * kColumns + lane() % 4 * 2;
      const int32_t columns = r < tile().rows ? dim_v - first : 0;
      float* const out = fp32_row(row_at(min(r, tile().rows - 1))) + first;
#pragma unroll
      for (int x = 0; x < kColumns / 8; ++x) {
        ptx::store_if(x * 8 < columns, out + x * 8, o_[4 * x + mi * 2], o_[4 * x + mi * 2 + 1]);
      }
    }
  }

  // Stores 16-bit rows through the buffer of Q: each warp its own 16 rows, 512 contiguous bytes at
  // once.
  __device__ __forceinline__ void store_rows() const {
    constexpr int kChunks = kColumns / 8;
    const int32_t warp_row = row() - lane() / 4;
    const auto address = [&](int32_t r, int32_t chunk) {
      return shared_ + (warpgroup_ * Config::kHalfPanels + chunk / 8) * Config::kTileQ * 128 +
             r * 128 + ((chunk % 8 ^ (r & 7)) << 4);
    };
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const float* x = &o_[8 * j];
      ptx::stmatrix_x4(address(warp_row + lane() % 16, 2 * j + lane() / 16),
                       ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                       ptx::pack<T>(x[6], x[7]));
    }
    __syncwarp();
#pragma unroll 4
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = warp_row + x / kChunks, chunk = x % kChunks;
      const int32_t column = warpgroup_ * kColumns + chunk * 8;
      if (r >= tile().rows || column >= params_.common.problem.dim_v) continue;
      *reinterpret_cast<int4*>(o_row(row_at(r), 2) + column * 2) =
          ptx::load_shared_16(address(r, chunk));
    }
  }

  Consumer& consumer_;
  float (&base_)[2];
  float (&row_sum_)[2];
  float (&o_)[kColumns / 2];
  const uint32_t& shared_;
  const int32_t& warpgroup_;
};

}  // namespace flashattn::cuda::sm90
