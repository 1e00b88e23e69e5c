// Products of pairs of bf16 on AMX tile registers: C (+)= A B with the operands of gemm.h, the
// words of a row of A contiguous. Every row of C is computed in the same order, so that its bits do
// not depend on where it stands.
#pragma once

#include "core/mask_geometry.h"
#include "cpu/simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

#if defined(__AMX_BF16__)
constexpr bool kHasAmx = true;

constexpr int32_t kTileRows = 16;  // rows of a tile, and columns in 32-bit words

// Tile registers 0 to 3 hold C, 2 x 2 tiles in row-major order; 4 and 5 hold A, 6 and 7 hold B.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Sizes for two rows of tiles, of rows_a and then rows_b rows of A, and for k words.
  FLASHATTN_INLINE TileConfig(int32_t rows_a, int32_t rows_b, int32_t k) {
    const int32_t height[8] = {rows_a, rows_a, rows_b, rows_b, rows_a, rows_b, k, k};
    for (int t = 0; t < 8; ++t) {
      // Tiles that are not used must have a size, too.
      rows[t] = static_cast<uint8_t>(height[t] > 0 ? height[t] : 1);
      row_bytes[t] = static_cast<uint16_t>((t == 4 || t == 5 ? k : kTileRows) * 4);
    }
  }
};

// Gives this thread's tile registers their sizes. Reading the present sizes takes a seventh of the
// time of setting them.
FLASHATTN_INLINE void configure_tiles(int32_t rows_a, int32_t rows_b, int32_t k) {
  const TileConfig config(rows_a, rows_b, k);
  TileConfig now(1, 1, 1);
  _tile_storeconfig(&now);
  // The intrinsics do not tell the compiler that all bytes are written and read.
  __asm__ volatile("" : "+m"(now) : "m"(config));
  if (__builtin_memcmp(&now, &config, sizeof config) != 0) _tile_loadconfig(&config);
}

// C in 2 x 2 tile registers, or fewer. kLower: it has a second row of them; kRight: a second
// column. kStreamB: B is not read again soon, and must not evict what is in the L1 cache.
template <bool kLower, bool kRight, bool kStreamB = false>
struct TileQuad {
  float* c;
  int64_t c_row;

  FLASHATTN_INLINE void store_0() const { _tile_stored(0, c, c_row * 4); }
  FLASHATTN_INLINE void store_1() const {
    if constexpr (kRight) _tile_stored(1, c + kTileRows, c_row * 4);
  }
  FLASHATTN_INLINE void store_2() const {
    if constexpr (kLower) _tile_stored(2, c + kTileRows * c_row, c_row * 4);
  }
  FLASHATTN_INLINE void store_3() const {
    if constexpr (kLower && kRight) _tile_stored(3, c + kTileRows * c_row + kTileRows, c_row * 4);
  }

  FLASHATTN_INLINE void store() const {
    if (!c) return;
    store_0();
    store_1();
    store_2();
    store_3();
  }

  // C = A B, or C += A B (accumulate), over k words in steps of `step`. between() is called after
  // each product of two tiles. Each tile of the quad `before` (c NULL: none) is stored just before
  // its register is needed again: a store right behind the product that it waits for delays what
  // follows by as long as four products take.
  template <class Between>
  FLASHATTN_INLINE void multiply(const uint32_t* a, int64_t a_row, const uint32_t* b,
                                 int64_t panel_stride, int32_t k, int32_t step, bool accumulate,
                                 const TileQuad& before, Between between) const {
    const long a_bytes = a_row * 4, b_bytes = kTileRows * 4, c_bytes = c_row * 4;
    const auto multiply_step = [&](bool first) FLASHATTN_INLINED {
      const bool store = first && before.c;
      _tile_loadd(4, a, a_bytes);
      if constexpr (kStreamB) {
        _tile_stream_loadd(6, b, b_bytes);
      } else {
        _tile_loadd(6, b, b_bytes);
      }
      if (store) before.store_0();
      if (first && accumulate) _tile_loadd(0, c, c_bytes);
      if (first && !accumulate) _tile_zero(0);
      _tile_dpbf16ps(0, 4, 6);
      between();
      if constexpr (kRight) {
        if constexpr (kStreamB) {
          _tile_stream_loadd(7, b + panel_stride, b_bytes);
        } else {
          _tile_loadd(7, b + panel_stride, b_bytes);
        }
        if (store) before.store_1();
        if (first && accumulate) _tile_loadd(1, c + kTileRows, c_bytes);
        if (first && !accumulate) _tile_zero(1);
        _tile_dpbf16ps(1, 4, 7);
        between();
      }
      if constexpr (kLower) {
        _tile_loadd(5, a + kTileRows * a_row, a_bytes);
        if (store) before.store_2();
        if (first && accumulate) _tile_loadd(2, c + kTileRows * c_row, c_bytes);
        if (first && !accumulate) _tile_zero(2);
        _tile_dpbf16ps(2, 5, 6);
        between();
        if constexpr (kRight) {
          if (store) before.store_3();
          if (first && accumulate) _tile_loadd(3, c + kTileRows * c_row + kTileRows, c_bytes);
          if (first && !accumulate) _tile_zero(3);
          _tile_dpbf16ps(3, 5, 7);
          between();
        }
      }
    };
    multiply_step(true);
#pragma GCC unroll 4
    for (int32_t n = step; n < k; n += step) {
      a += step;
      b += step * kTileRows;
      multiply_step(false);
    }
  }
};

