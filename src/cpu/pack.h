// From the caller's arrays to the operands of gemm.h and back: the only code that knows of dtypes,
// strides, pages and ragged ends. Elements past the end of a sequence are packed as zeros and never
// read.
#pragma once

#include "core/os.h"
#include "cpu/gemm.h"
#include "cpu/job.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <int32_t kValue>
struct DtypeTag {
  static constexpr int32_t value = kValue;
};

// Calls body with the dtype, of at least 16 bits, as a compile-time constant.
template <class Body>
FLASHATTN_INLINE auto with_float_dtype(int32_t dtype, Body body) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return body(DtypeTag<FLASHATTN_DTYPE_F16>{});
    case FLASHATTN_DTYPE_BF16: return body(DtypeTag<FLASHATTN_DTYPE_BF16>{});
    default: return body(DtypeTag<FLASHATTN_DTYPE_F32>{});
  }
}

template <class Body>
FLASHATTN_INLINE auto with_dtype(int32_t dtype, Body body) {
  if (dtype == FLASHATTN_DTYPE_F8E4M3) return body(DtypeTag<FLASHATTN_DTYPE_F8E4M3>{});
  if (dtype == FLASHATTN_DTYPE_I8) return body(DtypeTag<FLASHATTN_DTYPE_I8>{});
  return with_float_dtype(dtype, body);
}

// with_dtype() for operands of a product: pairs of bf16 are made of bf16 alone.
template <Compute kCompute, class Body>
FLASHATTN_INLINE auto with_operand_dtype(int32_t dtype, Body body) {
  if constexpr (kCompute == Compute::kBf16Pairs) {
    return body(DtypeTag<FLASHATTN_DTYPE_BF16>{});
  } else {
    return with_dtype(dtype, body);
  }
}

template <int32_t kDtype>
constexpr int kElementBytes = dtype_size(kDtype);

// Whether the forward pass can use products of pairs of bf16, where there are any.
FLASHATTN_INLINE bool inputs_are_bf16(const Problem& problem) {
  return problem.dtype == FLASHATTN_DTYPE_BF16 && problem.dtype_kv == FLASHATTN_DTYPE_BF16;
}

FLASHATTN_INLINE int32_t round_up(int32_t x, int32_t step) { return (x + step - 1) / step * step; }

// Columns of a tile are computed in multiples of this: whole pairs of vectors, and whole 16 x 16
// tiles of dropout.
constexpr int kColumnStep = kWidth < 8 ? 16 : 2 * kWidth;
static_assert(kPanel % kColumnStep == 0 || kColumnStep % kPanel == 0);

// Descales of the rows of a head, one for each block of tokens.
struct Descales {
  const float* data = nullptr;  // NULL: 1
  int64_t stride = 0;           // floats from block to block
  int32_t block = 1;            // tokens

  FLASHATTN_INLINE float of(int32_t row) const { return data ? data[row / block * stride] : 1.0f; }
};

// The rows (tokens) of one head of one sequence.
struct TokenRows {
  char* base;
  int64_t row_bytes;
  const int32_t* pages;  // NULL: not paged
  int32_t page_size, last_page;
  int64_t page_bytes;
  Descales descales = {};

  FLASHATTN_INLINE char* row(int32_t i) const {
    if (!pages) return base + i * row_bytes;
    // A page number that has changed since it was checked still reads a page of the pool.
    return base + clamp_index(pages[i / page_size], last_page) * page_bytes +
           i % page_size * row_bytes;
  }
};

// Prefetches the cache lines of some bytes. kLocality: 3, into the L1 cache; 2, into the L2 cache.
template <int kLocality>
FLASHATTN_INLINE void prefetch_lines(const char* p, int32_t bytes) {
  for (int32_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, kLocality);
}

// Rows that are packed next. Packing waits longer for memory than it computes; products do not
// wait. Between them these rows are therefore prefetched into the L2 cache.
struct RowPrefetch {
  TokenRows rows;
  int32_t bytes;  // bytes of a row
  Interval left;

