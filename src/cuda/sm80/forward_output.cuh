// How a block of the portable forward pass ends: O and lse of its rows, or those of a part.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/forward_config.cuh"

namespace flashattn::cuda::sm80 {

// Which rows of the block a warp has.
template <class Config>
struct WarpRows {
  int lane_, warp_row_;

  __device__ __forceinline__ explicit WarpRows(uint32_t thread)
      : lane_(thread % 32), warp_row_(thread / 32 * 16 * Config::kStrips) {}

  // Row of the block that accumulator row `half` (0: g, 1: g + 8) of a strip stands for.
  __device__ __forceinline__ int32_t row_of(int strip, int half) const {
    return warp_row_ + strip * 16 + half * 8 + lane_ / 4;
  }
};

// Where results of rows of a block go, or of a part of their keys.
struct OutputRows : BlockPlace {
  const ForwardParams& params_;

  __device__ __forceinline__ explicit OutputRows(const ForwardParams& params) : params_(params) {}

  // top, in log2 units, and sum: of the weights.
  __device__ __forceinline__ void store_lse(int32_t r, float top, float sum) const {
    if (r >= rows_) return;
    float* to = params_.args.lse;
    if (split_) {
      to = params_.partial_lse + partial_row(r);
    } else if (to) {
      const RowLayout layout = row_layout(params_.problem, params_.args.shape);
      const Row at = row(r);
      to += b_ * layout.batch_stride + (first_head_ + at.head) * layout.head_stride +
            sequence_.first_q + queries_.begin + at.query;
    }
    if (to) *to = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * kLn2;
  }

  // Whether O is fp32, and where it then goes.
  __device__ __forceinline__ bool is_fp32() const {
    return split_ || params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
  }
  __device__ __forceinline__ float* fp32_row(int32_t r) const {
    return split_ ? params_.partial_o + partial_row(r) * params_.problem.dim_v
                  : reinterpret_cast<float*>(query_row<4>(params_.args.o, r));
  }

 private:
  __device__ __forceinline__ int64_t partial_row(int32_t r) const {
    const Row at = row(r);
    return params_.partial_row(part_, b_, first_head_ + at.head, queries_.begin + at.query);
  }
};

template <class Config>
class ForwardOutput : OutputRows, WarpRows<Config> {
  using WarpRows<Config>::lane_, WarpRows<Config>::row_of;
  using T = typename Config::T;
  using Tile = typename Config::OTile;
  static constexpr int kStrips = Config::kStrips, kColumns = Config::kDimV;
  using Sums = float[kStrips][kColumns / 8][4];
  using Numbers = float[kStrips][2];  // of rows

 public:
  // shared: where the block's memory begins; its place lies there.
  __device__ __forceinline__ ForwardOutput(const ForwardParams& params, uint32_t shared)
      : OutputRows(params), WarpRows<Config>(opaque(threadIdx.x)), staged_{shared} {
    load(shared + Config::kPlace);
  }

  // o: not divided by the sums of weights l yet, of which every lane of a quad has a share; m: the
  // maxima, in log2 units. unit: of V.
  __device__ __forceinline__ void finish(Sums& o, const Numbers& m, const Numbers& l,
                                         float unit) const {
    // Of a quad's rows each lane has one to work on.
    const int own = lane_ % 4;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int x = 0; x < kStrips * 2; ++x) {
      float total = l[x / 2][x % 2];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (own == x) {
        top = m[x / 2][x % 2];
        sum = total;
      }
    }
    if (own < kStrips * 2) store_lse(row_of(own / 2, own % 2), top, sum);
    float kept = unit;
    if (Config::kModified && !split_) {
      kept *= 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
    }
    const float factor = sum == 0.0f ? 0.0f : kept / sum;
#pragma unroll
    for (int x = 0; x < kStrips * 2; ++x) {
      const float row_factor = __shfl_sync(~0u, factor, lane_ - own + x);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        o[x / 2][n][x % 2 * 2] *= row_factor;
        o[x / 2][n][x % 2 * 2 + 1] *= row_factor;
      }
    }
    if constexpr (Config::kWide) {
      store_fp32(o);
    } else if (is_fp32()) {
      store_fp32(o);
    } else {
      stage(o);
      __syncthreads();
      store_staged();
    }
  }

 private:
  __device__ __forceinline__ void store_fp32(const Sums& o) const {
#pragma unroll
    for (int x = 0; x < kStrips * 2; ++x) {
      const int32_t r = row_of(x / 2, x % 2);
      if (r >= rows_) continue;
      float* const out = fp32_row(r);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = n * 8 + lane_ % 4 * 2;
        if (column >= params_.problem.dim_v) break;
        *reinterpret_cast<float2*>(out + column) =
            make_float2(o[x / 2][n][x % 2 * 2], o[x / 2][n][x % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void stage(const Sums& o) const {
    const uint32_t first = staged_.chunk(row_of(0, 0), 0) + lane_ % 4 * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const uint32_t to = Tile::further(first, n);  // the swizzle is that of all these rows
#pragma unroll
      for (int x = 0; x < kStrips * 2; ++x) {
        ptx::store_shared(to + x * 8 * Tile::kRowBytes,
                          ptx::pack<T>(o[x / 2][n][x % 2 * 2], o[x / 2][n][x % 2 * 2 + 1]));
      }
    }
  }

  __device__ __forceinline__ void store_staged() const {
    const TileCopy<Config::kThreads, Config::kTileQ, Tile> copy(staged_);
    if (copy.chunk * 8 >= params_.problem.dim_v) return;
    const flashattn_tensor& tensor = params_.args.o;
    const int count = rows_ - copy.row;
    const auto put = [&](int n, char* row) {
      *reinterpret_cast<int4*>(row + copy.chunk * 16) = ptx::load_shared_16(copy.address(n));
    };
    if (even()) {
      char* row = query_row<2>(tensor, 0) + copy.row * row_bytes<2>(tensor);
#pragma unroll
      for (int n = 0; n < copy.kSteps; ++n, row += copy.kStep * row_bytes<2>(tensor)) {
        if (n * copy.kStep < count) put(n, row);
      }
    } else {
#pragma unroll 2
      for (int n = 0; n < copy.kSteps; ++n) {
        if (n * copy.kStep < count) put(n, query_row<2>(tensor, copy.row + n * copy.kStep));
      }
    }
  }

  const Tile staged_;  // O, where Q was
};

}  // namespace flashattn::cuda::sm80
