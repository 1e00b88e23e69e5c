// GEMMs of fp32 by fp16 tensor cores (3xFP16: Ootomo, Yokota: Recovering single precision accuracy
// from Tensor Cores, 2022). A value is the sum of two fp16 values,
//
//   x = hi + lo / 2048,  hi = fp16(x),  lo = fp16((x - hi) 2048),
//
// and three of the four products are computed, scaled by 2048: a_lo b_hi + a_hi b_lo + (2048 a_hi)
// b_hi. fp16 has as many significant bits as tf32 and twice its throughput. Lost are the fourth
// product and the rounding of lo: at most 2^-24 to 2^-22 of a product, and random like fp32's own
// rounding. Tensor cores truncate sums where fp32 rounds, so only 16 terms, preceded by their
// corrections, are summed there, the rest by FADD.
//
// fp16 overflows at 2^16 and underflows below 2^-24; hi and lo together reach 2^-36. So tensors are
// scaled by powers of two first: Q's maximum over the CTA's rows to 2^3, since 2048 a_hi must fit,
// and the maxima of K and V over their first tile that is not zero to 2^9. Values are then as exact
// as in fp32 down to 2^-21 of that maximum (Q: 2^-15) and vanish at 2^-45 (Q: 2^-39), an error that
// is small next to the largest value. A later tile overflows if it has values above 2^6 times the
// maximum of the first: the CTA detects this and repeats its work with a smaller scale.
//
// P is at most 1, and values below 2^-36 vanish, which is negligible next to the largest of the
// row. Where dropout may drop that one, or a sink may have it, fp32 uses 3xTF32, which loses none.
//
// A tile is split in place, once for all warps of the CTA. Of every 64 values of a row, hi goes to
// the first 128 bytes and lo to the next 128, swizzled as in any tile. Both are read as tiles of
// 16-bit elements.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// The split of two values, the first in the low half of each word.
struct Fp16Pair {
  uint32_t hi, lo;

  static constexpr float kLoScale = 2048.0f;

  // Splits x * factor and y * factor; factor is a power of two. lo is NaN if x is infinite, and
  // infinite exactly if a finite x * factor overflows fp16.
  static __device__ __forceinline__ Fp16Pair of(float x, float y, float factor) {
    const uint32_t hi = ptx::pack<__half>(x * factor, y * factor);
    const float2 rounded = ptx::unpack<__half>(hi);
    return {hi, ptx::pack<__half>(fmaf(x, factor, -rounded.x) * kLoScale,
                                  fmaf(y, factor, -rounded.y) * kLoScale)};
  }
};

// A tile of fp32 after its split, read as 16-bit elements.
template <class Tile>
using SplitTile = SmemTile<Tile::kHeight, Tile::kRowBytes / 2>;

// The chunk of hi of columns [16 k, 16 k + 16); lo is kLoOffset bytes behind it.
__device__ constexpr int hi_chunk(int k) { return k / 4 * 16 + k % 4 * 2; }
constexpr uint32_t kLoOffset = 128;

// Splits a tile in place. A thread splits the chunks that TileCopy assigns to it, so that it waits
// for its own cp.async only. Lanes write chunks that other lanes of the warp read.
template <int kThreads, class Tile>
struct TileSplit : TileCopy<kThreads, Tile::kHeight, Tile> {
  using Copy = TileCopy<kThreads, Tile::kHeight, Tile>;
  using Copy::chunk, Copy::row, Copy::kRowStep, Copy::kSteps;
  static_assert(Tile::kSize == 4 && Tile::kChunks % 16 == 0, "64 values are split at once");
  static_assert(Copy::kThreadsPerRow == Tile::kChunks, "every lane has a chunk");

  uint32_t split_to;  // address of hi in the thread's first row

  __device__ __forceinline__ explicit TileSplit(Tile tile)
      : Copy(tile), split_to(tile.chunk(row, chunk / 16 * 16 + chunk % 16 / 2) + chunk % 2 * 8) {}

  // The bits of the largest finite magnitude of the thread's values.
  __device__ __forceinline__ int32_t max_bits() const {
    int32_t top = 0;
#pragma unroll 1
    for (int n = 0; n < kSteps; ++n) {
      const int4 words = ptx::load_shared_16(this->address(n));
      for (const int32_t word : {words.x, words.y, words.z, words.w}) {
        const int32_t magnitude = word & 0x7fffffff;
        if (magnitude < 0x7f800000) top = max(top, magnitude);
      }
    }
    return top;
  }

  // Splits the thread's chunks. Returns whether a value times factor overflows fp16.
  __device__ __forceinline__ bool split(float factor) const {
    constexpr int kAtOnce = kSteps % 4 == 0 ? 4 : 2;
    uint32_t top = 0;
#pragma unroll(kSteps / kAtOnce <= 2 ? 2 : 1)
    for (int first = 0; first < kSteps; first += kAtOnce) {
      int4 words[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) words[n] = ptx::load_shared_16(this->address(first + n));
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int step = (first + n) * kRowStep;
        const auto number = [](int32_t x) { return __uint_as_float(static_cast<uint32_t>(x)); };
        const Fp16Pair a = Fp16Pair::of(number(words[n].x), number(words[n].y), factor);
        const Fp16Pair b = Fp16Pair::of(number(words[n].z), number(words[n].w), factor);
        const uint32_t to = (split_to ^ (step & 7) << 4) + step * Tile::kRowBytes;
        ptx::store_shared_8(to, a.hi, b.hi);
        ptx::store_shared_8(to + kLoOffset, a.lo, b.lo);
        top = ptx::max_abs_f16x2(top, ptx::max_abs_f16x2(a.lo, b.lo));
      }
    }
    return (top & 0xffff) == 0x7c00 || top >> 16 == 0x7c00;
  }
};

