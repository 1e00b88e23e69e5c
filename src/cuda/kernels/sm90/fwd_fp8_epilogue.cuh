// Epilogue of the Hopper forward pass in E4M3: O also in E4M3, and its largest magnitudes.
#pragma once

#include "cuda/kernels/sm90/fwd_epilogue.cuh"
#include "cuda/ptx/fp8.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdFp8OStore {
 public:
  using OAccum = typename FwdOStore<Config>::OAccum;

  __device__ __forceinline__ explicit FwdFp8OStore(const FwdConsumer<Config>& consumer)
      : wider_(consumer), consumer_(consumer), params_(consumer.params_) {}

  // kShort: TMA stores O, which is in 16 bits.
  template <bool kShort>
  __device__ __forceinline__ void store(const OAccum& o, bool redo, bool (&nonfinite)[2]) const {
    if (params_.args.amax_o.data) raise_amax(o, redo);
    if (!kShort && params_.problem.dtype_o == FLASHATTN_DTYPE_F8E4M3) {
      store_fp8(o, nonfinite);
    } else {
      wider_.template store<kShort>(o, redo, nonfinite);
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ T* of_head(const flashattn_tensor& tensor) const {
    return reinterpret_cast<T*>(
        tensor_row(tensor, sizeof(T), consumer_.work_tile().b, consumer_.work_tile().h, 0));
  }

  // Raises amax_o of the head to the largest magnitude in this warp's rows; as bits, NaN exceeds
  // all. Rows that are not finite are computed again and count then.
  __device__ __forceinline__ void raise_amax(const OAccum& o, bool redo) const {
    uint32_t most = 0;  // bits
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      if (consumer_.work_tile().query + consumer_.row() + mi * 8 >= consumer_.work_tile().query_end)
        continue;
#pragma unroll
      for (int x = 0; x < Config::kDimV / 2; ++x) {
        if (x / 2 % 2 == mi) most = max(most, __float_as_uint(o[x]) & 0x7fffffffu);
      }
    }
    most = static_cast<uint32_t>(__reduce_max_sync(~0u, static_cast<int>(most)));
    if (consumer_.lane() == 0 && (redo || most < 0x7f800000u)) {
      ptx::red_max(of_head<uint32_t>(params_.args.amax_o), most);
    }
  }

  // A quad exchanges columns, so that each lane stores 8 neighbours of both its rows.
  __device__ __forceinline__ void store_fp8(const OAccum& o, bool (&nonfinite)[2]) const {
    const float scale = params_.args.scale_o.data ? *of_head<float>(params_.args.scale_o) : 1.0f;
    const int32_t first = consumer_.work_tile().query + consumer_.row(),
                  quad_lane = consumer_.lane() % 4;
    char* out[2];
    int32_t columns[2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      out[mi] = wider_.o_row_ptr(first + mi * 8, 1) + quad_lane * 8;
      columns[mi] = first + mi * 8 < consumer_.work_tile().query_end ? params_.problem.dim_v : 0;
    }
    float seen[2] = {};  // 0, or NaN if an element is not finite
#pragma unroll
    for (int n = 0; n < Config::kDimV / 32; ++n) {
      uint32_t words[4];  // low halves: the first row
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* x = &o[16 * n + 4 * j];
#pragma unroll
        for (int e = 0; e < 4; ++e) seen[e / 2] = fmaf(x[e], 0.0f, seen[e / 2]);
        words[j] = ptx::pack_e4m3(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const bool high = quad_lane & step;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j & step) continue;
          const uint32_t got = __shfl_xor_sync(~0u, high ? words[j] : words[j + step], step);
          (high ? words[j] : words[j + step]) = got;
        }
      }
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        if (n * 32 + quad_lane * 8 >= columns[mi]) continue;
        const uint32_t half = mi == 0 ? 0x5410 : 0x7632;
        *reinterpret_cast<uint2*>(out[mi] + n * 32) = {__byte_perm(words[0], words[1], half),
                                                       __byte_perm(words[2], words[3], half)};
      }
    }
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) nonfinite[mi] = seen[mi] != 0.0f;
  }

  const FwdOStore<Config> wider_;  // O in 16 bits or fp32
  const FwdConsumer<Config>& consumer_;
  const ForwardParams& params_;
};

}  // namespace flashattn::cuda::sm90
