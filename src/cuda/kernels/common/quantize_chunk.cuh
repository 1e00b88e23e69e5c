// Transforms rows of 16 bits on tensor cores, for quantize_stream_kernel.
#pragma once

#include "cuda/kernels/common/quantize_ring.cuh"

namespace flashattn::cuda {

// A warp transforms its part of a chunk: kChunk segments of 512 bytes, a row of each lane in each,
// or 8 tiles of 32 neighbouring columns of a row. The Hadamard matrix of n is that of n / 32 times
// that of 32 (Kronecker). The smaller one multiplies tiles on tensor cores: products with its
// elements are exact, sums are fp32. A mma multiplies 8 tiles, the columns of its operand b: 16
// bytes of a row are elements of b that one lane has. A thread receives elements of all tiles of a
// segment, so that the larger matrix adds numbers of one thread. Without ROTATE the matrix is 1.
template <class T>
class ChunkTransform {
 public:
  static constexpr int kTiles = 8;         // of a segment
  static constexpr int kTileColumns = 32;  // at least 32 columns are rotated together
  static constexpr int kLaneColumns = 4;   // of a tile
  // Columns 4 * (lane / 4) to 4 * (lane / 4) + 3 of the tiles of segment lane % 4.
  using Tiles = float[kTiles][kLaneColumns];

  __device__ __forceinline__ explicit ChunkTransform(const QuantizeParams& params)
      : columns_(kVector << params.operands[1].log2_lanes) {
    if (params.args.transform & FLASHATTN_TRANSFORM_ROTATE) {
      log2_size_ = __ffs(params.problem.dim_qk) - 1;
    }
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
    const uint32_t one =
        std::is_same_v<T, __half> ? (15u - log2_scale()) << 10 : (127u - log2_scale()) << 7;
    // Operand a of tile half t and k-step s: its rows g and g + 8 are columns 4 g + 2 t and the
    // next of the result; a word has columns 8 c + 4 s + 2 p and the next of the matrix.
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const int t = n / 8, s = n / 4 % 2, p = n / 2 % 2, h = n % 2;
      uint32_t word;
      if (rotates()) {
        const uint32_t sign = (__popc(g & (2 * c + s)) + t * p) & 1 ? 0x8000u : 0u;
        word = (one | sign) * 0x10001u ^ (h ? 0x80000000u : 0u);
      } else {
        word = t == p && g == 2 * c + s ? one << 16 * h : 0;
      }
      asm volatile("" : "+r"(word));  // so that the compiler keeps registers for all of them
      matrix_[t][s][n % 4] = word;
    }
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      if (!rotates()) continue;
      const uint32_t signs = rotation_signs(
          params.args, ((2 * j + g % 2) * kTileColumns + c * kVector) & (columns_ - 1));
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        signs_ |= (signs >> n & 1) << (15 - (j * 4 + n / 2) + n % 2 * 16);
      }
    }
  }

  // The factor that transformed numbers lack.
  __device__ __forceinline__ float rest() const { return log2_size_ % 2 ? 0.70710678f : 1.0f; }

  // Tiles times the matrix of kTileColumns; kMean: minus the mean in `table` times it. Begins
  // and ends with a barrier of the warp, whose lanes read slots of each other.
  template <bool kMean>
  __device__ __forceinline__ void multiply(const Ring<T>& slots, uint32_t table, Tiles& y) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t from = slots.warp_chunk() + lane / 8 * 512 + lane % 8 * 16;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      const int4 words = ptx::load_shared_16(from + j * 128);
      uint32_t b[] = {static_cast<uint32_t>(words.x), static_cast<uint32_t>(words.y),
                      static_cast<uint32_t>(words.z), static_cast<uint32_t>(words.w)};