// The A operand of 16 x 16.
struct Fp16PairA {
  uint32_t hi[4], lo[4], scaled_hi[4];  // scaled_hi: 2048 hi

  __device__ __forceinline__ void scale_hi() {
#pragma unroll
    for (int x = 0; x < 4; ++x) scaled_hi[x] = ptx::mul_f16x2(hi[x], 0x68006800u);
  }
};

// d += 2048 a b.
__device__ __forceinline__ void mma_3xfp16(float (&d)[4], const Fp16PairA& a, uint32_t hi0,
                                           uint32_t hi1, uint32_t lo0, uint32_t lo1) {
  float sum[4] = {};
  ptx::mma_16x8x16<__half>(sum, a.lo, hi0, hi1);
  ptx::mma_16x8x16<__half>(sum, a.hi, lo0, lo1);
  ptx::mma_16x8x16<__half>(sum, a.scaled_hi, hi0, hi1);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}

// d += 2048 A B^T, otherwise as gemm_nt() of mma_gemm.cuh.
template <class T, int kDim, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<std::is_same<T, Fp16Pair>::value> gemm_nt(
    float (&d)[kMmaM][kMmaN][4], uint32_t a_address, uint32_t b_address) {
  using Tile = SmemTile<16, 2 * kDim>;
  // Not unrolled further: earlier loads would need more registers than there are.
#pragma unroll(kMmaM == 1 ? 4 : 1)
  for (int k = 0; k < kDim / 16; ++k) {
    Fp16PairA a[kMmaM];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      const uint32_t from = Tile::advance(a_address, hi_chunk(k)) + mma_m * Tile::kBytes;
      ptx::ldmatrix_x4(a[mma_m].hi, from);
      ptx::ldmatrix_x4(a[mma_m].lo, from + kLoOffset);
      a[mma_m].scale_hi();
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      uint32_t hi[4], lo[4];
      const uint32_t from = Tile::advance(b_address, hi_chunk(k)) + n * Tile::kBytes;
      ptx::ldmatrix_x4(hi, from);
      ptx::ldmatrix_x4(lo, from + kLoOffset);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        mma_3xfp16(d[mma_m][2 * n], a[mma_m], hi[0], hi[1], lo[0], lo[1]);
        mma_3xfp16(d[mma_m][2 * n + 1], a[mma_m], hi[2], hi[3], lo[2], lo[3]);
      }
    }
  }
}

// Converts P, at most 1, to the A operand.
template <class T, int kMmaN>
__device__ __forceinline__ std::enable_if_t<std::is_same<T, Fp16Pair>::value, Fp16Pair> acc_as_a(
    const float (&x)[kMmaN][4], int k, int word) {
  const float* pair = &x[2 * k + word / 2][word % 2 * 2];
  return Fp16Pair::of(pair[0], pair[1], 1.0f);
}

// d += 2048 A B with A in registers, otherwise as gemm_rs() of mma_gemm.cuh. A large d is computed
// in subtiles separated by real branches: otherwise the compiler starts so many HMMAs at once that
// their sums do not fit the registers.
template <class T, int kSteps, int kMmaM, int kMmaN, class AWord>
__device__ __forceinline__ std::enable_if_t<std::is_same<T, Fp16Pair>::value> gemm_rs(
    float (&d)[kMmaM][kMmaN][4], uint32_t b_address, AWord a_word) {
  using Tile = SmemTile<16, 2 * kMmaN * 8>;
  constexpr int kSubtileN = kMmaM * kMmaN > 16 ? 8 / kMmaM : kMmaN;
  constexpr int kSubtiles = kMmaN / kSubtileN;
  Fp16Pair words[kSteps][kMmaM][4];
#pragma unroll
  for (int x = 0; x < kSteps * kMmaM * 4; ++x) {
    words[x / 4 / kMmaM][x / 4 % kMmaM][x % 4] = a_word(x / 4 % kMmaM, x / 4 / kMmaM, x % 4);
  }
#pragma unroll 1
  for (int k = 0; k < kSteps; ++k, b_address += Tile::kBytes) {
    Fp16PairA a[kMmaM];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        a[mma_m].hi[x] = words[0][mma_m][x].hi;
        a[mma_m].lo[x] = words[0][mma_m][x].lo;
      }
      a[mma_m].scale_hi();
    }
#pragma unroll 1
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
#pragma unroll
      for (int unrolled = 0; unrolled < kSubtiles; ++unrolled) {
        if (subtile != unrolled) continue;
#pragma unroll
        for (int n = unrolled * kSubtileN / 2; n < (unrolled + 1) * kSubtileN / 2; ++n) {
          uint32_t hi[4], lo[4];
          const uint32_t from = Tile::advance(b_address, hi_chunk(n));
          ptx::ldmatrix_x4_trans(hi, from);
          ptx::ldmatrix_x4_trans(lo, from + kLoOffset);
#pragma unroll
          for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
            mma_3xfp16(d[mma_m][2 * n], a[mma_m], hi[0], hi[1], lo[0], lo[1]);
            mma_3xfp16(d[mma_m][2 * n + 1], a[mma_m], hi[2], hi[3], lo[2], lo[3]);
          }
        }
      }
    }
#pragma unroll
    for (int x = 0; x < (kSteps - 1) * kMmaM * 4; ++x) {
      const int step = x / 4 / kMmaM, mma_m = x / 4 % kMmaM;
      words[step][mma_m][x % 4] = words[step + 1][mma_m][x % 4];
    }
  }
}

}  // namespace flashattn::cuda
