// GEMMs of a warp by mma.sync: D (16 kMmaM x 8 kMmaN) += A B. A and B are tiles in shared memory,
// or A lies in registers. This file is for 16-bit elements; mma_e4m3.cuh and mma_3xtf32.cuh have
// functions of the same names for B in E4M3 and for fp32. "K-major": the rows of the tile run along
// the summed index; "MN-major": across it. Accumulators are [kMmaM][kMmaN][4], in the layout of
// ptx::mma_16x8x16.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/mma_3xtf32.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// The lane's ldmatrix address of A, K-major, whose rows [row, row + 16) are rows of D.
template <class Tile>
__device__ __forceinline__ uint32_t a_k_major(Tile tile, int row, int lane) {
  return tile.chunk(row + lane % 16, lane / 16);
}

// The lane's ldmatrix address of B, K-major, whose rows [row, row + 16) are columns of D: two n8
// operands, each with both halves of k16.
template <class Tile>
__device__ __forceinline__ uint32_t b_k_major(Tile tile, int row, int lane) {
  return tile.chunk(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The lane's ldmatrix address of B, MN-major: rows [row, row + 16) are a k16 step.
template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize <= 2, uint32_t> b_mn_major(Tile tile,
                                                                                   int row,
                                                                                   int lane) {
  return tile.chunk(row + lane % 16, lane / 16);
}

// d += A B^T over kDim columns; a_address from a_k_major(), b_address from b_k_major().
template <class T, int kDim, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> gemm_nt(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t a_address,
                                                                    uint32_t b_address) {
  using Tile = SmemTile<16, kDim>;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kMmaM][4];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      ptx::ldmatrix_x4(a[mma_m], Tile::advance(a_address, 2 * k) + mma_m * Tile::kBytes);
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, Tile::advance(b_address, 2 * k) + n * Tile::kBytes);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ptx::mma_16x8x16<T>(d[mma_m][2 * n], a[mma_m], b[0], b[1]);
        ptx::mma_16x8x16<T>(d[mma_m][2 * n + 1], a[mma_m], b[2], b[3]);
      }
    }
  }
}

// Converts accumulators to the A operand of a GEMM that sums over their columns: register `word` of
// columns [16 k, 16 k + 16), or [8 k, 8 k + 8) for fp32.
template <class T, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2, uint32_t> acc_as_a(
    const float (&x)[kMmaN][4], int k, int word) {
  const float* pair = &x[2 * k + word / 2][word % 2 * 2];
  return ptx::pack<T>(pair[0], pair[1]);
}

// acc_as_a() of packed pairs of columns, [8 columns][row g, row g + 8].
template <class T, int kPairs>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2, uint32_t> acc_as_a(
    const PackedPair<T> (&x)[kPairs][2], int k, int word) {
  return x[2 * k + word / 2][word % 2].word;
}

// d += A B with A in registers: a_word(mma_m, k, x) returns register x of A, as acc_as_a() does.
// Sums over 16 kSteps rows of B; b_address from b_mn_major(). kDim: columns of B's tile; 0: as many
// as d has. If the tile is n times as wide, d holds every n-th range of 32 columns: the swizzle
// exchanges chunks within such a range only.
template <class T, int kSteps, int kDim = 0, int kMmaM, int kMmaN, class AWord>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> gemm_rs(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t b_address,
                                                                    AWord a_word) {
  using Tile = SmemTile<16, kDim == 0 ? kMmaN * 8 : kDim>;
  constexpr int kColumnStride = Tile::kChunks / kMmaN;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kMmaM][4];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int x = 0; x < 4; ++x) a[mma_m][x] = a_word(mma_m, k, x);
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      uint32_t b[4];
      const int step = n / 2 * 4 * kColumnStride + n % 2 * 2;
      ptx::ldmatrix_x4_trans(b, Tile::advance(b_address, step) + k * Tile::kBytes);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ptx::mma_16x8x16<T>(d[mma_m][2 * n], a[mma_m], b[0], b[1]);
        ptx::mma_16x8x16<T>(d[mma_m][2 * n + 1], a[mma_m], b[2], b[3]);
      }
    }
  }
}

// The lane's ldmatrix address of A, MN-major: rows are summed over, and columns from `column` on
// are rows of D.
template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize == 2, uint32_t> a_mn_major(Tile tile,
                                                                                   int column,
                                                                                   int lane) {
  return Tile::advance(tile.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2), column / 8);
}

// d += A^T B; a_address from a_mn_major(), b_address from b_mn_major(). B's columns from `column`
// on, a multiple of the number of columns of d.
template <class T, class TileA, class TileB, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> gemm_tn(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t a_address,
                                                                    uint32_t b_address,
                                                                    int column) {
  // If `column` is a multiple of a power of two, the steps are compile-time constants.
  constexpr bool kEven = (kMmaN & (kMmaN - 1)) == 0;
  if constexpr (kEven) b_address = TileB::advance(b_address, column / 8);
  const int first = kEven ? 0 : column / 8;
#pragma unroll
  for (int k = 0; k < TileB::kHeight / 16; ++k) {
    uint32_t a[kMmaM][4];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      ptx::ldmatrix_x4_trans(a[mma_m],
                             TileA::advance(a_address, 2 * mma_m) + k * 16 * TileA::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b,
                             TileB::advance(b_address, first + 2 * n) + k * 16 * TileB::kRowBytes);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ptx::mma_16x8x16<T>(d[mma_m][2 * n], a[mma_m], b[0], b[1]);
        ptx::mma_16x8x16<T>(d[mma_m][2 * n + 1], a[mma_m], b[2], b[3]);
      }
    }
  }
}

}  // namespace flashattn::cuda
