// K and V in E4M3 beside Q in 16 bits, in a decode kernel. Both GEMMs multiply fp16, which holds
// every number of E4M3.
//
// Q: a row is scaled by a power of two, so that bf16 fits. Scores: multiplied by the row's factor
// and descale_k, in fp32. P: rounded to fp16 as P * descale_v * 2^(kWeightExponent + 126 -
// exponent_), where exponent_ is the biased exponent of the largest descale_v of the warp's keys so
// far. O is rescaled when it grows. So P keeps its digits whatever the descales are.
#pragma once

#include "cuda/kernels/sm80/fwd_work_tile.cuh"
#include "cuda/device/fragment.cuh"
#include "cuda/device/mma_e4m3.cuh"
#include "cuda/device/page_runs.cuh"

namespace flashattn::cuda::sm80 {

// Shared memory of E4m3Cache: factors of Q's rows | per stage: descales of a tile's rows of K, then
// of V.
template <int kTileQ, int kTileKv, int kStages>
struct E4m3CacheLayout {
  static constexpr int kDescalesOffset = kTileQ * 4;
  static constexpr int kBytes = kDescalesOffset + kStages * 2 * kTileKv * 4;
};

template <class Config>
class E4m3Cache {
  static constexpr int kMmaM = Config::kMmaM, kWarpKv = Config::kWarpKv;
  static constexpr int kThreads = Config::kThreads, kTileKv = Config::kTileKv;
  using Layout = typename Config::CacheLayout;
  using ScoreFragment = float[kMmaM][kWarpKv / 8][4];
  using Accumulator = float[kMmaM][Config::kWarpDimV / 8][4];
  static constexpr int kWeightExponent = 14;      // exponent of the largest P in fp16
  static constexpr uint32_t kLeastExponent = 20;  // biased; for all descales below 2^-106

 public:
  enum Operand { kK, kV };

  __device__ __forceinline__ E4m3Cache(const ForwardParams& params, uint32_t shared)
      : pages_(PageDivision::of(params.problem.page_size)),
        params_(params),
        shared_(shared),
        exponent_(kLeastExponent) {}

  const PageDivision pages_;

  // Starts cp.async of the descales of a tile's rows of K or V, in the tile's cp.async group.
  __device__ __forceinline__ void prefetch(Operand of, int stage, const FwdWorkTile& work,
                                           int32_t first) const {
    static_assert(kTileKv <= kThreads, "a thread loads one");
    if (!has_blocks(of) || threadIdx.x >= kTileKv) return;
    const int32_t key = first + static_cast<int32_t>(threadIdx.x);
    const bool valid = key < work.seqlen_.len.kv;
    ptx::cp_async_4(address(of, stage) + threadIdx.x * 4, descale(of, work, valid ? key : 0),
                    valid);
  }

  // Converts Q to fp16 in place, in the order of gemm_nt(). All threads call it; a barrier follows.
  __device__ __forceinline__ void prepare_q(typename Config::QTile q,
                                            const FwdWorkTile& work) const {
    constexpr int kVectors = Config::kDimQk / 16;  // vectors of a row, on neighbouring lanes
    static_assert(
        Config::kTileQ * kVectors % 32 == 0 && (kVectors & (kVectors - 1)) == 0 && kVectors <= 32,
        "whole rows a warp");
    const bool is_bf16 = params_.problem.dtype == FLASHATTN_DTYPE_BF16;
    const int bias = is_bf16 ? 127 : 15, digits = is_bf16 ? 7 : 10;
#pragma unroll 1
    for (int n = threadIdx.x; n < Config::kTileQ * kVectors; n += kThreads) {
      const int r = n / kVectors, chunk = n % kVectors * 2;
      const int4 halves[2] = {ptx::load_shared_16(q.chunk(r, chunk)),
                              ptx::load_shared_16(q.chunk(r, chunk + 1))};
      uint32_t words[8];
      memcpy(words, halves, sizeof words);
      uint32_t magnitude = 0;
#pragma unroll
      for (const uint32_t word : words) {
        magnitude = max(magnitude, max(word & 0x7fffu, word >> 16 & 0x7fffu));
      }
#pragma unroll
      for (int step = 1; step < kVectors; step *= 2) {
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
      }
      // The row's maximum becomes 2^14 or more; fp32 holds the factor and its inverse.
      const int exponent = max(static_cast<int>(magnitude >> digits) - bias, -112);
      const float scale = power_of_two(14 - exponent);
#pragma unroll
      for (uint32_t& word : words) {
        const float2 x = is_bf16 ? ptx::unpack<__nv_bfloat16>(word) : ptx::unpack<__half>(word);
        word = ptx::pack<__half>(x.x * scale, x.y * scale);
      }
      pair_columns(words);
      ptx::store_shared_16(q.chunk(r, chunk), words[0], words[1], words[2], words[3]);
      ptx::store_shared_16(q.chunk(r, chunk + 1), words[4], words[5], words[6], words[7]);
      if (chunk == 0) {
        const float factor = power_of_two(exponent - 14) * single_descale(kK, work);
        ptx::store_shared(shared_ + r * 4, __float_as_uint(factor));
      }
    }
  }

