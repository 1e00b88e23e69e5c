// Products with keys and values as they lie in memory, for few queries: nothing is packed, and each
// row of a cache is read once. What is computed for a query depends neither on the queries beside
// it nor on where in a chunk a key lies.
#pragma once

#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Whether a sequence reads a cache with too few rows (queries of all heads that share a KV head) to
// pack for. Not where gradients follow or, in a plan of their own, may follow: scores of the
// forward and the backward pass are to round alike.
FLASHATTN_INLINE bool is_direct(const Problem& problem, Lengths len) {
  constexpr int64_t kMost = 32;
  return !problem.has_op(FLASHATTN_OP_BACKWARD) && len.q < len.kv &&
         int64_t{len.q} * problem.group() <= kMost;
}

constexpr int32_t kChunk = 64;  // keys whose addresses are looked up at once
constexpr int32_t kAhead = 64;  // keys that are fetched before they are needed
constexpr int kBlockRows = 4;   // queries that share what was loaded

// Addresses of the rows of a chunk, and of those to be fetched ahead. Past the end: the last row.
struct Chunk {
  const char* row[kChunk + kAhead];

  FLASHATTN_INLINE Chunk(const Rows& rows, int32_t first, int32_t end) {
    constexpr int32_t kRows = kChunk + kAhead;
    int32_t n = 0;
    while (n < kRows && first + n < end) {
      const char* p = rows.row(first + n);
      int32_t run = rows.pages ? rows.page_size - (first + n) % rows.page_size : kRows;
      if (run > end - first - n) run = end - first - n;
      if (run > kRows - n) run = kRows - n;
      for (int32_t i = 0; i < run; ++i) row[n + i] = p + i * rows.row_bytes;
      n += run;
    }
    for (; n < kRows; ++n) row[n] = row[n - 1];
  }

  // Bytes [from, to) of the row kAhead after row n, into the second level of the caches: the first
  // has room for few requests.
  FLASHATTN_INLINE void fetch_ahead(int32_t n, int64_t from, int64_t to) const {
    for (int64_t at = from; at < to; at += 64) __builtin_prefetch(row[n + kAhead] + at, 0, 2);
  }
};

// Lane n becomes the sum over sums[n].
template <int kStep>
FLASHATTN_INLINE Floats sum_each(Floats (&sums)[kWidth]) {
  if constexpr (kStep == kWidth) {
    return sums[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i += 2 * kStep) {
      const Floats a = sums[i], b = sums[i + kStep];
      const Ints odd = lanes_with<kStep>();
      sums[i] = select(odd, b, a) + swap_lanes<kStep>(select(odd, a, b));
    }
    return sum_each<kStep * 2>(sums);
  }
}

// fetch, below: bytes of each key to be fetched ahead.

// Scores of kRows queries with `count` keys of a chunk: s[r * s_stride + n] = q[r] . key[n].
template <Compute kCompute, int32_t kDtype, int kRows>
void dot_rows(const uint32_t* q, int32_t q_units, const Chunk& chunk, int32_t count, int32_t dim,
              int32_t fetch, float* s, int64_t s_stride) {
  constexpr int kKeys = kWidth / kRows;
  const int32_t units = (dim + kUnit<kCompute> - 1) / kUnit<kCompute>;
  const int32_t whole = dim / (kUnit<kCompute> * kWidth) * kWidth;
  for (int32_t n = 0; n < count; n += kKeys) {
    Floats sums[kWidth] = {};
    const auto add = [&](int32_t u, int32_t end) {
      Words query[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) query[r] = load_words(q + r * q_units + u);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const Words key = load_units<kCompute, kDtype>(chunk.row[n + k], u, end);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + k] = multiply_add<kCompute>(sums[r * kKeys + k], query[r], key);
        }
      }
    };
    int32_t u = 0;
    for (; u < whole; u += kWidth) add(u, INT32_MAX);
    if (u < units) add(u, dim);
    for (int k = 0; k < kKeys; ++k) chunk.fetch_ahead(n + k, 0, fetch);
    float lanes[kWidth];
    store(lanes, sum_each<1>(sums));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(s + r * s_stride + n, lanes + r * kKeys, sizeof(float) * kKeys);
    }
  }
}

