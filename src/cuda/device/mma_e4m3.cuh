// GEMMs of a warp by mma.sync whose B is a tile of E4M3 in shared memory and whose A is fp16. B is
// converted in registers, exactly. ldmatrix moves elements in pairs, which decides the order:
//
// K-major: a lane has four neighbours of a row, which are pairs 2c and 2c + 1 of a k16 step. A has
// its pairs of columns in that order (pair_columns()).
// MN-major: a lane has two neighbours of each of two rows. Columns [16 n, 16 n + 16) of B are in
// accumulators 2 n, the even ones, and 2 n + 1, the odd ones.
#pragma once

#include <type_traits>

#include "cuda/device/e4m3.cuh"
#include "cuda/device/mma_gemm.cuh"

namespace flashattn::cuda {

// Gives eight pairs of A's columns, the words of a k16 step, the order of a K-major B.
__device__ __forceinline__ void pair_columns(uint32_t (&words)[8]) {
  const uint32_t w[8] = {words[0], words[1], words[2], words[3],
                         words[4], words[5], words[6], words[7]};
#pragma unroll
  for (int n = 0; n < 8; ++n) words[n % 2 * 4 + n / 2] = w[n];
}

// d += A B^T over kDim columns of tiles of kTileDim (0: as many); a_address from a_k_major(),
// b_address from b_k_major().
template <class T, int kDim, int kTileDim = 0, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<std::is_same<T, ptx::E4m3>::value> gemm_nt(
    float (&d)[kMmaM][kMmaN][4], uint32_t a_address, uint32_t b_address) {
  using ATile = SmemTile<16, kTileDim == 0 ? kDim : kTileDim>;
  using BTile = SmemTile<16, kTileDim == 0 ? kDim : kTileDim, 1>;
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    uint32_t a[2][kMmaM][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ptx::ldmatrix_x4(a[step][mma_m],
                         ATile::advance(a_address, 4 * k + 2 * step) + mma_m * ATile::kBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, BTile::advance(b_address, 2 * k) + n * BTile::kBytes);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        uint32_t pairs[2];
        f16_of_e4m3<1>(b[x], pairs);
#pragma unroll
        for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
          ptx::mma_16x8x16<__half>(d[mma_m][2 * n + x / 2], a[x % 2][mma_m], pairs[0], pairs[1]);
        }
      }
    }
  }
}

// d += A B with A in registers: a_word(mma_m, k, x) returns register x of A. Sums over 16 kSteps
// rows of B; b_address from b_mn_major(). kDim: columns of B's tile; 0: as many as d has.
template <class T, int kSteps, int kDim = 0, int kMmaM, int kMmaN, class AWord>
__device__ __forceinline__ std::enable_if_t<std::is_same<T, ptx::E4m3>::value> gemm_rs(
    float (&d)[kMmaM][kMmaN][4], uint32_t b_address, AWord a_word) {
  using Tile = SmemTile<16, kDim == 0 ? kMmaN * 8 : kDim, 1>;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kMmaM][4];
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int x = 0; x < 4; ++x) a[mma_m][x] = a_word(mma_m, k, x);
    }
#pragma unroll
    for (int n = 0; n < kMmaN / 4; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, Tile::advance(b_address, 2 * n) + k * Tile::kBytes);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        uint32_t first[2], second[2];  // 8 keys each: even columns, odd columns
        f16_of_e4m3<2>(b[2 * chunk], first);
        f16_of_e4m3<2>(b[2 * chunk + 1], second);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
          for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
            ptx::mma_16x8x16<__half>(d[mma_m][4 * n + 2 * chunk + odd], a[mma_m], first[odd],
                                     second[odd]);
          }
        }
      }
    }
  }
}

}  // namespace flashattn::cuda
