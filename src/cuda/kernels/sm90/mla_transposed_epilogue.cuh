// Epilogue of the Hopper kernel for few rows and LATENT_KV: sink, O, LSE or partial results.
#pragma once

#include "cuda/kernels/sm90/mla_transposed_consumer.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaTransposedEpilogue {
  using Consumer = MlaTransposedConsumer<Config>;
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kPartsOfO = Consumer::kPartsOfO;
  static constexpr int kColumns = Config::kDimV / Config::kConsumers;

 public:
  __device__ __forceinline__ explicit MlaTransposedEpilogue(Consumer& consumer)
      : consumer_(consumer),
        params_(consumer.params_),
        storage_(consumer.storage_),
        shared_(consumer.shared_) {}

  // Called after the last pass, when no warpgroup reads Q any more.
  __device__ __forceinline__ void store() {
    if (consumer_.thread() < kTileQ) finish_row(consumer_.thread());
    consumer_.exchange_sync();
    const float unit = __int_as_float(max(consumer_.unit_ - 5, 1) << 23);
#pragma unroll
    for (auto& part : consumer_.o_) {
#pragma unroll
      for (float& x : part) x *= unit;
    }
    consumer_.scale_o_by_row();
    if (tile().is_split || params_.common.problem.dtype_o == FLASHATTN_DTYPE_F32) {
      store_fp32();
    } else {
      store_16_bits();
    }
  }

 private:
  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return consumer_.tile(); }
  __device__ __forceinline__ MlaRow row_at(int32_t r) const {
    return mla_row(params_, tile().first_row, tile().kv_head, r);
  }
  __device__ __forceinline__ int64_t partial_row(MlaRow at) const {
    return params_.common.partial_row(tile().split_idx, tile().b, at.head, at.query);
  }
  __device__ __forceinline__ char* o_row(MlaRow at, int32_t size) const {
    return tensor_row(params_.common.args.o, size, tile().b, at.head, tile().offset_q + at.query);
  }

  // Stores LSE, or base and sum, of row r, and the factor for its O.
  __device__ __forceinline__ void finish_row(int32_t r) const {
    bool bad;
    float sum = consumer_.row_sum(r, bad), base = storage_.base[r], factor = 1.0f;
    if (r < tile().rows) {
      const MlaRow at = row_at(r);
      if ((params_.common.problem.features & FLASHATTN_FEATURE_SINK) && tile().split_idx == 0) {
        add_sink(params_.common.args.inputs.sink[at.head] * (kLog2E / kWideUnit), base, sum,
                 factor);
      }
      store_lse(at, base, sum);
    }
    storage_.o_scale[r] = sum == 0.0f ? 0.0f : factor / sum;
  }

  // sink: in the unit of base. factor: by which O must be rescaled.
  static __device__ __forceinline__ void add_sink(float sink, float& base, float& sum,
                                                  float& factor) {
    const float top = fmaxf(base, sink);
    if (top == -INFINITY) return;
    factor = base == top ? 1.0f : ptx::exp2((base - top) * kWideUnit);
    sum = sum * factor + ptx::exp2((sink - top) * kWideUnit);
    base = top;
  }

  __device__ __forceinline__ void store_lse(MlaRow at, float base, float sum) const {
    const ForwardArrays& args = params_.common.args;
    if (tile().is_split) {
      params_.common.partial_sums[partial_row(at)] = {base * (kWideUnit * kLn2), sum};
    } else if (args.lse) {
      const RowLayout layout = row_layout(params_.common.problem, args.shape);
      args.lse[tile().b * layout.batch_stride + at.head * layout.head_stride + tile().offset_q +
               at.query] = lse_of(base, kWideUnit, sum);
    }
  }

  // This lane's first column: it has 64 i + column() and the next.
  __device__ __forceinline__ int32_t column() const {
    return consumer_.warpgroup_ * kColumns + consumer_.warp() * 16 + consumer_.lane() / 4 * 2;
  }

  // Calls visit(r, x): x is the place of row r of column() in a part of O.
  template <class Visit>
  __device__ __forceinline__ void visit_rows(Visit visit) const {
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) visit(8 * j + consumer_.row() + e, 4 * j + e);
    }
  }

  __device__ __forceinline__ void store_fp32() const {
    visit_rows([&](int32_t r, int x) {
      if (r >= tile().rows) return;
      const MlaRow at = row_at(r);
      float* const to =
          (tile().is_split ? params_.common.partial_o + partial_row(at) * Config::kDimV
                           : reinterpret_cast<float*>(o_row(at, 4))) +
          column();
#pragma unroll
      for (int i = 0; i < kPartsOfO; ++i) {
        *reinterpret_cast<float2*>(to + i * 64) =
            make_float2(consumer_.o_[i][x], consumer_.o_[i][x + 2]);
      }
    });
  }

  // Stores 16-bit rows through shared memory, 16 bytes at once.
  __device__ __forceinline__ void store_16_bits() const {
    visit_rows([&](int32_t r, int x) {
      const uint32_t to = shared_ + r * Config::kOutputRowBytes + column() * 2;
#pragma unroll
      for (int i = 0; i < kPartsOfO; ++i) {
        ptx::store_shared(to + i * 128, ptx::pack<T>(consumer_.o_[i][x], consumer_.o_[i][x + 2]));
      }
    });
    consumer_.exchange_sync();
    constexpr int kChunks = Config::kDimV / 8;
#pragma unroll 4
    for (int32_t x = consumer_.thread(); x < tile().rows * kChunks; x += 256) {
      const int32_t r = x / kChunks, chunk = x % kChunks;
      *reinterpret_cast<int4*>(o_row(row_at(r), 2) + chunk * 16) =
          ptx::load_shared_16(shared_ + r * Config::kOutputRowBytes + chunk * 16);
    }
  }

  Consumer& consumer_;
  const MlaParams& params_;
  typename Consumer::SharedStorage& storage_;
  const uint32_t& shared_;
};

}  // namespace flashattn::cuda::sm90
