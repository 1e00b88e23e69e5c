// Products of tiles in shared memory by mma.sync: here of 16-bit elements, those of fp32 with the
// same names in mma_3xtf32.cuh. A warp owns kMmaM times 16 rows of the result;
// accumulators are [strip][8 columns][4], as ptx::mma_16x8x16 lays them out.
#pragma once

#include <type_traits>

#include "cuda/ptx/mma.cuh"
#include "cuda/device/packed_pair.cuh"
#include "cuda/device/mma_3xtf32.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// Where a lane reads 16 rows from `row` on of a tile whose rows are rows of the result.
template <class Tile>
__device__ __forceinline__ uint32_t a_k_major(Tile tile, int row, int lane) {
  return tile.chunk(row + lane % 16, lane / 16);
}

// Where a lane reads 16 rows of a tile whose rows are columns of the result: rows 0..7 and 8..15,
// each with both halves of the summed index.
template <class Tile>
__device__ __forceinline__ uint32_t b_k_major(Tile tile, int row, int lane) {
  return tile.chunk(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Where a lane reads 16 rows of a tile whose rows are summed over.
template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize == 2, uint32_t> b_mn_major(Tile tile,
                                                                                   int row,
                                                                                   int lane) {
  return tile.chunk(row + lane % 16, lane / 16);
}

// d += left right^T, both kDim wide. left and right as given by the functions above.
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

// Accumulators as the left operand of a product that sums over their columns: word x for columns
// [16 k, 16 k + 16), of fp32 [8 k, 8 k + 8).
template <class T, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2, uint32_t> acc_as_a(
    const float (&x)[kMmaN][4], int k, int word) {
  const float* pair = &x[2 * k + word / 2][word % 2 * 2];
  return ptx::pack<T>(pair[0], pair[1]);
}

// The same of pairs of columns: rows g and g + 8.
template <class T, int kPairs>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2, uint32_t> acc_as_a(
    const PackedPair<T> (&x)[kPairs][2], int k, int word) {
  return x[2 * k + word / 2][word % 2].word;
}

// d += held tile, where `held` stands in registers: held(strip, k, x) gives word x of the operand,
// as acc_as_a does. kSteps times 16 rows of the tile; summed as given by b_mn_major. kDim: the
// columns of the tile; 0: those of d. Of one twice as wide, d has every second 32 columns: those
// chunks are exchanged among themselves.
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

// Where a lane reads a tile whose rows are summed over and whose columns, from `column` on, are
// rows of the result.
template <class Tile>
__device__ __forceinline__ std::enable_if_t<Tile::kSize == 2, uint32_t> a_mn_major(Tile tile,
                                                                                   int column,
                                                                                   int lane) {
  return Tile::advance(tile.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2), column / 8);
}

// d += left^T right; left as given by a_mn_major, right by b_mn_major, of it columns from
// `column` on, a multiple of as many as d has.
template <class T, class TileA, class TileB, int kMmaM, int kMmaN>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> gemm_tn(float (&d)[kMmaM][kMmaN][4],
                                                                    uint32_t a_address,
                                                                    uint32_t b_address,
                                                                    int column) {
  // From an even start the steps are constants.
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
