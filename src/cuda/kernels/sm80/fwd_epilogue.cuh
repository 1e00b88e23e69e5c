// Epilogue of a CTA of the portable forward pass: stores O and lse, or a KV split's partial O and
// sums.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/kernels/sm80/fwd_config.cuh"
#include "cuda/device/packed_pair.cuh"

namespace flashattn::cuda::sm80 {

// The rows of the work tile, and the columns of O, that a warp computes.
template <class Config>
struct WarpRows {
  int lane_, warp_row_;

  __device__ __forceinline__ explicit WarpRows(uint32_t thread)
      : lane_(thread % 32), warp_row_(thread / 32 / Config::kDimSplit * 16 * Config::kMmaM) {}

  // The warp's share of the columns: every kDimSplit-th group of 32, see gemm_rs().
  static __device__ __forceinline__ int dim_split_idx() {
    return Config::kDimSplit == 1 ? 0 : no_hoist(threadIdx.x) / 32 % Config::kDimSplit;
  }
  // The first column of accumulator n, counted from the warp's first.
  static __device__ __forceinline__ constexpr int column_of(int n) {
    return n / 4 * 32 * Config::kDimSplit + n % 4 * 8;
  }

  // The work tile's row of accumulator row g (half 0) or g + 8 (half 1).
  __device__ __forceinline__ int32_t row_of(int mma_m, int half) const {
    return warp_row_ + mma_m * 16 + half * 8 + lane_ / 4;
  }
};

// Stores results of single rows, shared by the forward and decode kernels.
struct RowEpilogue : FwdWorkTile {
  const ForwardParams& params_;

  __device__ __forceinline__ explicit RowEpilogue(const ForwardParams& params) : params_(params) {}

  // Stores lse of row r, or its partial sum if the sequence is split. row_max: in units of
  // kWideUnit log2(e). sum: relative to it.
  __device__ __forceinline__ void store_lse(int32_t r, float row_max, float sum) const {
    if (r >= rows_) return;
    const float base = row_max * (kWideUnit * kLn2);
    if (is_split_) {
      params_.partial_sums[partial_row(r)] = {base, sum};
    } else if (params_.args.lse) {
      const RowLayout layout = row_layout(params_.problem, params_.args.shape);
      const Row at = row(r);
      params_.args.lse[b_ * layout.batch_stride + (first_head_ + at.head) * layout.head_stride +
                       seqlen_.offset_q + queries_.begin + at.query] =
          lse_of(row_max, kWideUnit, sum);
    }
  }

  // Adds a row's sink to its maximum and sum. Returns the factor by which O must be rescaled.
  __device__ __forceinline__ float add_sink(int32_t r, float& row_max, float& sum) const {
    if (!(params_.problem.features & FLASHATTN_FEATURE_SINK) || (is_split_ && split_idx_ > 0) ||
        r >= rows_)
      return 1.0f;
    const float sink = params_.args.inputs.sink[first_head_ + row(r).head] * (kLog2E / kWideUnit);
    const float keys = row_max;
    row_max = fmaxf(keys, sink);
    if (row_max == -INFINITY) return 1.0f;
    const float rescale = keys == row_max ? 1.0f : ptx::exp2((keys - row_max) * kWideUnit);
    sum = sum * rescale + ptx::exp2((sink - row_max) * kWideUnit);
    return rescale;
  }

  // The only key that row r sees, whose V is exactly the row of O. -1: the row sees several keys,
  // or none, or one without a finite score. sum: of the row's weights.
  __device__ __forceinline__ int32_t single_key(int32_t r, float sum) const {
    const bool plain =
        !(params_.problem.features & FLASHATTN_FEATURE_SINK) && params_.dropout_threshold == 0;
    if (!plain || r >= rows_ || !(sum > 0.0f && sum < INFINITY)) return -1;
    const Interval keys = visible_keys(params_.problem.mask_rule(), query_of(r), seqlen_.len);
    return keys.end - keys.begin == 1 ? keys.begin : -1;
  }

  template <int kSize>
  __device__ __forceinline__ const char* value_of(int32_t key) const {
    const flashattn_tensor& v = params_.args.inputs.v;
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) {
      return v_ + key * v.stride_seq * kSize;
    }
    const PagedRowView rows = paged_rows<kSize>(params_, v, v_);
    return rows.row(rows.pages[key / rows.page_size], key);
  }

  // Whether this CTA stores O as fp32, and where a row of it lies.
  __device__ __forceinline__ bool is_fp32() const {
    return is_split_ || params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
  }
  __device__ __forceinline__ float* fp32_row(int32_t r) const {
    return is_split_ ? params_.partial_o + partial_row(r) * params_.problem.dim_v
                     : reinterpret_cast<float*>(query_row<4>(params_.args.o, r));
  }

 private:
  __device__ __forceinline__ int64_t partial_row(int32_t r) const {
    const Row at = row(r);
    return params_.partial_row(split_idx_, b_, first_head_ + at.head, queries_.begin + at.query);
  }
};

