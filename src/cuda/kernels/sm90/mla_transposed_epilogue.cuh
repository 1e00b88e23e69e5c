// Epilogue of the Hopper kernel for few rows and LATENT_KV: sink, O, LSE or partial results.
#pragma once

#include "cuda/kernels/sm90/mla_output.cuh"
#include "cuda/kernels/sm90/mla_transposed_consumer.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaTransposedEpilogue : MlaOutput {
  using Consumer = MlaTransposedConsumer<Config>;
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kPartsOfO = Consumer::kPartsOfO;
  static constexpr int kColumns = Config::kDimV / Config::kConsumers;

 public:
  __device__ __forceinline__ explicit MlaTransposedEpilogue(Consumer& consumer)
      : MlaOutput(consumer.params_, consumer.tile()),
        consumer_(consumer),
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
    if (stores_fp32()) {
      store_fp32();
    } else {
      store_16_bits();
    }
  }

 private:
  // Stores LSE, or base and sum, of row r, and the factor for its O.
  __device__ __forceinline__ void finish_row(int32_t r) const {
    bool bad;
    float sum = consumer_.row_sum(r, bad), base = storage_.base[r], factor = 1.0f;
    if (r < tile().rows) {
      const MlaRow at = row_at(r);
      factor = add_sink(at.head, base, sum);
      store_lse(at, base, sum);
    }
    storage_.o_scale[r] = sum == 0.0f ? 0.0f : factor / sum;
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
      float* const to = fp32_row(row_at(r)) + column();
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
  typename Consumer::SharedStorage& storage_;
  const uint32_t& shared_;
};

}  // namespace flashattn::cuda::sm90