// o[r * o_stride + c] += p[r] . value[][c] for kRows queries, kVectors vectors of columns from
// `column` on and `units` units of keys of a chunk.
template <Compute kCompute, int32_t kDtype, int kRows, int kVectors, bool kWhole>
void weigh_columns(const uint32_t* p, int64_t p_stride, const Chunk& chunk, int32_t units,
                   int32_t column, int32_t dim, int32_t fetch, float* o, int64_t o_stride) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(o + r * o_stride + column + v * kWidth);
  }
  for (int32_t u = 0; u < units; ++u) {
    Words value[kVectors];
    const char* const* row = chunk.row + u * kUnit<kCompute>;
    const char *first = row[0], *second = row[kUnit<kCompute> - 1];
    if constexpr (kCompute == Compute::kBf16Pairs && kVectors % 2 == 0 && kWhole) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v += 2) {
        interleave(load_words(first + (column + v * kWidth) * 2),
                   load_words(second + (column + v * kWidth) * 2), &value[v], &value[v + 1]);
      }
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        value[v] = load_pair<kCompute, kDtype>(first, second, column + v * kWidth,
                                               kWhole ? INT32_MAX : dim);
      }
    }
    if (fetch) {
      for (int n = 0; n < kUnit<kCompute>; ++n) {
        chunk.fetch_ahead(u * kUnit<kCompute> + n, int64_t{column} * kSize<kDtype>,
                          int64_t{column + kVectors * kWidth} * kSize<kDtype>);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Words weight = splat_word(p[r * p_stride + u]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = multiply_add<kCompute>(sum[r][v], weight, value[v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(o + r * o_stride + column + v * kWidth, sum[r][v]);
  }
}

// The same over all columns.
template <Compute kCompute, int32_t kDtype, int kRows>
void weigh_rows(const uint32_t* p, int64_t p_stride, const Chunk& chunk, int32_t units, int32_t dim,
                int32_t fetch, float* o, int64_t o_stride) {
  int32_t column = 0;
  for (; column + kPanel <= dim; column += kPanel) {
    weigh_columns<kCompute, kDtype, kRows, kPanelVectors, true>(p, p_stride, chunk, units, column,
                                                                dim, fetch, o, o_stride);
  }
  for (; column < dim; column += kWidth) {
    weigh_columns<kCompute, kDtype, kRows, 1, false>(p, p_stride, chunk, units, column, dim, fetch,
                                                     o, o_stride);
  }
}

// Calls body(row, rows as a constant) for blocks of rows: 4, or what is left.
template <class Body>
FLASHATTN_INLINE void for_each_row_block(int32_t rows, Body body) {
  int32_t row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  for (; row + 2 <= rows; row += 2) body(row, std::integral_constant<int, 2>{});
  if (row < rows) body(row, std::integral_constant<int, 1>{});
}

// s[r][n - keys.begin] = q[r] . key n for the keys `range`; keys.end: of what is fetched ahead.
template <Compute kCompute>
void direct_scores(const Rows& keys, Interval range, int32_t end, int32_t dim, int32_t dtype,
                   const uint32_t* q, int32_t q_units, int32_t rows, float* s, int64_t s_stride) {
  with_dtype(dtype, [&](auto tag) {
    const int32_t row_bytes = dim * kSize<decltype(tag)::value>;
    for (int32_t n = range.begin; n < range.end; n += kChunk) {
      const Chunk chunk(keys, n, end);
      const int32_t count = range.end - n < kChunk ? range.end - n : kChunk;
      for_each_row_block(rows, [&](int32_t row, auto block) {
        dot_rows<kCompute, decltype(tag)::value, decltype(block)::value>(
            q + static_cast<int64_t>(row) * q_units, q_units, chunk, count, dim,
            row == 0 ? row_bytes : 0, s + row * s_stride + (n - range.begin), s_stride);
      });
    }
  });
}

// o[r] += p[r] . values of the keys `range`, which starts with a whole unit.
template <Compute kCompute>
void direct_values(const Rows& values, Interval range, int32_t end, int32_t dim, int32_t dtype,
                   const uint32_t* p, int64_t p_stride, int32_t rows, float* o, int64_t o_stride) {
  with_dtype(dtype, [&](auto tag) {
    const int32_t row_bytes = dim * kSize<decltype(tag)::value>;
    for (int32_t n = range.begin; n < range.end; n += kChunk) {
      Chunk chunk(values, n, end);
      const int32_t count = range.end - n < kChunk ? range.end - n : kChunk;
      const int32_t units = (count + kUnit<kCompute> - 1) / kUnit<kCompute>;
      // The weight of what follows the last key is 0, which must not meet an infinity.
      if (count % kUnit<kCompute> != 0) chunk.row[count] = kZeroRow;
      for_each_row_block(rows, [&](int32_t row, auto block) {
        weigh_rows<kCompute, decltype(tag)::value, decltype(block)::value>(
            p + row * p_stride + (n - range.begin) / kUnit<kCompute>, p_stride, chunk, units, dim,
            row == 0 ? row_bytes : 0, o + row * o_stride, o_stride);
      });
    }
  });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