  // Prefetches the share of one step, of the `steps` steps that are left.
  FLASHATTN_INLINE void prefetch(int32_t steps) {
    if (left.begin >= left.end) return;
    int32_t count = (left.end - left.begin + steps - 1) / steps;
    for (; count > 0; --count, ++left.begin) prefetch_lines<2>(rows.row(left.begin), bytes);
  }
};

// Prefetches the row that is read 16 rows after this one: if heads lie side by side, hardware
// prefetchers do not.
FLASHATTN_INLINE void prefetch_row(const TokenRows& rows, int32_t row, Interval range,
                                   int32_t bytes) {
  if (row + 16 < range.end) prefetch_lines<3>(rows.row(row + 16), bytes);
}

FLASHATTN_INLINE TokenRows rows_of(const flashattn_tensor& t, int32_t element_size, int32_t b,
                                   int32_t h, int64_t first) {
  return {static_cast<char*>(t.data) +
              (b * t.stride_batch + h * t.stride_head + first * t.stride_seq) * element_size,
          t.stride_seq * element_size,
          nullptr,
          1,
          0,
          0};
}

// The descales of a KV head, from the tensor `of`: descale_q, descale_k or descale_v.
FLASHATTN_INLINE Descales descales_of(const Problem& problem, const flashattn_tensor& of, int32_t b,
                                      int32_t kv_head) {
  if (!of.data) return {};
  const float* first =
      static_cast<const float*>(of.data) + b * of.stride_batch + kv_head * of.stride_head;
  // descale_block 0: one descale for all tokens.
  const int32_t block = problem.descale_block > 0 ? problem.descale_block : INT32_MAX;
  return {first, of.stride_seq, block};
}

// The queries of a query head.
FLASHATTN_INLINE TokenRows q_rows(const Problem& problem, const Inputs& in, int32_t b, int32_t h,
                                  int64_t first) {
  TokenRows rows = rows_of(in.q, dtype_size(problem.dtype), b, h, first);
  rows.descales = descales_of(problem, in.descale_q, b, h / problem.q_heads_per_kv_head());
  return rows;
}

// The rows of a KV head of tensor t, which lies as k and v do. size: bytes of its elements.
FLASHATTN_INLINE TokenRows token_rows(const Problem& problem, const Inputs& in,
                                      const flashattn_tensor& t, int32_t size, int32_t b, int32_t h,
                                      int64_t first) {
  if ((problem.layout & FLASHATTN_LAYOUT_PAGED_KV) == 0) return rows_of(t, size, b, h, first);
  return {static_cast<char*>(t.data) + h * t.stride_head * size,
          t.stride_seq * size,
          in.page_table + b * in.page_table_stride,
          problem.page_size,
          clamp_index(in.pages - 1, INT32_MAX),
          t.stride_batch * size};
}

// The keys or values of a KV head: t is k or v, with its own descales.
FLASHATTN_INLINE TokenRows kv_rows(const Problem& problem, const Inputs& in,
                                   const flashattn_tensor& t, const flashattn_tensor& descales,
                                   int32_t b, int32_t h, int64_t first) {
  TokenRows rows = token_rows(problem, in, t, dtype_size(problem.dtype_kv), b, h, first);
  rows.descales = descales_of(problem, descales, b, h);
  return rows;
}
FLASHATTN_INLINE TokenRows k_rows(const Problem& problem, const Inputs& in, int32_t b, int32_t h,
                                  int64_t first) {
  if (problem.is_latent()) {
    return token_rows(problem, in, in.k, dtype_size(problem.dtype), b, h, first);
  }
  return kv_rows(problem, in, in.k, in.descale_k, b, h, first);
}
FLASHATTN_INLINE TokenRows v_rows(const Problem& problem, const Inputs& in, int32_t b, int32_t h,
                                  int64_t first) {
  return kv_rows(problem, in, in.v, in.descale_v, b, h, first);
}

// The first `count` elements at p in units of kUnit, then zeros.
template <int32_t kDtype>
FLASHATTN_INLINE Floats load_first_units(const char* p, int32_t count) {
  if (count >= kWidth) return load_units<kDtype>(p);
  alignas(64) char staged[kWidth * kElementBytes<kDtype>] = {};
  if (count > 0) __builtin_memcpy(staged, p, static_cast<size_t>(count) * kElementBytes<kDtype>);
  return load_units<kDtype>(staged);
}

