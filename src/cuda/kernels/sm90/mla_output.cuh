// Where the results of a work tile of latent attention go, which both of its epilogues store.
#pragma once

#include "cuda/kernels/sm90/mla_config.cuh"

namespace flashattn::cuda::sm90 {

class MlaOutput {
 public:
  __device__ __forceinline__ MlaOutput(const MlaParams& params, const volatile MlaWorkTile& tile)
      : params_(params), tile_(tile) {}

 protected:
  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return tile_; }
  __device__ __forceinline__ MlaRow row_at(int32_t r) const {
    return mla_row(params_, tile_.first_row, tile_.kv_head, r);
  }
  // fp32 results: partial O of a split, or O.
  __device__ __forceinline__ bool stores_fp32() const {
    return tile_.is_split || params_.common.problem.dtype_o == FLASHATTN_DTYPE_F32;
  }

  // Adds the sink of a query head to the base, in units of kWideUnit log2(e), and to the sum of one
  // of its rows. Returns the factor by which O must be rescaled.
  __device__ __forceinline__ float add_sink(int32_t head, float& base, float& sum) const {
    if (!(params_.common.problem.features & FLASHATTN_FEATURE_SINK) || tile_.split_idx > 0) {
      return 1.0f;
    }
    const float sink = params_.common.args.inputs.sink[head] * (kLog2E / kWideUnit);
    const float keys = base, top = fmaxf(keys, sink);
    if (top == -INFINITY) return 1.0f;
    const float rescale = keys == top ? 1.0f : ptx::exp2((keys - top) * kWideUnit);
    sum = sum * rescale + ptx::exp2((sink - top) * kWideUnit);
    base = top;
    return rescale;
  }

  // Stores LSE of a row, or its base and sum of a split.
  __device__ __forceinline__ void store_lse(MlaRow at, float base, float sum) const {
    const ForwardArrays& args = params_.common.args;
    if (tile_.is_split) {
      params_.common.partial_sums[partial_row(at)] = {base * (kWideUnit * kLn2), sum};
    } else if (args.lse) {
      const RowLayout layout = row_layout(params_.common.problem, args.shape);
      args.lse[tile_.b * layout.batch_stride + at.head * layout.head_stride + tile_.offset_q +
               at.query] = lse_of(base, kWideUnit, sum);
    }
  }

  // The row of partial O, or of O, of stores_fp32().
  __device__ __forceinline__ float* fp32_row(MlaRow at) const {
    return tile_.is_split
               ? params_.common.partial_o + partial_row(at) * params_.common.problem.dim_v
               : reinterpret_cast<float*>(o_row(at, 4));
  }

  // The row of O, whose elements have a size of so many bytes.
  __device__ __forceinline__ char* o_row(MlaRow at, int32_t size) const {
    return tensor_row(params_.common.args.o, size, tile_.b, at.head, tile_.offset_q + at.query);
  }

  const MlaParams& params_;

 private:
  __device__ __forceinline__ int64_t partial_row(MlaRow at) const {
    return params_.common.partial_row(tile_.split_idx, tile_.b, at.head, at.query);
  }

  const volatile MlaWorkTile& tile_;
};

}  // namespace flashattn::cuda::sm90
