// Epilogue of the decode kernel: combines the partial results of the CTA's warps, then, in a
// cluster, those of the CTAs' splits.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/decode_config.cuh"
#include "cuda/kernels/sm80/decode_softmax.cuh"
#include "cuda/kernels/sm80/e4m3_cache.cuh"
#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/vec4.cuh"

namespace flashattn::cuda::sm80 {

// Takes the place of E4m3Cache if K and V have 16 bits.
struct NoCache {
  static __device__ __forceinline__ float weight_shift() { return 0.0f; }
  __device__ __forceinline__ NoCache(const ForwardParams&, uint32_t) {}
};
template <class Config>
using DecodeCache = std::conditional_t<Config::kIsE4m3, E4m3Cache<Config>, NoCache>;

template <class Config>
class DecodeEpilogue : RowEpilogue {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  static constexpr bool kIsE4m3 = Config::kIsE4m3;
  static constexpr int kMmaM = Config::kMmaM, kDimSplit = Config::kDimSplit;

 public:
  // Loads the work tile from shared memory.
  __device__ __forceinline__ DecodeEpilogue(const ForwardParams& params, uint32_t shared,
                                            const DecodeCache<Config>& cache,
                                            const typename Config::Merge& merge)
      : RowEpilogue(params), shared_(shared), cache_(cache), merge_(merge) {
    load_from_smem(shared + Config::kWorkTileOffset);
  }

  __device__ __forceinline__ void store(const DecodeSoftmax<Config>& warps) const {
#pragma unroll
    for (int step = 0; step < Config::kOutputSteps; ++step) {
      if (step > 0) __syncthreads();
      store_partials(warps, step);
      __syncthreads();
      if (Config::kMerges && step == 0) merge_.wait_for_others();
      for (int r = warp_.idx; r < rows_; r += Config::kWarps) combine_warps(r, step);
    }
    if constexpr (Config::kMerges) {
      merge_.wait_for_splits();
      for (int r = warp_.idx; r < rows_; r += Config::kWarps) merge_splits(r);
    }
  }

 private:
  // The addresses of a partial row of O, and of its row maximum and sum, by key_warp().
  __device__ __forceinline__ uint32_t o_address(int key_warp, int32_t r) const {
    return shared_ + (key_warp * Config::kTileQ + r) * Config::kORowBytes;
  }
  __device__ __forceinline__ uint32_t row_stats_address(int key_warp, int32_t r) const {
    return shared_ + Config::kRowStatsOffset + (key_warp * Config::kTileQ + r) * 8;
  }

  // Stores columns [step, step + 1) kOutputColumns.
  __device__ __forceinline__ void store_partials(const DecodeSoftmax<Config>& warps,
                                                 int step) const {
    float factor = 1.0f;
    if constexpr (kIsE4m3) factor = cache_.output_factor(*this);
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int mma_m = x / 2, half = x % 2;
      float sum = warps.l_[mma_m][half];  // over the lane's columns
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if constexpr (kIsE4m3) sum *= cache_.sum_factor();
      const int32_t r = warp_.row_of(mma_m, half);
      if (r >= rows_ || (kDimSplit > 1 && warp_.dim_warp() != step)) continue;
      if (warp_.lane % 4 == 0) {
        ptx::store_shared_pair(row_stats_address(warp_.key_warp(), r),
                               {warps.m_[mma_m][half], sum});
      }
      const auto& o = warps.o_[mma_m];
      if constexpr (kIsE4m3) {  // even and odd columns, see mma_e4m3.cuh
        const uint32_t to = o_address(warp_.key_warp(), r) + warp_.lane % 4 * 16;
        const float by = sum == 0.0f ? 0.0f : factor;  // without a key O is 0, whatever the descale
#pragma unroll
        for (int n = 0; n < Config::kOutputColumns / 8; n += 2) {
          const int at = (kDimSplit > 1 ? 0 : step * Config::kOutputColumns / 8) + n;
          const float *even = &o[at][half * 2], *odd = &o[at + 1][half * 2];
          ptx::store_shared(to + n * 32, even[0] * by, odd[0] * by, even[1] * by, odd[1] * by);
        }
      } else {
        const uint32_t to = o_address(warp_.key_warp(), r) + warp_.lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < Config::kDimV / 8; ++n) {
          ptx::store_shared_pair(to + n * 32, {o[n][half * 2], o[n][half * 2 + 1]});
        }
      }
    }
  }

  // A row of O is multiplied by `factor`, or is V of the key single_kv if that is not -1.
  struct RowFactor {
    float factor;
    int32_t single_kv;
  };

  // Adds the sink to a row's maximum and sum, and stores lse.
  __device__ __forceinline__ RowFactor finish_row(int32_t r, float row_max, float sum,
                                                  bool stores_lse) const {
    const int32_t single_kv = is_fp32() ? single_key(r, sum) : -1;
    if (single_kv >= 0) sum = 1.0f;
    const float rescale = add_sink(r, row_max, sum);
    if (stores_lse) store_lse(r, row_max, sum);
    return {sum == 0.0f ? 0.0f : rescale / sum, single_kv};
  }

  // Combines the partial results of row r, of the columns of a step, in the order of the key
  // groups. One warp calls this.
  __device__ __forceinline__ void combine_warps(int32_t r, int step) const {
    constexpr int kKeyWarps = Config::kKeyWarps;
    float2 row_stats[kKeyWarps];
    float weights[kKeyWarps], row_max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeyWarps; ++w) {
      row_stats[w] = ptx::load_shared_pair(row_stats_address(w, r));
      row_max = fmaxf(row_max, row_stats[w].x);
    }