// The first `count` elements at p, then zeros.
template <int32_t kDtype>
FLASHATTN_INLINE Floats load_first(const char* p, int32_t count) {
  const Floats x = load_first_units<kDtype>(p, count);
  return kUnit<kDtype> == 1.0f ? x : x * splat(kUnit<kDtype>);
}

// The factor from what load_*_units() returns to values of a row: the unit, and the descale for 8
// bits.
template <int32_t kDtype>
FLASHATTN_INLINE float unit_of(const TokenRows& rows, int32_t row) {
  if constexpr (kElementBytes<kDtype> != 1) return 1;
  return kUnit<kDtype> * rows.descales.of(row);
}
template <int32_t kDtype>
FLASHATTN_INLINE Words in_unit(Words x, float unit) {
  if constexpr (kElementBytes<kDtype> != 1) return x;
  return as_words(as_floats(x) * splat(unit));
}

template <int32_t kDtype>
FLASHATTN_INLINE void store_first(char* p, Floats x, int32_t count) {
  if (count >= kWidth) return store_floats<kDtype>(p, x);
  alignas(64) char staged[kWidth * kElementBytes<kDtype>];
  store_floats<kDtype>(staged, x);
  if (count > 0) __builtin_memcpy(p, staged, static_cast<size_t>(count) * kElementBytes<kDtype>);
}

// kWidth words of a row of dim elements, from word `from` on, in units of kUnit.
template <Compute kCompute, int32_t kDtype>
FLASHATTN_INLINE Words load_row_words(const char* p, int32_t from, int32_t dim) {
  if constexpr (kCompute == Compute::kF32) {
    return as_words(load_first_units<kDtype>(p + from * kElementBytes<kDtype>, dim - from));
  } else {
    const int32_t left = dim - from * 2;
    if (left >= 2 * kWidth) return load_words(p + from * 4);
    alignas(64) uint32_t staged[kWidth] = {};
    if (left > 0) __builtin_memcpy(staged, p + from * 4, static_cast<size_t>(left) * 2);
    return load_words(staged);
  }
}

// A row of zeros in any dtype.
alignas(64) static const char kZeroRow[kMaxDim * 4] = {};

// kWidth words: each an element of columns [column, column + kWidth) of row `first` and, for pairs
// of bf16, that of row `second` behind it. Columns from dim on are zeros; kWhole: there are none.
// In units of kUnit.
template <Compute kCompute, int32_t kDtype, bool kWhole = false>
FLASHATTN_INLINE Words load_row_pair(const char* first, const char* second, int32_t column,
                                     int32_t dim) {
  const int64_t at = column * int64_t{kElementBytes<kDtype>};
  const int32_t left = dim - column;
  if constexpr (kCompute == Compute::kF32) {
    return as_words(kWhole ? load_units<kDtype>(first + at)
                           : load_first_units<kDtype>(first + at, left));
  } else if constexpr (kElementBytes<kDtype> == 1) {
    return high_halves(load_first_units<kDtype>(first + at, left),
                       load_first_units<kDtype>(second + at, left));
  } else if (kWhole || left >= kWidth) {
    return load_halves(reinterpret_cast<const uint16_t*>(first + at)) |
           load_halves(reinterpret_cast<const uint16_t*>(second + at)) << 16;
  } else {
    alignas(64) uint16_t staged[2][kWidth] = {};
    const size_t bytes = static_cast<size_t>(left) * 2;
    __builtin_memcpy(staged[0], first + at, bytes);
    __builtin_memcpy(staged[1], second + at, bytes);
    return load_halves(staged[0]) | load_halves(staged[1]) << 16;
  }
}

// A operand: row r of [begin, end) becomes words[r - begin][0, k_words).
template <Compute kCompute>
void pack_a(const TokenRows& rows, Interval range, int32_t dim, int32_t dtype, uint32_t* out,
            int32_t row_words) {
  with_operand_dtype<kCompute>(dtype, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    for (int32_t r = range.begin; r < range.end; ++r, out += row_words) {
      const char* p = rows.row(r);
      const float unit = unit_of<kDtype>(rows, r);
      prefetch_row(rows, r, range, dim * kElementBytes<kDtype>);
      for (int32_t u = 0; u < row_words; u += kWidth) {
        store_words(out + u, in_unit<kDtype>(load_row_words<kCompute, kDtype>(p, u, dim), unit));
      }
    }
  });
}

