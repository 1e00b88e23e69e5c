// Small matrix products C (+)= A B.
//
// Operands are made of 32-bit words along the inner index k: a word is an fp32 number, or a pair of
// bf16 neighbours where the instruction set multiplies pairs (vdpbf16ps, AMX). A may have any
// strides. B is packed in panels of kPanelOf columns, each panel [k][column]; a packed B also
// serves as an A whose rows are its k. C is fp32, row-major.
#pragma once

#include "cpu/amx.h"

namespace flashattn::cpu::FLASHATTN_ISA {

constexpr int kPanel = kPanelVectors * kWidth;
constexpr int kMicroKernelRows = 6;  // 6 x 4 accumulators of 32 registers, or 6 x 2 of 16

enum class Compute { kF32, kBf16Pairs };

// Columns of a panel of B: kPanel, or those of a tile register, which is then contiguous.
template <Compute kCompute>
constexpr int kPanelOf = kHasAmx && kCompute == Compute::kBf16Pairs ? 16 : kPanel;

// Words between panels. Panels a power of two apart would share few sets of the caches.
template <Compute kCompute>
constexpr int kPanelGap = kPanelOf<kCompute> < kPanel ? kPanelOf<kCompute> : 0;

template <Compute kCompute>
constexpr int kWordElements = kCompute == Compute::kF32 ? 1 : 2;  // elements of k in a word

struct MatrixA {
  const uint32_t* data;
  int64_t row_stride, k_stride;  // words
  int64_t panel_stride = 0;      // a packed fp32 B as A: words from panel to panel; 0: no panels
};

struct MatrixB {
  const uint32_t* data;
  int64_t panel_stride;  // words from panel to panel
};

struct MatrixC {
  float* data;
  int64_t row_stride;
};

template <Compute kCompute>
FLASHATTN_INLINE Floats multiply_add(Floats sum, Words a, Words b) {
  if constexpr (kCompute == Compute::kF32) {
    return sum + as_floats(a) * as_floats(b);
  } else {
    return dot_bf16(sum, a, b);
  }
}

// Computes a micro-tile of C, kRows x (kVectors * kWidth) elements held in registers over all of k,
// and then those of the next kRows rows, `times` in all.
template <Compute kCompute, int kRows, int kVectors>
void micro_kernel(MatrixA a, const uint32_t* __restrict b, MatrixC c, int32_t k, bool accumulate,
                  int32_t times) {
  const int32_t most = a.panel_stride ? kPanel : k;
  for (; times > 0; --times) {
    Floats sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = accumulate ? load(c.data + r * c.row_stride + v * kWidth) : Floats{};
      }
    }
    const uint32_t *panel = a.data, *at_b = b;
    for (int32_t left = k; left > 0; left -= most, panel += a.panel_stride) {
      const uint32_t* __restrict at = panel;
      for (int32_t n = left < most ? left : most; n > 0; --n, at += a.k_stride, at_b += kPanel) {
        Words column[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) column[v] = load_words(at_b + v * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Words row = splat_word(at[r * a.row_stride]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            sum[r][v] = multiply_add<kCompute>(sum[r][v], row, column[v]);
          }
        }
      }
    }
    // Makes the compiler compute the rows' addresses here, instead of keeping them during the loop.
    __asm__("" : "+r"(c.data), "+r"(c.row_stride));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(c.data + r * c.row_stride + v * kWidth, sum[r][v]);
      }
    }
    a.data += kRows * a.row_stride;
    c.data += kRows * c.row_stride;
  }
}

using MicroKernel = void (*)(MatrixA, const uint32_t* __restrict, MatrixC, int32_t, bool, int32_t);