// 32 rows of A stay in tile registers 2 to 5. Each product gives C of 16 columns in registers 0 and
// 1.
struct StationaryA {
  static constexpr int32_t kWords = 2 * kTileRows;  // words of a row of A

  FLASHATTN_INLINE static void load(const uint32_t* a) {
    constexpr long kBytes = kWords * 4;
    _tile_loadd(2, a, kBytes);
    _tile_loadd(3, a + kTileRows * kWords, kBytes);
    _tile_loadd(4, a + kTileRows, kBytes);
    _tile_loadd(5, a + kTileRows * kWords + kTileRows, kBytes);
  }

  // C = A B; between() is called after each product of tiles. b: a panel that is read once.
  template <class Between>
  FLASHATTN_INLINE static void multiply(const uint32_t* b, float* c, int64_t c_row,
                                        Between between) {
    _tile_stream_loadd(6, b, long{kTileRows * 4});
    _tile_zero(0);
    _tile_dpbf16ps(0, 2, 6);
    between();
    _tile_zero(1);
    _tile_dpbf16ps(1, 3, 6);
    between();
    _tile_stream_loadd(7, b + kTileRows * kTileRows, long{kTileRows * 4});
    _tile_dpbf16ps(0, 4, 7);
    between();
    _tile_dpbf16ps(1, 5, 7);
    between();
    _tile_stored(0, c, c_row * 4);
    _tile_stored(1, c + kTileRows * c_row, c_row * 4);
  }
};

// Computes all of C in quads: two rows of tiles (kLower) or one, two columns (kRight) or one.
template <bool kLower, bool kRight>
void multiply_quads(int32_t rows, Interval columns, int32_t k, int32_t step, const uint32_t* a,
                    int64_t a_row, const uint32_t* b, int64_t panel_stride, float* c, int64_t c_row,
                    bool accumulate) {
  TileQuad<kLower, kRight> before{nullptr, c_row};
  for (int32_t column = columns.begin; column < columns.end;
       column += kRight ? 2 * kTileRows : kTileRows) {
    // Rows are the inner loop, so that B's tiles stay in the L1 cache for all rows.
    for (int32_t r = 0; r < rows; r += 2 * kTileRows) {
      const TileQuad<kLower, kRight> block{c + r * c_row + column, c_row};
      block.multiply(a + r * a_row, a_row, b + column / kTileRows * panel_stride, panel_stride, k,
                     step, accumulate, before, [] {});
      before = block;
    }
  }
  before.store();
}

// C (+)= A B. B: panels of kTileRows columns, panel_stride words apart, the rows of a panel
// contiguous. columns: multiples of kTileRows. k in words.
__attribute__((noinline)) inline void amx_gemm(int32_t rows, Interval columns, int32_t k,
                                               const uint32_t* a, int64_t a_row, const uint32_t* b,
                                               int64_t panel_stride, float* c, int64_t c_row,
                                               bool accumulate) {
  // The intrinsics that load tiles do not say that they read memory.
  __asm__ volatile("" : : : "memory");
  // Whole tiles of k first, then the rest: loading a configuration clears the tile registers.
  for (int32_t done = 0; done < k;) {
    const int32_t step = k - done >= kTileRows ? kTileRows : k - done;
    const int32_t count = step == kTileRows ? (k - done) / kTileRows * kTileRows : step;
    for (int32_t row = 0, next; row < rows; row = next) {
      const int32_t left = rows - row;
      next = left < 2 * kTileRows ? rows : row + left / (2 * kTileRows) * (2 * kTileRows);
      const int32_t upper = left < kTileRows ? left : kTileRows;
      const int32_t lower = (left < 2 * kTileRows ? left : 2 * kTileRows) - upper;
      configure_tiles(upper, lower, step);
      const int32_t whole = (columns.end - columns.begin) / (2 * kTileRows) * (2 * kTileRows);
      const Interval pairs{columns.begin, columns.begin + whole}, last{pairs.end, columns.end};
      const auto multiply = [&](auto blocks, Interval some) {
        blocks(next - row, some, count, step, a + row * a_row + done, a_row, b + done * kTileRows,
               panel_stride, c + row * c_row, c_row, accumulate || done > 0);
      };
      multiply(lower > 0 ? multiply_quads<true, true> : multiply_quads<false, true>, pairs);
      multiply(lower > 0 ? multiply_quads<true, false> : multiply_quads<false, false>, last);
    }
    done += count;
  }
  __asm__ volatile("" : : : "memory");
}

// Resets the tile registers to the state of a thread that never used them.
FLASHATTN_INLINE void release_tiles() { _tile_release(); }
#else
constexpr bool kHasAmx = false;
FLASHATTN_INLINE void release_tiles() {}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