// B operand, the head dimension as k and the rows as columns: out[panel][word][row].
template <Compute kCompute>
void pack_b_transposed(const TokenRows& rows, Interval range, int32_t dim, int32_t dtype,
                       uint32_t* out) {
  constexpr int kColumns = kPanelOf<kCompute>;
  const int32_t words = (dim + kWordElements<kCompute> - 1) / kWordElements<kCompute>;
  with_operand_dtype<kCompute>(dtype, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    // Packs all columns that are computed, the last of which lie past the end.
    constexpr int32_t kStep = kPanel > kColumnStep ? kPanel : kColumnStep;
    const int32_t end = range.begin + round_up(range.end - range.begin, kStep);
    for (int32_t r = range.begin; r < end; r += kColumns, out += words * kColumns) {
      for (int32_t column = 0; column < kColumns; column += kWidth) {
        const char* row[kWidth];
        float unit[kWidth];
        for (int32_t i = 0; i < kWidth; ++i) {
          const int32_t n = r + column + i;
          prefetch_row(rows, n, range, dim * kElementBytes<kDtype>);
          row[i] = n < range.end ? rows.row(n) : kZeroRow;
          unit[i] = n < range.end ? unit_of<kDtype>(rows, n) : 0.0f;
        }
        for (int32_t u = 0; u < words; u += kWidth) {
          Words block[kWidth];
#pragma GCC unroll 16
          for (int i = 0; i < kWidth; ++i) {
            block[i] = in_unit<kDtype>(load_row_words<kCompute, kDtype>(row[i], u, dim), unit[i]);
          }
          transpose(block);
          const int32_t count = words - u < kWidth ? words - u : kWidth;
          for (int32_t i = 0; i < count; ++i) {
            store_words(out + (u + i) * kColumns + column, block[i]);
          }
        }
      }
    }
  });
}

// A operand, the head dimension as rows and the rows as k: out[column][row word]. row_words: a
// multiple of kWidth.
template <Compute kCompute>
void pack_a_transposed(const TokenRows& rows, Interval range, int32_t dim, int32_t dtype,
                       uint32_t* out, int32_t row_words) {
  constexpr int kU = kWordElements<kCompute>;
  static_assert(kCompute == Compute::kBf16Pairs, "of bf16 alone, which has no descales");
  with_operand_dtype<kCompute>(dtype, [&](auto tag) {
    for (int32_t r = range.begin; r < range.end; r += kU * kWidth, out += kWidth) {
      const char* row[kU * kWidth];
      for (int32_t i = 0; i < kU * kWidth; ++i) {
        row[i] = r + i < range.end ? rows.row(r + i) : kZeroRow;
      }
      for (int32_t c = 0; c < dim; c += kWidth) {
        Words block[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          block[i] = load_row_pair<kCompute, decltype(tag)::value>(row[i * kU],
                                                                   row[i * kU + kU - 1], c, dim);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          store_words(out + static_cast<int64_t>(c + i) * row_words, block[i]);
        }
      }
    }
  });
}

