// Epilogue of a consumer warpgroup of the Hopper forward pass: it stores its rows of O, by TMA or
// row by row.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm90/fwd_consumer.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdEpilogue {
 public:
  using OAccum = float[Config::kDimV / 2];  // this lane's accumulators of O

  __device__ __forceinline__ explicit FwdEpilogue(const FwdConsumer<Config>& consumer)
      : consumer_(consumer), params_(consumer.params_) {}

  // kShort: see FwdSoftmax::finish_tile(). nonfinite: whether the stored O of a row is not finite.
  // redo: the tile is redone.
  template <bool kShort>
  __device__ __forceinline__ void store(const OAccum& o, bool redo, bool (&nonfinite)[2]) const {
    bool fp32 = !kShort && params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    if (!kShort) fp32 |= consumer_.is_partial();
    if (fp32) {
      store_fp32(o, nonfinite);
    } else {
      uint32_t seen[2][2] = {};  // two chains per row hide latency
#pragma unroll
      for (int subtile = 0; subtile < Config::kOSubtiles; ++subtile) {
        store_to_smem(o, subtile, redo, seen);
        if (kShort || params_.o_by_tma) {
          store_tma(subtile);
        } else {
          store_rows(subtile);
        }
      }
      constexpr uint32_t kNoSign = 0x7fff7fff;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) nonfinite[mi] = (seen[mi][0] | seen[mi][1]) & kNoSign;
    }
    // O has used the buffer of Q, which is released once O has been read.
    if (!Config::kSeparateO) {
      if (!kShort && !params_.o_by_tma) {
        ptx::fence_async_proxy();
        consumer_.warpgroup_sync();
      }
      if (consumer_.leader_) {
        ptx::bulk_wait_read();
        consumer_.release_q();
      }
    }
  }

 protected:
  __device__ __forceinline__ const volatile WorkTile<Config::kConsumers>& work_tile() const {
    return consumer_.work_tile();
  }
  __device__ __forceinline__ int32_t lane() const { return consumer_.lane(); }
  __device__ __forceinline__ int32_t row() const { return consumer_.row(); }

  // The address of row i of O; FwdConsumer says what row i is.
  __device__ __forceinline__ char* o_row_ptr(int32_t i, int32_t size) const {
    return tensor_row(params_.args.o, size, work_tile().b, consumer_.head_of(i),
                      work_tile().offset_q + consumer_.query_of(i));
  }

  const FwdConsumer<Config>& consumer_;
  const ForwardParams& params_;

 private:
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ;
  // O is stored in kOSubtiles subtiles of these sizes.
  static constexpr int kPanels = Config::kPanelsV / Config::kOSubtiles;
  static constexpr int kSubtileColumns = Config::kDimV / Config::kOSubtiles;

  __device__ __forceinline__ void store_fp32(const OAccum& o, bool (&nonfinite)[2]) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      float seen = 0.0f;  // 0, or NaN if O is not finite
      const int32_t i = work_tile().query + row() + mi * 8;
      int32_t columns = i < work_tile().query_end ? params_.problem.dim_v : 0;
      float* out = reinterpret_cast<float*>(o_row_ptr(i, 4)) + lane() % 4 * 2;
      if constexpr (FwdConsumer<Config>::kMayBePartial) {
        if (!consumer_.has_head(i)) columns = 0;
        if (consumer_.is_partial()) {
          const int64_t to = columns > 0 ? consumer_.partial_row(i) : 0;
          out = params_.partial_o + to * params_.problem.dim_v + lane() % 4 * 2;
        }
      }
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        const float low = o[4 * x + mi * 2], high = o[4 * x + mi * 2 + 1];
        seen = fmaf(high, 0.0f, fmaf(low, 0.0f, seen));
        ptx::store_if(x * 8 < columns, out + x * 8, low, high);
      }
      nonfinite[mi] = seen != 0.0f;
    }
  }

  // Shared-memory address of a 16-byte chunk of O: swizzled panels of 64 columns, like Q.
  __device__ __forceinline__ uint32_t staging_address(int32_t row, int32_t chunk) const {
    return consumer_.shared_ + Config::kOOffset + chunk / 8 * kTileQ * 128 +
           (consumer_.warpgroup_ * 64 + row) * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void store_to_smem(const OAccum& o, int subtile, bool redo,
                                                uint32_t (&seen)[2][2]) const {
    // TMA may still read the buffer for the subtile before. A redo also waits until the tile's
    // first result is written, which its own must overwrite.
    if (consumer_.leader_) {
      if (redo) {
        ptx::bulk_wait();
        ptx::fence_async_proxy_global();
      } else {
        ptx::bulk_wait_read();
      }
    }
    consumer_.warpgroup_sync();
    const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < kSubtileColumns / 16; ++j) {
      const float* x = &o[subtile * (kSubtileColumns / 2) + 8 * j];
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
        seen[i % 2][i / 2] = ptx::add_nonfinite<T>(seen[i % 2][i / 2], words[i]);
      }
      ptx::stmatrix_x4(staging_address(r, 2 * j + lane() / 16), words[0], words[1], words[2],
                       words[3]);
    }
  }

  __device__ __forceinline__ void store_tma(int subtile) const {
    ptx::fence_async_proxy();
    consumer_.warpgroup_sync();
    if (!consumer_.leader_ ||
        work_tile().query + consumer_.warpgroup_ * 64 >= work_tile().query_end)
      return;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_store(&params_.o, staging_address(0, p * 8),
                     {(subtile * kPanels + p) * 64, work_tile().query + consumer_.warpgroup_ * 64,
                      work_tile().h, work_tile().b});
    }
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void store_rows(int subtile) const {
    constexpr int kChunks = 8 * kPanels;
    __syncwarp();
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + x / kChunks, chunk = x % kChunks;
      const int32_t i = work_tile().query + consumer_.warpgroup_ * 64 + r;
      const int32_t column = (subtile * kChunks + chunk) * 8;
      if (i >= work_tile().query_end || column >= params_.problem.dim_v) continue;
      if constexpr (Config::kPacksHeads) {
        if (!consumer_.has_head(i)) continue;
      }
      *reinterpret_cast<int4*>(o_row_ptr(i, 2) + column * 2) =
          ptx::load_shared_16(staging_address(r, chunk));
    }
  }
};

}  // namespace flashattn::cuda::sm90