#pragma unroll
      for (int n = 0; n < 4; ++n) b[n] ^= signs_ << (j * 4 + n) & 0x80008000u;
      float d[2][4] = {};
      if constexpr (kMean) {
        load_mean(table, j, 0, d[0]);
        load_mean(table, j, 1, d[1]);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          ptx::mma_16x8x16<T>(d[t], matrix_[t][s], b[2 * s], b[2 * s + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) y[2 * j + i][n] = d[n / 2][n % 2 * 2 + i];
      }
    }
    __syncwarp();
  }

  // The largest finite magnitude of transformed rows.
  __device__ __forceinline__ float largest(Tiles& y) const {
    float most = 0;
    with_log2_tiles([&](auto log2_tiles) {
      constexpr int kLog2Tiles = decltype(log2_tiles)::value;
      finish_pairs<kLog2Tiles>(y);
      // The larger magnitude of a + b and a - b is |a| + |b|.
      constexpr int kStep = kLog2Tiles > 0 ? 2 : 1;
      const auto magnitude = [&](int tile, int n) {
        return fabsf(y[tile][n]) + (kStep > 1 ? fabsf(y[tile + 1][n]) : 0.0f);
      };
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += kStep) {
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) most = fmaxf(most, magnitude(tile, n));
      }
      if (most <= FLT_MAX) return;  // NaN is passed over
      most = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += kStep) {
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) {
          const float each = magnitude(tile, n);
          if (each <= FLT_MAX) most = fmaxf(most, each);
        }
      }
    });
    return most;
  }

  // Minus the mean times the matrix of kTileColumns, for multiply() and mean_product(): by one
  // warp. A lane has columns lane * kVector and on.
  __device__ __forceinline__ void store_mean(const QuantizeArgs& args, float (&mean)[kVector],
                                             uint32_t table) const {
    const int32_t column = static_cast<int32_t>(threadIdx.x) % 32 * kVector;
    const uint32_t signs = rotates() ? rotation_signs(args, column) : 0;
    const float scale = __int_as_float((127 - log2_scale()) << 23);
#pragma unroll
    for (int n = 0; n < kVector; ++n) mean[n] *= signs >> n & 1 ? scale : -scale;
    if (rotates()) {
      hadamard<true>(mean, kVector);
      hadamard_lanes(mean, 1);
      hadamard_lanes(mean, 2);
    }
    if (column >= columns_) return;
    const int32_t tile = column / kTileColumns;
#pragma unroll
    for (int n = 0; n < kVector; ++n) {
      const uint32_t to = mean_at(table, tile / 2, n / 2 % 2, (column % kTileColumns + n) / 4);
      ptx::store_shared(to + (n % 2 * 2 + tile % 2) * 4, __float_as_uint(mean[n]));
      if (columns_ > kTileColumns) continue;
      ptx::store_shared(to + (n % 2 * 2 + 1) * 4, __float_as_uint(mean[n]));
    }
  }

  // The dot product with the mean of k of the row that has tile lane / 4 of segment lane % 4. y: as
  // multiply() made it.
  __device__ __forceinline__ float mean_product(uint32_t table, const Tiles& y) const {
    const uint32_t g = threadIdx.x % 32 / 4;
    float sum[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      float mean[2][4];
      load_mean(table, j, 0, mean[0]);
      load_mean(table, j, 1, mean[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[2 * j + i] = 0;
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) {
          sum[2 * j + i] = fmaf(y[2 * j + i][n], mean[n / 2][n % 2 * 2 + i], sum[2 * j + i]);
        }
      }
    }
    // Each lane gets the sums of one tile and adds those of the other lanes.
#pragma unroll
    for (int step = kTiles / 2; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < step; ++n) {
        const bool upper = g & step;
        const float own = upper ? sum[n + step] : sum[n], other = upper ? sum[n] : sum[n + step];
        sum[n] = own + __shfl_xor_sync(~0u, other, step * 4);
      }
    }
    for (int32_t step = 1; step * kTileColumns < columns_; step *= 2) {
      sum[0] += __shfl_xor_sync(~0u, sum[0], step * 4);
    }
    return rotates()
               ? sum[0] * __int_as_float((127 + 2 * log2_scale()) << 23) * (-1.0f / kTileColumns)
               : -sum[0];
  }

  // The thread, of those of the warp, whose rows have tile lane / 4 of each segment.
  static __device__ __forceinline__ uint32_t thread_of_tile() {
    return threadIdx.x - threadIdx.x % 4;
  }

  // Sets tiles to 0 that are no row's. has: tile lane / 4 of segment lane % 4 is one's.
  static __device__ __forceinline__ void clear_absent(bool has, Tiles& y) {
    const uint32_t all = __ballot_sync(~0u, has);
    if (all == ~0u) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (all >> (tile * 4 + threadIdx.x % 4) & 1) continue;
#pragma unroll
      for (float& each : y[tile]) each = 0;
    }
  }

  // Writes transformed rows times `factor`, as E4M3, in place of those that multiply() read. load()
  // returns them.
  __device__ __forceinline__ void store(const Ring<T>& slots, float factor, Tiles& y) const {
    const uint32_t lane = threadIdx.x % 32, c = lane % 4;
    const uint32_t to = slots.warp_chunk() + c * 512 + lane / 4 * 4;
    // Tiles of a warp's segments lie in different banks.
    const auto write = [&](int tile, const float (&x)[kLaneColumns]) {
      ptx::store_shared(to + tile / 4 * 128 + ((tile % 4 ^ c) * 32),
                        to_e4m3(x[0], x[1], x[2], x[3]));
    };
    with_log2_tiles([&](auto log2_tiles) {
      constexpr int kLog2Tiles = decltype(log2_tiles)::value;
      finish_pairs<kLog2Tiles>(y);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        float first[kLaneColumns], second[kLaneColumns];
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) {
          const float a = y[tile][n] * factor, b = y[tile + 1][n];
          first[n] = kLog2Tiles > 0 ? fmaf(b, factor, a) : a;
          second[n] = kLog2Tiles > 0 ? fmaf(-b, factor, a) : b * factor;
        }
        write(tile, first);
        write(tile + 1, second);
      }
    });
    __syncwarp();
  }

  // The columns of this lane in its row of a segment.
  static __device__ __forceinline__ uint2 load(const Ring<T>& slots, uint32_t segment) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t both = ptx::load_shared_8(slots.warp_chunk() + segment * 512 + lane / 16 * 128 +
                                             ((lane / 4 % 4 ^ segment) * 32) + lane % 4 * 8);
    return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
  }

 private:
  __device__ __forceinline__ bool rotates() const { return log2_size_ > 0; }
  // The matrix of kTileColumns is that of +-1 times 2^-log2_scale().
  __device__ __forceinline__ int32_t log2_scale() const { return log2_size_ / 2; }

  // Calls use() with a constant, the log2 of the tiles that are rotated together.
  template <class Use>
  __device__ __forceinline__ void with_log2_tiles(Use use) const {
    switch (log2_size_) {
      case 8: return use(std::integral_constant<int, 3>());
      case 7: return use(std::integral_constant<int, 2>());
      case 6: return use(std::integral_constant<int, 1>());
      default: return use(std::integral_constant<int, 0>());
    }
  }

  // The matrix of 2^kLog2Tiles but for the sums and differences of neighbouring tiles, which those
  // that follow make.
  template <int kLog2Tiles>
  static __device__ __forceinline__ void finish_pairs(Tiles& y) {
#pragma unroll
    for (int step = 2; step < 1 << kLog2Tiles; step *= 2) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile & step) continue;
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) {
          const float a = y[tile][n], b = y[tile + step][n];
          y[tile][n] = a + b;
          y[tile + step][n] = a - b;
        }
      }
    }
  }

  // Where a table of the mean has the start of d[t] of pair j of tiles, in lanes 4 g and on.
  static __device__ __forceinline__ uint32_t mean_at(uint32_t table, int j, int t, int g) {
    return table + ((j * 2 + t) * 8 + g) * 16;
  }
  __device__ __forceinline__ void load_mean(uint32_t table, int j, int t, float (&d)[4]) const {
    const int32_t pairs = columns_ / (2 * kTileColumns);
    ptx::load_shared(d, mean_at(table, pairs > 1 ? j & (pairs - 1) : 0, t, threadIdx.x % 32 / 4));
  }

  const int32_t columns_;  // of a row's lanes
  int32_t log2_size_ = 0;  // of the matrix; 0: no rotation
  uint32_t matrix_[2][2][4];
  // Signs of elements of operand b: bits 15 - n and 31 - n negate those of word n.
  uint32_t signs_ = 0;
};

}  // namespace flashattn::cuda