// B operand, the rows as k and the head dimension as columns: out[panel][row word][column]. Returns
// whether all elements are finite.
template <Compute kCompute>
bool pack_b(const TokenRows& rows, Interval range, int32_t dim, int32_t dtype, uint32_t* out,
            int64_t panel_stride) {
  constexpr uint32_t kExponents = kCompute == Compute::kF32 ? 0x7f800000u : 0x7f807f80u;
  constexpr uint32_t kLowExponent = kCompute == Compute::kF32 ? 0x7f800000u : 0x7f80u;
  Ints non_finite{};
  with_operand_dtype<kCompute>(dtype, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    for (int32_t r = range.begin; r < range.end;
         r += kWordElements<kCompute>, out += kPanelOf<kCompute>) {
      for (int32_t n = 0; n < kWordElements<kCompute>; ++n) {
        prefetch_row(rows, r + n, range, dim * kElementBytes<kDtype>);
      }
      const float unit = unit_of<kDtype>(rows, r);
      const char* first = rows.row(r);
      const char* second =
          kWordElements<kCompute> == 2 && r + 1 < range.end ? rows.row(r + 1) : kZeroRow;
      for (int32_t c = 0; c < dim; c += kWidth) {
        const Words x =
            in_unit<kDtype>(load_row_pair<kCompute, kDtype>(first, second, c, dim), unit);
        const Words exponents = x & kExponents;
        non_finite |= (exponents & kLowExponent) == kLowExponent;
        if constexpr (kCompute == Compute::kBf16Pairs) {
          non_finite |= (exponents >> 16) == kLowExponent;
        }
        store_words(out + c / kPanelOf<kCompute> * panel_stride + c % kPanelOf<kCompute>, x);
      }
    }
  });
  return !any(non_finite);
}

// Whether a shared tile is packed and visible to this thread.
FLASHATTN_INLINE bool is_packed(const int32_t* state) {
  return __atomic_load_n(state, __ATOMIC_ACQUIRE) > kTilePacking;
}

// Calls pack(), unless another thread has done so or does. pack() returns whether all values of a
// tile are finite; pack_once() returns the same, whichever thread has packed.
template <class Pack>
bool pack_once(int32_t* state, Pack pack) {
  int32_t found = kTileEmpty;
  if (__atomic_compare_exchange_n(state, &found, kTilePacking, false, __ATOMIC_ACQUIRE,
                                  __ATOMIC_ACQUIRE)) {
    const bool finite = pack();
    __atomic_store_n(state, finite ? kTileFinite : kTileNonFinite, __ATOMIC_RELEASE);
    return finite;
  }
  for (int32_t waited = 0; found == kTilePacking;) {
    os::back_off(&waited);
    found = __atomic_load_n(state, __ATOMIC_ACQUIRE);
  }
  return found == kTileFinite;
}

// Whether none of the numbers is infinite or NaN.
FLASHATTN_INLINE bool all_finite(const float* x, int64_t count) {
  Ints non_finite{};
  for (int64_t n = 0; n < count; n += kWidth) {
    non_finite |= (as_words(load(x + n)) & 0x7f800000u) == 0x7f800000u;
  }
  return !any(non_finite);
}

// x[0, dim) = row, zeros behind it.
FLASHATTN_INLINE void load_row(float* x, const char* row, int32_t dtype, int32_t dim) {
  with_dtype(dtype, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    for (int32_t c = 0; c < dim; c += kWidth) {
      store(x + c, load_first<kDtype>(row + c * kElementBytes<kDtype>, dim - c));
    }
  });
}

// out[0, dim) = row * factor, in the caller's dtype: 8 bits saturate.
FLASHATTN_INLINE void store_row(char* out, int32_t dtype, const float* row, float factor,
                                int32_t dim) {
  with_dtype(dtype, [&](auto tag) {
    for (int32_t c = 0; c < dim; c += kWidth) {
      store_first<decltype(tag)::value>(out + c * kElementBytes<decltype(tag)::value>,
                                        load(row + c) * splat(factor), dim - c);
    }
  });
}

// store_row() for all rows of a range, in bf16, from a sum with the rows as columns: sum[dim][row],
// `stride` floats from one element of dim to the next.
inline void store_columns(const TokenRows& out, Interval range, const float* sum, int64_t stride,
                          float factor, int32_t dim) {
  for (int32_t r = range.begin; r < range.end; r += kWidth, sum += kWidth) {
    const int32_t count = range.end - r < kWidth ? range.end - r : kWidth;
    char* row[kWidth];
    for (int32_t i = 0; i < count; ++i) row[i] = out.row(r + i);
    for (int32_t c = 0; c < dim; c += kWidth) {
      Words block[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) block[i] = load_words(sum + (c + i) * stride);
      transpose(block);
      for (int32_t i = 0; i < count; ++i) {
        store_first<FLASHATTN_DTYPE_BF16>(row[i] + c * 2, as_floats(block[i]) * splat(factor),
                                          dim - c);
      }
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
