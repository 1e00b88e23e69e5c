// Descales of Q, K and V of the Hopper forward pass in E4M3.
#pragma once

#include <cfloat>

#include "cuda/kernels/sm90/fwd_consumer.cuh"

namespace flashattn::cuda::sm90 {

// Descales of blocks of tokens: runtime kernels take any blocks. Those with kHasBlockDescales take
// blocks of multiples of 64 tokens, so that the rows of a warpgroup have one descale, and half of a
// tile of keys. Both are factors of the exponent of P. That of V, relative to the largest of its
// head, is part of the base: P is weighed by it, and the row sums are not, since a sum is divided
// by it once per half.
template <class Config>
class FwdFp8Descales {
  static constexpr int kTileKv = Config::kTileKv;
  static constexpr bool kIsRuntime = Config::kIsRuntime;
  static constexpr bool kHasBlockDescales = Config::kHasBlockDescales;
  using Scores = float[kTileKv / 2];  // this lane's elements of S or P

 public:
  __device__ __forceinline__ explicit FwdFp8Descales(const FwdConsumer<Config>& consumer)
      : consumer_(consumer), params_(consumer.params_) {}

  // The factor of all scores.
  __device__ __forceinline__ float of_scores() const {
    const Inputs& in = params_.args.inputs;
    return of_head(in.descale_q)[0] * of_head(in.descale_k)[0];
  }

  // kHasBlockDescales: prepares of_tile() for a work tile.
  __device__ __forceinline__ void begin_work_tile() const {
    const Problem& problem = params_.problem;
    if (consumer_.leader_) {
      const int32_t first =
          min(work_tile().query + consumer_.warpgroup_ * 64, work_tile().query_end - 1);
      const HeadTiles tiles = HeadTiles::of_keys(problem, params_.args.shape, kTileKv);
      volatile WarpgroupTile& warpgroup =
          consumer_.storage_.work_tiles[consumer_.work_state_.stage()]
              .warpgroups[consumer_.warpgroup_];
      warpgroup.score_scale = problem.scale * kLog2E *
                              of_head(params_.args.inputs.descale_q)[first / problem.descale_block];
      warpgroup.first_descales = static_cast<int32_t>(
          kv_head() * tiles.count() + tiles.first(work_tile().offset_kv, work_tile().b));
    }
    consumer_.warpgroup_sync();
  }
  // kHasBlockDescales: the descales of the halves of KV tile n.
  __device__ __forceinline__ const HalfDescales* halves(int32_t n) const {
    return params_.half_descales + 2 * (consumer_.warpgroup_tile().first_descales + n);
  }
  // Loads the descales of a half, and multiplies that of K by all other factors of scores. Callers
  // load them where they use them, as registers are scarce; most lie in L1.
  __device__ __forceinline__ HalfDescales load(const HalfDescales* from) const {
    const float2 x = ptx::load_pair(reinterpret_cast<const float2*>(from));
    // With a factor of 0 hidden scores would be NaN.
    return {fmaxf(x.x * consumer_.warpgroup_tile().score_scale, FLT_MIN), x.y};
  }

  // The largest descale of V: P is weighed by the others relative to it.
  __device__ __forceinline__ float largest_of_v() const {
    const OfHead of_v = of_head(params_.args.inputs.descale_v);
    const int32_t size = params_.problem.descale_block, keys = work_tile().len.kv;
    if (keys == 0) return 1.0f;  // without keys there is no descale
    if constexpr (kHasBlockDescales) {
      return params_.largest_descale_v[work_tile().b * params_.problem.heads_kv + kv_head()];
    }
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
      const int32_t i =
          min(work_tile().query + consumer_.row() + mi * 8, work_tile().query_end - 1);
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
  __device__ __forceinline__ const volatile WorkTile<Config::kConsumers>& work_tile() const {
    return consumer_.work_tile();
  }
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
    const int64_t head = kv_head();
    return {
        static_cast<const float*>(x.data) + work_tile().b * x.stride_batch + head * x.stride_head,
        x.stride_seq};
  }

  __device__ __forceinline__ int32_t kv_head() const {
    return work_tile().h / params_.problem.q_heads_per_kv_head();
  }

  // Multiplies elements of tile n by the descale of their key and the factor of their row. Loads
  // descales once where half of a tile is of one block, else for each element.
  __device__ __forceinline__ void multiply(Scores& s, int32_t n, OfHead of_keys,
                                           const float (&of_row)[2]) const {
    const int32_t size = params_.problem.descale_block, key = n * kTileKv;
    const int32_t last = max(work_tile().len.kv - 1, 0);
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
