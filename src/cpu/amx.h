// Products of pairs of bf16 on tile registers (AMX): C (+)= A B with the operands of gemm.h, A's
// units lying one after the other. Every row of C is computed alike, wherever it stands.
#pragma once

#include "core/geometry.h"
#include "cpu/simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

#if defined(__AMX_BF16__)
constexpr bool kHasAmx = true;

constexpr int32_t kTile = 16;  // rows of a tile, and its columns in units of 32 bits

// Tiles 0 to 3: C of 2 x 2 tiles, row by row; 4, 5: A; 6, 7: B.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles for the first rows_a and the following rows_b rows of A and k units.
  FLASHATTN_INLINE TileConfig(int32_t rows_a, int32_t rows_b, int32_t k) {
    const int32_t height[8] = {rows_a, rows_a, rows_b, rows_b, rows_a, rows_b, k, k};
    for (int t = 0; t < 8; ++t) {
      // A tile that is not used has some size, too.
      rows[t] = static_cast<uint8_t>(height[t] > 0 ? height[t] : 1);
      row_bytes[t] = static_cast<uint16_t>((t == 4 || t == 5 ? k : kTile) * 4);
    }
  }
};

// 2 x 2 tiles of C over k units in steps of `step`; kLower: of two rows of tiles, kRight: columns.
template <bool kLower, bool kRight>
FLASHATTN_INLINE void multiply_tiles(const uint32_t* a, int64_t a_row, const uint32_t* b,
                                     int64_t b_row, float* c, int64_t c_row, int32_t k,
                                     int32_t step, bool accumulate) {
  const long a_bytes = a_row * 4, b_bytes = b_row * 4, c_bytes = c_row * 4;
  float* below = c + kTile * c_row;
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kRight) _tile_loadd(1, c + kTile, c_bytes);
    if constexpr (kLower) _tile_loadd(2, below, c_bytes);
    if constexpr (kLower && kRight) _tile_loadd(3, below + kTile, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int32_t n = 0; n < k; n += step, a += step, b += step * b_row) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLower) {
      _tile_loadd(5, a + kTile * a_row, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRight) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kRight) _tile_stored(1, c + kTile, c_bytes);
  if constexpr (kLower) _tile_stored(2, below, c_bytes);
  if constexpr (kLower && kRight) _tile_stored(3, below + kTile, c_bytes);
}

// B: panels of `panel` columns, panel_stride units apart, rows of a panel one after the other.
// columns: from a multiple of 2 * kTile to one of kTile.
__attribute__((noinline)) inline void amx_gemm(int32_t rows, Interval columns, int32_t k,
                                               const uint32_t* a, int64_t a_row, const uint32_t* b,
                                               int32_t panel, int64_t panel_stride, float* c,
                                               int64_t c_row, bool accumulate) {
  // Nor do the intrinsics that load tiles say that they read memory.
  __asm__ volatile("" : : : "memory");
  // Whole tiles of k first, then what is left: loading a configuration clears the tiles.
  for (int32_t done = 0; done < k;) {
    const int32_t step = k - done >= kTile ? kTile : k - done;
    const int32_t count = step == kTile ? (k - done) / kTile * kTile : step;
    // Rows in whole pairs of tiles first: B's tiles stay in the L1 cache for all of them.
    for (int32_t row = 0; row < rows;) {
      const int32_t left = rows - row;
      const int32_t height = left < 2 * kTile ? left : 2 * kTile;
      const int32_t end = left < 2 * kTile ? rows : row + left / (2 * kTile) * (2 * kTile);
      const int32_t upper = height < kTile ? height : kTile;
      const TileConfig config(upper, height - upper, step);
      // The intrinsic does not tell the compiler that all of it is read.
      __asm__ volatile("" : : "m"(config));
      _tile_loadconfig(&config);
      for (int32_t column = columns.begin; column < columns.end; column += 2 * kTile) {
        const bool right = columns.end - column > kTile;
        const auto multiply =
            height > kTile ? (right ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                           : (right ? multiply_tiles<false, true> : multiply_tiles<false, false>);
        for (int32_t r = row; r < end; r += 2 * kTile) {
          multiply(a + r * a_row + done, a_row,
                   b + column / panel * panel_stride + column % panel + done * int64_t{panel},
                   panel, c + r * c_row + column, c_row, count, step, accumulate || done > 0);
        }
      }
      row = end;
    }
    done += count;
  }
  __asm__ volatile("" : : : "memory");
}

// Leaves the tiles as a thread that never used them has them.
FLASHATTN_INLINE void release_tiles() { _tile_release(); }
#else
constexpr bool kHasAmx = false;
FLASHATTN_INLINE void release_tiles() {}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
