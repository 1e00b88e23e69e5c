// GEMMs of fp32 by tensor cores (3xTF32: Ootomo, Yokota: Recovering single precision accuracy from
// Tensor Cores, 2022), with the functions of mma_gemm.cuh. A value is the sum of two tf32 values,
// and three of the four products are computed. Used where fp16 (mma_3xfp16.cuh) lacks exponent
// range: in the backward pass, whose gradients may be small, and in the forward pass with modified
// scores. Tensor cores truncate sums where fp32 rounds, so only 16 terms are summed there, the rest
// by FADD.
//
// Budget: 16 x 8 x 16 are 6 HMMA, 38 cycles of one of Hopper's four tensor cores (mma.sync reaches
// 62 % of their rate; 48 cycles on Ampere): at most 99 TF/s on an H200. Beside them a scheduler
// issues 4 FADD and, once for all kMmaM, 12 instructions that split B; with kMmaM = 2 that is 3.6
// to 3.9 issue slots an HMMA in all, as compiled, of the 6.4 that it takes. Shared memory delivers
// B, 512 bytes, once for all kMmaM: 27 of its 128 bytes a cycle, 40 with A in a GEMM with N = 64.
// So tensor cores bound everything. They stall on the latency of the chain of 6 HMMA, which 8
// interleaved chains and a second warp hide.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

struct Tf32Pair {
  uint32_t hi, lo;
};

// Tensor cores ignore the 13 lowest bits. hi is x rounded to the other bits; lo = x - hi, at most
// 12 bits. An infinity becomes NaN.
__device__ __forceinline__ Tf32Pair split_tf32(uint32_t x) {
  const uint32_t hi = (x + 0x1000u) & 0xffffe000u;
  return {hi, __float_as_uint(__uint_as_float(x) - __uint_as_float(hi))};
}

// The A operand of 16 x 16: two k8 steps of mma_16x8x8_tf32.
struct Tf32PairA {
  uint32_t hi[2][4], lo[2][4];

  __device__ __forceinline__ void set(int step, int word, Tf32Pair pair) {
    hi[step][word] = pair.hi;
    lo[step][word] = pair.lo;
  }
};

// d += a b; b is [k8 step][register].
__device__ __forceinline__ void mma_3xtf32(float (&d)[4], const Tf32PairA& a,
                                           const Tf32Pair (&b)[2][2]) {
  float sum[4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    ptx::mma_16x8x8_tf32(sum, a.lo[k], b[k][0].hi, b[k][1].hi);
    ptx::mma_16x8x8_tf32(sum, a.hi[k], b[k][0].lo, b[k][1].lo);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) ptx::mma_16x8x8_tf32(sum, a.hi[k], b[k][0].hi, b[k][1].hi);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}

// Loads and splits 16 columns of A. at(mma_m, step): the lane's address of a k8 step.
template <int kMmaM, class At>
__device__ __forceinline__ void load_a_3xtf32(Tf32PairA (&a)[kMmaM], At at) {
#pragma unroll
  for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, at(mma_m, step));
#pragma unroll
      for (int x = 0; x < 4; ++x) a[mma_m].set(step, x, split_tf32(words[x]));
    }
  }
}

// ldmatrix moves 8 x 8 elements of 16 bits, which are 8 x 4 of fp32, and each lane receives the
// element that mma_16x8x8_tf32 needs. So addresses are as for 16-bit elements.
template <class T, int kDim, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4> gemm_nt(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t a_address,
                                                                    uint32_t b_address) {
  using Tile = SmemTile<16, kDim, 4>;
  // Not unrolled further: earlier loads would need more registers than there are.
#pragma unroll 2
  for (int k = 0; k < kDim / 16; ++k) {
    Tf32PairA a[kMmaM];
    load_a_3xtf32(a, [&](int mma_m, int step) {
      return Tile::advance(a_address, 4 * k + 2 * step) + mma_m * Tile::kBytes;
    });
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      Tf32Pair b[2][2][2];  // [8 columns][k8 step][register]
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, Tile::advance(b_address, 4 * k + 2 * step) + n * Tile::kBytes);
#pragma unroll
        for (int x = 0; x < 4; ++x) b[x / 2][step][x % 2] = split_tf32(words[x]);
      }
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        mma_3xtf32(d[mma_m][2 * n], a[mma_m], b[0]);
        mma_3xtf32(d[mma_m][2 * n + 1], a[mma_m], b[1]);
      }
    }
  }
}

