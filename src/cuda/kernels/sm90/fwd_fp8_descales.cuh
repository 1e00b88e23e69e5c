// Descales of Q, K and V of the Hopper forward pass in E4M3.
#pragma once

#include "cuda/kernels/sm90/fwd_consumer.cuh"

namespace flashattn::cuda::sm90 {

// Only runtime kernels take descales by blocks of tokens.
template <class Config>
class FwdFp8Descales {
  static constexpr int kTileKv = Config::kTileKv;
  static constexpr bool kIsRuntime = Config::kIsRuntime;
  using Scores = float[kTileKv / 2];  // this lane's elements of S or P

 public:
  __device__ __forceinline__ explicit FwdFp8Descales(const FwdConsumer<Config>& consumer)
      : consumer_(consumer), params_(consumer.params_) {}

  // The factor of all scores.
  __device__ __forceinline__ float of_scores() const {
    const Inputs& in = params_.args.inputs;
    return of_head(in.descale_q)[0] * of_head(in.descale_k)[0];
  }

  // The largest descale of V: P is weighed by the others relative to it.
  __device__ __forceinline__ float largest_of_v() const {
    const OfHead of_v = of_head(params_.args.inputs.descale_v);
    const int32_t size = params_.problem.descale_block, keys = consumer_.work_tile().len.kv;
    if (keys == 0) return 1.0f;  // without keys there is no descale
    if (!kIsRuntime || size == 0) return of_v[0];
    float largest = 0.0f;
    const int32_t blocks = (keys + size - 1) / size;
    for (int32_t n = consumer_.lane(); n < blocks; n += 32) {
      largest = fmaxf(largest, fabsf(of_v[n]));
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    }
    return largest;
  }

  // Multiplies products of E4M3 by the descales of Q and K.
  __device__ __forceinline__ void apply(Scores& s, int32_t n) const {
    const Inputs& in = params_.args.inputs;
    const int32_t size = params_.problem.descale_block;
    const OfHead of_q = of_head(in.descale_q);
    float of_row[2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int32_t i = min(consumer_.work_tile().query + consumer_.row() + mi * 8,
                            consumer_.work_tile().query_end - 1);
      of_row[mi] = of_q[size == 0 ? 0 : i / size];
    }
    multiply(s, n, of_head(in.descale_k), of_row);
  }

  // Multiplies P by its key's descale of V times `inverse`, 1 / largest_of_v().
  __device__ __forceinline__ void weigh(Scores& p, int32_t n, float inverse) const {
    if (params_.problem.descale_block == 0 || inverse == 0.0f) return;
    multiply(p, n, of_head(params_.args.inputs.descale_v), {inverse, inverse});
  }

 private:
  // Descales of this work tile's KV head, by block; 1 without an array.
  struct OfHead {
    const float* data;
    int64_t stride;

    __device__ __forceinline__ float operator[](int32_t block) const {
      return data ? data[block * stride] : 1.0f;
    }
  };
  __device__ __forceinline__ OfHead of_head(const flashattn_tensor& x) const {
    if (x.data == nullptr) return {nullptr, 0};
    const int64_t head = consumer_.work_tile().h / params_.problem.q_heads_per_kv_head();
    return {static_cast<const float*>(x.data) + consumer_.work_tile().b * x.stride_batch +
                head * x.stride_head,
            x.stride_seq};
  }

  // Multiplies elements of tile n by the descale of their key and the factor of their row. Loads
  // descales once where half of a tile is of one block, else for each element.
  __device__ __forceinline__ void multiply(Scores& s, int32_t n, OfHead of_keys,
                                           const float (&of_row)[2]) const {
    const int32_t size = params_.problem.descale_block, key = n * kTileKv;
    const int32_t last = max(consumer_.work_tile().len.kv - 1, 0);
    const auto of_key = [&](int32_t j) { return of_keys[size == 0 ? 0 : min(j, last) / size]; };
    if (size % (kTileKv / 2) == 0) {
      const float first = of_key(key), second = of_key(key + kTileKv / 2);
      const float factors[2][2] = {{first * of_row[0], first * of_row[1]},
                                   {second * of_row[0], second * of_row[1]}};
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) s[i] *= factors[i >= kTileKv / 4][i / 2 % 2];
    } else {
      const int32_t own = key + consumer_.lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        s[i] *= of_keys[min(own + i / 4 * 8 + i % 2, last) / size] * of_row[i / 2 % 2];
      }
    }
  }

  const FwdConsumer<Config>& consumer_;
  const ForwardParams& params_;
};

}  // namespace flashattn::cuda::sm90