#pragma unroll
    for (int w = 0; w < kKeyWarps; ++w) {
      weights[w] = row_max == -INFINITY ? 0.0f : ptx::exp2((row_stats[w].x - row_max) * kWideUnit);
      sum += row_stats[w].y * weights[w];
    }
    RowFactor factor = {1.0f, -1};
    if constexpr (!Config::kMerges) {
      factor = finish_row(r, row_max, sum, warp_.lane == 0 && step == 0);
    } else if (step == 0) {
      merge_.send_stats(r, {row_max, sum});
    }
#pragma unroll
    for (int x = warp_.lane * 4; x - warp_.lane * 4 < Config::kOutputColumns; x += 128) {
      const int column = step * Config::kOutputColumns + x;
      if (column >= params_.problem.dim_v && !Config::kMerges) return;
      if (Config::kOutputColumns % 128 != 0 && x >= Config::kOutputColumns) return;
      float o[4] = {};
#pragma unroll
      for (int w = 0; w < kKeyWarps; ++w) {
        float part[4];
        ptx::load_shared(part, o_address(w, r) + x * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(part[e], weights[w], o[e]);
      }
      if constexpr (!Config::kMerges) {
        store_columns(r, column, o, factor);
      } else {
        merge_.send(r, column, o);
      }
    }
  }

  // Merges row r of the cluster's CTAs, in a fixed order. One warp calls this.
  __device__ __forceinline__ void merge_splits(int32_t r) const {
    const MergeLane lane = merge_.lane();
    const float2 stats = merge_.stats(lane, r);
    float row_max = stats.x;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
    }
    const float weight = row_max == -INFINITY ? 0.0f : ptx::exp2((stats.x - row_max) * kWideUnit);
    float sum = lane.vector == 0 ? stats.y * weight : 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int32_t first = merge_.first_column();
    const RowFactor factor = finish_row(r, row_max, sum, warp_.lane == 0 && first == 0);
    for (int32_t vector = lane.vector; vector < merge_.columns() / 4; vector += lane.lanes) {
      float o[4];
      merge_.sum_splits(lane, r, vector, weight, o);
      const int32_t column = first + vector * 4;
      if (lane.split == 0 && column < params_.problem.dim_v) store_columns(r, column, o, factor);
    }
  }

  __device__ __forceinline__ void store_columns(int32_t r, int32_t column, float (&o)[4],
                                                RowFactor row) const {
#pragma unroll
    for (float& element : o) element *= row.factor;
    if (row.single_kv >= 0) {
      const float4 value = load_value(row.single_kv, column);
      o[0] = value.x, o[1] = value.y, o[2] = value.z, o[3] = value.w;
    }
    store_output(r, column, o);
  }

  __device__ __forceinline__ float4 load_value(int32_t key, int column) const {
    const Operand* const from = reinterpret_cast<const Operand*>(value_of<sizeof(Operand)>(key));
    if constexpr (kIsE4m3) {
      return cache_.value(*this, key, from + column);
    } else {
      return load_vec4<true>(from + column);
    }
  }

  __device__ __forceinline__ void store_output(int32_t r, int column, const float (&o)[4]) const {
    if (is_fp32()) {
      store_vec4<true>(fp32_row(r) + column, o);
    } else if (kIsE4m3 && params_.problem.dtype_o == FLASHATTN_DTYPE_BF16) {
      store_vec4<true>(reinterpret_cast<__nv_bfloat16*>(query_row<2>(params_.args.o, r)) + column,
                       o);
    } else {
      store_vec4<true>(reinterpret_cast<T*>(query_row<2>(params_.args.o, r)) + column, o);
    }
  }

  const uint32_t shared_;
  const DecodeWarp<Config> warp_;
  const DecodeCache<Config>& cache_;
  const typename Config::Merge& merge_;
};

}  // namespace flashattn::cuda::sm80