// A lane holds columns 2c and 2c + 1 of accumulators, and terms c and c + 4 of the A operand. Both
// operands therefore order the terms of a k8 step so, here and in b_mn_major(). k counts k8 steps.
template <class T, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4, uint32_t> acc_as_a(
    const float (&x)[kMmaN][4], int k, int word) {
  return __float_as_uint(x[k][word % 2 * 2 + word / 2]);
}

template <class T, int kPairs>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4, uint32_t> acc_as_a(
    const PackedPair<T> (&x)[kPairs][2], int k, int word) {
  const float2 pair = x[k][word % 2].to_float2();
  return __float_as_uint(word / 2 == 0 ? pair.x : pair.y);
}

// The lane's address of element (2 c, g) of a k8 step of B, MN-major; element (2 c + 1, g) is a row
// further. Both belong to terms c and c + 4 of the instruction, as in acc_as_a().
template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize == 4, uint32_t> b_mn_major(Tile tile,
                                                                                   int row,
                                                                                   int lane) {
  return tile.chunk(row + lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
}

// Loads and splits rows [16 k, 16 k + 16) of B, 8 columns; `from` from b_mn_major().
template <class Tile>
__device__ __forceinline__ void load_b_mn_major(Tf32Pair (&b)[2][2], uint32_t from, int k) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t rows = (2 * k + step) * 8 * Tile::kRowBytes;
    b[step][0] = split_tf32(ptx::load_shared(from + rows));
    b[step][1] = split_tf32(ptx::load_shared((from ^ 16) + rows + Tile::kRowBytes));
  }
}

// kDim: columns of B's tile, as for 16-bit elements.
template <class T, int kSteps, int kDim = 0, int kMmaM, int kMmaN, class AWord>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4> gemm_rs(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t b_address,
                                                                    AWord a_word) {
  using Tile = SmemTile<16, kDim == 0 ? kMmaN * 8 : kDim, 4>;
  constexpr int kColumnStride = Tile::kChunks / (kMmaN * 2);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Tf32PairA a[kMmaM];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int x = 0; x < 4; ++x)
          a[mma_m].set(step, x, split_tf32(a_word(mma_m, 2 * k + step, x)));
      }
    }
#pragma unroll
    for (int n = 0; n < kMmaN; ++n) {
      Tf32Pair b[2][2];
      const int step = n / 4 * 8 * kColumnStride + n % 4 * 2;
      load_b_mn_major<Tile>(b, Tile::advance(b_address, step), k);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) mma_3xtf32(d[mma_m][n], a[mma_m], b);
    }
  }
}

template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize == 4, uint32_t> a_mn_major(Tile tile,
                                                                                   int column,
                                                                                   int lane) {
  return Tile::advance(b_mn_major(tile, 0, lane), column / 4);
}

template <class T, class TileA, class TileB, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 4> gemm_tn(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t a_address,
                                                                    uint32_t b_address,
                                                                    int column) {
  // Not unrolled: the kernel should fit the instruction cache.
#pragma unroll 1
  for (int k = 0; k < TileB::kHeight / 16; ++k) {
    Tf32PairA a[kMmaM];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Tf32Pair words[2][2];
        load_b_mn_major<TileA>(words, TileA::advance(a_address, 4 * mma_m + 2 * half), k);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          a[mma_m].set(step, half, words[step][0]);
          a[mma_m].set(step, 2 + half, words[step][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kMmaN; ++n) {
      Tf32Pair b[2][2];
      load_b_mn_major<TileB>(b, TileB::advance(b_address, column / 4 + 2 * n), k);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) mma_3xtf32(d[mma_m][n], a[mma_m], b);
    }
  }
}

}  // namespace flashattn::cuda