  // Turns products into scores. row_of(mma_m, half), key: the lane's rows, and its first key in the
  // tile.
  template <class RowOf>
  __device__ __forceinline__ void scale_scores(ScoreFragment& s, int stage, int key,
                                               RowOf row_of) const {
    float factors[kMmaM * 2];
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      factors[x] = __uint_as_float(ptx::load_shared(shared_ + row_of(x / 2, x % 2) * 4));
    }
    if (!has_blocks(kK)) {
#pragma unroll
      for (int n = 0; n < kWarpKv / 8; ++n) {
#pragma unroll
        for (int x = 0; x < kMmaM * 4; ++x) s[x / 4][n][x % 4] *= factors[x / 2];
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kWarpKv / 8; ++n) {
      const float2 descales = load_descales(kK, stage, key + n * 8);
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) {
        float* const pair = &s[x / 2][n][x % 2 * 2];
        pair[0] *= factors[x] * descales.x;
        pair[1] *= factors[x] * descales.y;
      }
    }
  }

  // The exponent of the power of two by which the softmax multiplies P: that of fp16, unless
  // scale_weights() does so.
  __device__ __forceinline__ float weight_shift() const {
    return has_blocks(kV) ? 0.0f : kWeightExponent;
  }
  // The factor of sums of P.
  __device__ __forceinline__ float sum_factor() const {
    return has_blocks(kV) ? 1.0f : power_of_two(-kWeightExponent);
  }

  // Scales P for fp16 if blocks of V have descales. A P of 0 stays 0 whatever the descale.
  __device__ __forceinline__ void scale_weights(ScoreFragment& p, Accumulator& o, int stage,
                                                int key, int warp_key, int lane) {
    if (!has_blocks(kV)) return;
    uint32_t bits =
        lane < kWarpKv ? ptx::load_shared(address(kV, stage) + (warp_key + lane) * 4) : 0;
    bits = (bits & 0x7fffffffu) < 0x7f800000u ? bits & 0x7fffffffu : 0;
    uint32_t exponent = bits >> 23;
    if (__any_sync(~0u, exponent > exponent_)) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        exponent = max(exponent, __shfl_xor_sync(~0u, exponent, step));
      }
      scale(flat(o), ptx::exp2(static_cast<float>(exponent_) - static_cast<float>(exponent)));
      exponent_ = exponent;
    }
    const float power = power_of_two(kWeightExponent + 126 - static_cast<int>(exponent_));
#pragma unroll
    for (int n = 0; n < kWarpKv / 8; ++n) {
      const float2 descales = load_descales(kV, stage, key + n * 8);
      const float factors[2] = {descales.x * power, descales.y * power};
#pragma unroll
      for (int x = 0; x < kMmaM * 4; ++x) {
        float& weight = p[x / 4][n][x % 4];
        weight = weight > 0.0f ? weight * factors[x % 2] : weight;
      }
    }
  }

  // The factor of O after the last tile.
  __device__ __forceinline__ float output_factor(const FwdWorkTile& work) const {
    if (has_blocks(kV)) {
      return power_of_two(static_cast<int>(exponent_) - 126 - kWeightExponent);
    }
    return power_of_two(-kWeightExponent) * single_descale(kV, work);
  }

  // Four neighbouring elements of a key's row of V, at `from`, in fp32.
  __device__ __forceinline__ float4 value(const FwdWorkTile& work, int32_t key,
                                          const ptx::E4m3* from) const {
    uint32_t pairs[2];
    f16_of_e4m3<1>(*reinterpret_cast<const uint32_t*>(from), pairs);
    const float2 a = ptx::unpack<__half>(pairs[0]), b = ptx::unpack<__half>(pairs[1]);
    const float by = tensor(kV).data ? *descale(kV, work, key) : 1.0f;
    return {a.x * by, a.y * by, b.x * by, b.y * by};
  }

 private:
  // exponent: -126 to 127.
  static __device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
  }

  template <int kCount>
  static __device__ __forceinline__ void scale(float (&x)[kCount], float factor) {
#pragma unroll
    for (float& element : x) element *= factor;
  }

  __device__ __forceinline__ const flashattn_tensor& tensor(Operand of) const {
    return of == kK ? params_.args.inputs.descale_k : params_.args.inputs.descale_v;
  }
  __device__ __forceinline__ bool has_blocks(Operand of) const {
    return params_.problem.descale_block > 0 && tensor(of).data != nullptr;
  }
  __device__ __forceinline__ const float* descale(Operand of, const FwdWorkTile& work,
                                                  int32_t key) const {
    const int32_t tokens = params_.problem.descale_block;
    return reinterpret_cast<const float*>(
        tensor_row(tensor(of), 4, work.b_, work.kv_head_, tokens > 0 ? key / tokens : 0));
  }
  // The descale of all keys, 1 if there is none or blocks have their own.
  __device__ __forceinline__ float single_descale(Operand of, const FwdWorkTile& work) const {
    return has_blocks(of) || !tensor(of).data ? 1.0f : *descale(of, work, 0);
  }

  __device__ __forceinline__ uint32_t address(Operand of, int stage) const {
    return shared_ + Layout::kDescalesOffset + (stage * 2 + of) * kTileKv * 4;
  }
  __device__ __forceinline__ float2 load_descales(Operand of, int stage, int key) const {
    return ptx::load_shared_pair(address(of, stage) + key * 4);
  }

  const ForwardParams& params_;
  const uint32_t shared_;
  uint32_t exponent_;  // biased, as in descales; the same in all lanes
};

}  // namespace flashattn::cuda::sm80