template <class Config>
class FwdEpilogue : RowEpilogue, WarpRows<Config> {
  using WarpRows<Config>::lane_, WarpRows<Config>::row_of;
  using WarpRows<Config>::column_of, WarpRows<Config>::dim_split_idx;
  using T = typename Config::T;
  using Tile = typename Config::OTile;
  static constexpr int kMmaM = Config::kMmaM, kColumns = Config::kAccColumns;
  using Accumulator = float[kMmaM][kColumns / 8][4];
  using RowStats = float[kMmaM][2];  // rows g, g + 8

 public:
  // shared: the CTA's shared memory, from which the work tile is loaded.
  __device__ __forceinline__ FwdEpilogue(const ForwardParams& params, uint32_t shared)
      : RowEpilogue(params), WarpRows<Config>(no_hoist(threadIdx.x)), o_tile_{shared} {
    load_from_smem(shared + Config::kWorkTileOffset);
  }

  // o: not divided by row sums yet. m: row maxima in units of kWideUnit log2(e). l: row sums over
  // the lane's columns. o_scale: a factor of o.
  __device__ __forceinline__ void store(Accumulator& o, const RowStats& m, const RowStats& l,
                                        float o_scale) const {
    // Each lane of a quad normalises one of the quad's rows.
    const int own = lane_ % 4;
    float row_max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      float total = l[x / 2][x % 2];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (own == x) {
        row_max = m[x / 2][x % 2];
        sum = total;
      }
    }
    float scale = o_scale;
    int32_t single_kv = -1;
    if (own < kMmaM * 2) {
      const int32_t r = row_of(own / 2, own % 2);
      if (Config::kIsFp32 || is_fp32()) single_kv = single_key(r, sum);
      if (single_kv >= 0) sum = 1.0f;
      scale *= add_sink(r, row_max, sum);
      if (dim_split_idx() == 0) store_lse(r, row_max, sum);
    }
    if (Config::ScoreMod::template kHas<Dropout> && !is_split_) {
      scale *= Dropout::keep_scale(params_.dropout_threshold);
    }
    const float factor = sum == 0.0f ? 0.0f : scale / sum;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const float row_factor = __shfl_sync(~0u, factor, lane_ - own + x);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        o[x / 2][n][x % 2 * 2] *= row_factor;
        o[x / 2][n][x % 2 * 2 + 1] *= row_factor;
      }
    }
    if (Config::kIsFp32 || is_fp32()) {
      store_fp32(o, single_kv);
    } else if constexpr (!Config::kIsFp32) {
      store_o_smem(o);
      __syncthreads();
      store_o();
    }
  }

 private:
  // single_kv: single_key() of the row that the lane normalised.
  __device__ __forceinline__ void store_fp32(const Accumulator& o, int32_t single_kv) const {
    const int first_column = dim_split_idx() * 32 + lane_ % 4 * 2;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int32_t key = __shfl_sync(~0u, single_kv, lane_ - lane_ % 4 + x);
      const int32_t r = row_of(x / 2, x % 2);
      if (r >= rows_) continue;
      float* const out = fp32_row(r);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = first_column + column_of(n);
        if (column >= params_.problem.dim_v) break;
        *reinterpret_cast<float2*>(out + column) =
            make_float2(o[x / 2][n][x % 2 * 2], o[x / 2][n][x % 2 * 2 + 1]);
      }
      if (key < 0) continue;
      const char* const value = value_of<sizeof(T)>(key);
#pragma unroll 1
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = first_column + column_of(n);
        if (column >= params_.problem.dim_v) break;
        *reinterpret_cast<float2*>(out + column) =
            PackedPair<T>::load(value + column * sizeof(T)).to_float2();
      }
    }
  }

  __device__ __forceinline__ void store_o_smem(const Accumulator& o) const {
    const uint32_t first =
        Tile::advance(o_tile_.chunk(row_of(0, 0), 0), dim_split_idx() * 4) + lane_ % 4 * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const uint32_t to =
          Tile::advance(first, column_of(n) / 8);  // rows 8 apart have the same swizzle
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) {
        ptx::store_shared(to + x * 8 * Tile::kRowBytes,
                          ptx::pack<T>(o[x / 2][n][x % 2 * 2], o[x / 2][n][x % 2 * 2 + 1]));
      }
    }
  }

  __device__ __forceinline__ void store_o() const {
    const TileCopy<Config::kThreads, Config::kTileQ, Tile> copy(o_tile_);
    if (copy.chunk * 8 >= params_.problem.dim_v) return;
    const flashattn_tensor& tensor = params_.args.o;
    const int count = rows_ - copy.row;
    const auto store_chunk = [&](int n, char* row) {
      *reinterpret_cast<int4*>(row + copy.chunk * 16) = ptx::load_shared_16(copy.address(n));
    };
    if (has_uniform_stride()) {
      char* row = query_row<2>(tensor, 0) + copy.row * row_bytes<2>(tensor);
#pragma unroll
      for (int n = 0; n < copy.kSteps; ++n, row += copy.kRowStep * row_bytes<2>(tensor)) {
        if (n * copy.kRowStep < count) store_chunk(n, row);
      }
    } else {
#pragma unroll 2
      for (int n = 0; n < copy.kSteps; ++n) {
        if (n * copy.kRowStep < count)
          store_chunk(n, query_row<2>(tensor, copy.row + n * copy.kRowStep));
      }
    }
  }

  const Tile o_tile_;  // in the buffer of Q
};

}  // namespace flashattn::cuda::sm80