template <Compute kCompute, int kVectors>
FLASHATTN_INLINE MicroKernel micro_kernel_of_rows(int32_t rows) {
  switch (rows) {
    case 1: return micro_kernel<kCompute, 1, kVectors>;
    case 2: return micro_kernel<kCompute, 2, kVectors>;
    case 3: return micro_kernel<kCompute, 3, kVectors>;
    case 4: return micro_kernel<kCompute, 4, kVectors>;
    case 5: return micro_kernel<kCompute, 5, kVectors>;
    default: return micro_kernel<kCompute, 6, kVectors>;
  }
}

template <Compute kCompute>
FLASHATTN_INLINE MicroKernel micro_kernel_of(int32_t rows, int32_t vectors) {
  if constexpr (kPanelVectors == 4) {
    if (vectors >= 4) return micro_kernel_of_rows<kCompute, 4>(rows);
    if (vectors == 3) return micro_kernel_of_rows<kCompute, 3>(rows);
  }
  if (vectors >= 2) return micro_kernel_of_rows<kCompute, 2>(rows);
  return micro_kernel_of_rows<kCompute, 1>(rows);
}

// Rows of a micro-tile: the fewest rows that may have columns, or k, of their own.
template <Compute kCompute>
constexpr int32_t kMicroTileRows =
    kHasAmx && kCompute == Compute::kBf16Pairs ? 32 : kMicroKernelRows;

// C[rows][columns] (+)= A[rows][k] B[k][columns]. columns: multiples of kWidth; k in words. On tile
// registers the words of a row of A must be contiguous. row_columns_of(row): the columns that the
// micro-tile of rows from `row` on needs.
template <Compute kCompute, class ColumnsOf>
void gemm(int32_t rows, Interval columns, int32_t k, MatrixA a, MatrixB b, MatrixC c,
          bool accumulate, ColumnsOf row_columns_of) {
#if defined(__AMX_BF16__)
  if constexpr (kCompute == Compute::kBf16Pairs) {
    constexpr int32_t kStep = kMicroTileRows<kCompute>;
    static_assert(kPanelOf<kCompute> == kTileRows && kStep == 2 * kTileRows);
    // As many rows at a time as need the same columns.
    for (int32_t row = 0, next; row < rows; row = next) {
      const Interval own = row_columns_of(row);
      for (next = row + kStep; next < rows; next += kStep) {
        const Interval others = row_columns_of(next);
        if (others.begin != own.begin || others.end != own.end) break;
      }
      amx_gemm(next < rows ? next - row : rows - row, own, k, a.data + row * a.row_stride,
               a.row_stride, b.data, b.panel_stride, c.data + row * c.row_stride, c.row_stride,
               accumulate);
    }
    return;
  }
#endif
  for (int32_t column = columns.begin; column < columns.end;) {
    const int32_t panel_begin = column / kPanel * kPanel, panel_end = panel_begin + kPanel;
    const Interval here = intersect({column, panel_end}, columns);
    const uint32_t* panel = b.data + column / kPanel * b.panel_stride;
    for (int32_t row = 0, next; row < rows; row = next) {
      // As many rows at a time as need the same columns.
      const Interval own = intersect(row_columns_of(row), here);
      int32_t times = 1;
      for (next = row + kMicroKernelRows; next + kMicroKernelRows <= rows;
           next += kMicroKernelRows, ++times) {
        const Interval others = intersect(row_columns_of(next), here);
        if (others.begin != own.begin || others.end != own.end) break;
      }
      if (own.begin >= own.end) continue;
      micro_kernel_of<kCompute>(rows - row, (own.end - own.begin) / kWidth)(
          {a.data + row * a.row_stride, a.row_stride, a.k_stride, a.panel_stride},
          panel + (own.begin - panel_begin),
          {c.data + row * c.row_stride + own.begin, c.row_stride}, k, accumulate, times);
    }
    column = panel_end;
  }
}

template <Compute kCompute>
void gemm(int32_t rows, Interval columns, int32_t k, MatrixA a, MatrixB b, MatrixC c,
          bool accumulate) {
  gemm<kCompute>(rows, columns, k, a, b, c, accumulate, [&](int32_t) { return columns; });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
