// Q K^T and P V for few queries, with K and V where they lie in memory: nothing is packed, and each
// row of a cache is read once. The result of a query depends neither on the queries beside it nor
// on where in a subtile a key lies.
#pragma once

#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Whether 8 bits are multiplied as pairs of bf16: without tables the conversion costs
// more than the products save.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr bool kHasBytePairs = true;
#else
constexpr bool kHasBytePairs = false;
#endif

// with_operand_dtype() for K and V that are read where they lie.
template <Compute kCompute, class Body>
FLASHATTN_INLINE auto with_direct_dtype(int32_t dtype, Body body) {
  if constexpr (kCompute == Compute::kBf16Pairs && kHasBytePairs) {
    if (dtype == FLASHATTN_DTYPE_F8E4M3) return body(DtypeTag<FLASHATTN_DTYPE_F8E4M3>{});
    if (dtype == FLASHATTN_DTYPE_I8) return body(DtypeTag<FLASHATTN_DTYPE_I8>{});
  }
  return with_operand_dtype<kCompute>(dtype, body);
}

// load_byte_pairs() of the first `count` elements at p, then zeros.
template <int32_t kDtype>
FLASHATTN_INLINE void load_first_byte_pairs(const char* p, int32_t count, Words (&words)[2]) {
  if (count >= 4 * kWidth) return load_byte_pairs<kDtype>(p, words);
  alignas(64) char staged[4 * kWidth] = {};
  if (count > 0) __builtin_memcpy(staged, p, static_cast<size_t>(count));
  load_byte_pairs<kDtype>(staged, words);
}

// K or V of the KV heads that a Q block reads together.
struct KvCacheHeads {
  TokenRows rows;  // rows of the first head
  int64_t head_bytes;
  int32_t heads, row_bytes;
  int32_t end;  // keys before it may be prefetched
};

constexpr int32_t kMaxSubtileKeys = 64;   // keys of a subtile, at most
constexpr int32_t kSubtileBytes = 32768;  // bytes of a subtile, all heads: a small part of L2
constexpr int kScoreRows = 4;      // queries that share loaded keys; values: kMicroKernelRows
constexpr int kPrefetchWords = 4;  // words of values between two prefetches

// The number of keys of a subtile, the same for all heads, which are computed one after the other.
// With many more keys memory would no longer be read in the order in which it lies; with fewer each
// start costs more.
FLASHATTN_INLINE int32_t subtile_keys(const KvCacheHeads& cache) {
  const int32_t fitting = kSubtileBytes / (cache.heads * cache.row_bytes) / kWidth * kWidth;
  return fitting < 16 ? 16 : fitting > kMaxSubtileKeys ? kMaxSubtileKeys : fitting;
}

// Calls body(n, address of row range.begin + n) for each n.
template <class Body>
FLASHATTN_INLINE void for_each_row(const TokenRows& rows, Interval range, Body body) {
  for (int32_t j = range.begin; j < range.end;) {
    const char* p = rows.row(j);
    int32_t end = range.end;
    if (rows.pages) {
      end = clamp_index(int64_t{j} + rows.page_size - j % rows.page_size, range.end);
    }
    for (; j < end; ++j, p += rows.row_bytes) body(j - range.begin, p);
  }
}

// The rows of a subtile of one head, and those of the next subtile of all heads, which are
// prefetched meanwhile: in the order in which they lie, and evenly, because processors drop
// prefetches that come all at once.
struct KvSubtile {
  const char* row[kMaxSubtileKeys];  // entries past the end repeat the last
  const char* next[kMaxSubtileKeys];
  int32_t tokens, lines;  // tokens in `next`, cache lines of a token
  int32_t token, line;    // where the next prefetch begins
  int32_t each;           // lines per step

  // `steps` calls of prefetch() follow, after which `part` of `parts` of all lines must have been
  // prefetched.
  FLASHATTN_INLINE void plan_prefetch(int32_t steps, int32_t part, int32_t parts) {
    const int32_t end = static_cast<int32_t>(int64_t{tokens} * lines * part / parts);
    const int32_t left = end - token * lines - line;
    each = steps > 0 && left > 0 ? (left + steps - 1) / steps : 0;
  }

  // Prefetches the lines of a step into the L2 cache: the L1 cache has room for few requests.
  FLASHATTN_INLINE void prefetch() {
    for (int32_t n = each; n > 0 && token < tokens;) {
      // One token at a time: counting lines in memory would take longer than the products.
      const char* at = next[token] + int64_t{line} * 64;
      const int32_t count = n < lines - line ? n : lines - line;
      for (int32_t i = 0; i < count; ++i) __builtin_prefetch(at + i * 64, 0, 2);
      n -= count;
      line += count;
      if (line == lines) line = 0, ++token;
    }
  }
};

// Calls body(head, first key, count, subtile) for each subtile of the keys `range`, and within it
// for each head.
template <class Body>
FLASHATTN_INLINE void for_each_subtile(const KvCacheHeads& cache, Interval range, Body body) {
  const int32_t step = subtile_keys(cache);
  const int64_t span = (cache.heads - 1) * cache.head_bytes + cache.row_bytes;
  KvSubtile subtile;
  // Heads may lie far apart: more lines than a subtile has bytes would not help.
  subtile.lines =
      static_cast<int32_t>(span < kSubtileBytes ? (span + 63) / 64 : kSubtileBytes / 64);
  for (int32_t first = range.begin; first < range.end; first += step) {
    const int32_t count = range.end - first < step ? range.end - first : step;
    for_each_row(cache.rows, {first, first + count},
                 [&](int32_t n, const char* p) { subtile.row[n] = p; });
    for (int32_t n = count; n < step; ++n) subtile.row[n] = subtile.row[count - 1];
    const int32_t end = first + 2 * step < cache.end ? first + 2 * step : cache.end;
    subtile.tokens = end > first + step ? end - first - step : 0;
    subtile.token = subtile.line = 0;
    for_each_row(cache.rows, {first + step, end},
                 [&](int32_t n, const char* p) { subtile.next[n] = p; });
    for (int32_t head = 0; head < cache.heads; ++head) {
      body(head, first, count, subtile);
      for (int32_t n = 0; n < step; ++n) subtile.row[n] += cache.head_bytes;
    }
  }
}

// Scores of kRows queries with `count` keys of a subtile: s[r * s_stride + n] = q[r] . key[n].
// Prefetches a step for each kWidth / kRows keys.
template <Compute kCompute, int32_t kDtype, int kRows>
void direct_qk_rows(const uint32_t* q, int32_t q_words, KvSubtile& subtile, int32_t count,
                    int32_t dim, float* s, int64_t s_stride) {
  constexpr int kKeys = kWidth / kRows;
  const int32_t words = (dim + kWordElements<kCompute> - 1) / kWordElements<kCompute>;
  const int32_t whole = dim / (kWordElements<kCompute> * kWidth) * kWidth;
  for (int32_t n = 0; n < count; n += kKeys) {
    Floats sums[kWidth] = {};
    const auto add = [&](int32_t u, int32_t end) {
      Words query[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        query[r] = load_words(q + r * q_words + u);
        if (kRows == kScoreRows) hold(query[r]);
      }
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const Words key = load_row_words<kCompute, kDtype>(subtile.row[n + k], u, end);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + k] = multiply_add<kCompute>(sums[r * kKeys + k], query[r], key);
        }
      }
    };
    int32_t u = 0;
    if constexpr (kElementBytes<kDtype> == 1 && kCompute == Compute::kBf16Pairs) {
      const auto add_bytes = [&](auto load, auto vectors) FLASHATTN_INLINED {
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          Words key[2];
          load(subtile.row[n + k] + 2 * u, key);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < decltype(vectors)::value; ++v) {
              sums[r * kKeys + k] = dot_bf16(sums[r * kKeys + k],
                                             load_words(q + r * q_words + u + v * kWidth), key[v]);
            }
          }
        }
      };
      for (; u + 2 * kWidth <= whole; u += 2 * kWidth) {
        add_bytes(load_byte_pairs<kDtype>, std::integral_constant<int, 2>{});
      }
      const auto load_last = [&](const char* p, Words(&key)[2]) FLASHATTN_INLINED {
        load_first_byte_pairs<kDtype>(p, dim - 2 * u, key);
      };
      if (words - u > kWidth) {
        add_bytes(load_last, std::integral_constant<int, 2>{});
      } else if (words > u) {
        add_bytes(load_last, std::integral_constant<int, 1>{});
      }
    } else if constexpr (kElementBytes<kDtype> == 1) {
      for (; u + kByteVectors * kWidth <= whole; u += kByteVectors * kWidth) {
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          Floats key[kByteVectors];
          load_unit_vectors<kDtype>(subtile.row[n + k] + u, key);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < kByteVectors; ++v) {
              sums[r * kKeys + k] +=
                  as_floats(load_words(q + r * q_words + u + v * kWidth)) * key[v];
            }
          }
        }
      }
    }
    if constexpr (kElementBytes<kDtype> != 1 || kCompute == Compute::kF32) {
      for (; u < whole; u += kWidth) add(u, INT32_MAX);
      if (u < words) add(u, dim);
    }
    subtile.prefetch();
    float lanes[kWidth];
    store(lanes, sum_each(sums));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(s + r * s_stride + n, lanes + r * kKeys, sizeof(float) * kKeys);
    }
  }
}

// o[r * o_stride + c] += p[r] . value[][c] for kRows queries, kVectors vectors of columns from
// `column` on, and `words` words of keys of a subtile.
template <Compute kCompute, int32_t kDtype, int kRows, int kVectors, bool kWhole>
void direct_pv_columns(const uint32_t* p, int64_t p_stride, KvSubtile& subtile, int32_t words,
                       int32_t column, int32_t dim, float* o, int64_t o_stride) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(o + r * o_stride + column + v * kWidth);
  }
  for (int32_t u = 0, end; u < words; u = end) {
    subtile.prefetch();
    end = words - u < kPrefetchWords ? words : u + kPrefetchWords;
#pragma GCC unroll 1
    for (int32_t n = u; n < end; ++n) {
      Words value[kVectors];
      const char* const* row = subtile.row + n * kWordElements<kCompute>;
      const char *first = row[0], *second = row[kWordElements<kCompute> - 1];
      if constexpr (kCompute == Compute::kBf16Pairs && kElementBytes<kDtype> == 1 &&
                    kVectors == 4 && kWhole) {
        load_byte_columns<kDtype>(first + column, second + column, value);
      } else if constexpr (kCompute == Compute::kBf16Pairs && kElementBytes<kDtype> == 2 &&
                           kVectors % 2 == 0 && kWhole) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v += 2) {
          interleave(load_words(first + (column + v * kWidth) * 2),
                     load_words(second + (column + v * kWidth) * 2), &value[v], &value[v + 1]);
        }
      } else if constexpr (kElementBytes<kDtype> == 1 && kVectors % kByteVectors == 0 && kWhole) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v += kByteVectors) {
          Floats units[kByteVectors];
          load_unit_vectors<kDtype>(first + column + v * kWidth, units);
#pragma GCC unroll 4
          for (int i = 0; i < kByteVectors; ++i) value[v + i] = as_words(units[i]);
        }
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          value[v] =
              load_row_pair<kCompute, kDtype, kWhole>(first, second, column + v * kWidth, dim);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Words each = splat_word(p[r * p_stride + n]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = multiply_add<kCompute>(sum[r][v], each, value[v]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(o + r * o_stride + column + v * kWidth, sum[r][v]);
  }
}

// Vectors of columns that direct_pv_columns() computes at once. With few rows of 8-bit values,
// which memory delivers fastest, the sums of one panel are too few to hide the latency of their
// additions.
template <int32_t kDtype, int kRows>
constexpr int kPvVectors =
    kElementBytes<kDtype> == 1 && kRows <= 2 && kPanelVectors == 2 ? 2 * kPanelVectors
                                                                   : kPanelVectors;

// The number of calls of direct_pv_columns() for all columns.
template <int32_t kDtype, int kRows>
FLASHATTN_INLINE int32_t pv_column_steps(int32_t dim) {
  constexpr int32_t kColumns = kPvVectors<kDtype, kRows> * kWidth;
  const int32_t left = dim % kColumns, whole = dim / kColumns;
  if (kColumns == kPanel) return whole + (left + kWidth - 1) / kWidth;
  return whole + left / kPanel + (left % kPanel + kWidth - 1) / kWidth;
}

// direct_pv_columns() for all columns.
template <Compute kCompute, int32_t kDtype, int kRows>
void direct_pv_rows(const uint32_t* p, int64_t p_stride, KvSubtile& subtile, int32_t words,
                    int32_t dim, float* o, int64_t o_stride) {
  int32_t column = 0;
  if constexpr (kPvVectors<kDtype, kRows> != kPanelVectors) {
    constexpr int32_t kColumns = kPvVectors<kDtype, kRows> * kWidth;
    for (; column + kColumns <= dim; column += kColumns) {
      direct_pv_columns<kCompute, kDtype, kRows, kPvVectors<kDtype, kRows>, true>(
          p, p_stride, subtile, words, column, dim, o, o_stride);
    }
  }
  for (; column + kPanel <= dim; column += kPanel) {
    direct_pv_columns<kCompute, kDtype, kRows, kPanelVectors, true>(p, p_stride, subtile, words,
                                                                    column, dim, o, o_stride);
  }
  for (; column < dim; column += kWidth) {
    direct_pv_columns<kCompute, kDtype, kRows, 1, false>(p, p_stride, subtile, words, column, dim,
                                                         o, o_stride);
  }
}

// Calls body(first row, number of rows as a constant) for blocks of kMost, 4, 2 or 1 rows.
template <int kMost, class Body>
FLASHATTN_INLINE void for_each_row_block(int32_t rows, Body body) {
  int32_t row = 0;
  for (; row + kMost <= rows; row += kMost) body(row, std::integral_constant<int, kMost>{});
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  for (; row + 2 <= rows; row += 2) body(row, std::integral_constant<int, 2>{});
  if (row < rows) body(row, std::integral_constant<int, 1>{});
}

// s[r][n - range.begin] = q[r] . key n for the keys `range`, in units of kUnit. The queries of the
// heads, `rows` per head, lie one behind the other.
template <Compute kCompute>
void direct_qk(const KvCacheHeads& keys, Interval range, int32_t dim, int32_t dtype,
               const uint32_t* q, int32_t q_words, int32_t rows, float* s, int64_t s_stride) {
  with_direct_dtype<kCompute>(dtype, [&](auto tag) {
    for_each_subtile(keys, range, [&](int32_t head, int32_t n, int32_t count, KvSubtile& subtile) {
      const int64_t first = int64_t{head} * rows;
      for_each_row_block<kScoreRows>(rows, [&](int32_t row, auto block) {
        constexpr int32_t kKeys = kWidth / decltype(block)::value;
        subtile.plan_prefetch((count + kKeys - 1) / kKeys,
                              head * rows + row + decltype(block)::value, keys.heads * rows);
        direct_qk_rows<kCompute, decltype(tag)::value, decltype(block)::value>(
            q + (first + row) * q_words, q_words, subtile, count, dim,
            s + (first + row) * s_stride + (n - range.begin), s_stride);
      });
    });
  });
}

// o[r] += p[r] . values of the keys `range`, which starts with a whole word, in units of kUnit.
template <Compute kCompute>
void direct_pv(const KvCacheHeads& values, Interval range, int32_t dim, int32_t dtype,
               const uint32_t* p, int64_t p_stride, int32_t rows, float* o, int64_t o_stride) {
  with_direct_dtype<kCompute>(dtype, [&](auto tag) {
    for_each_subtile(
        values, range, [&](int32_t head, int32_t n, int32_t count, KvSubtile& subtile) {
          const int32_t words = (count + kWordElements<kCompute> - 1) / kWordElements<kCompute>;
          const char* const last = subtile.row[count - 1];
          // P of the key after the last one is 0, which must not meet an infinity.
          if (count % kWordElements<kCompute> != 0) subtile.row[count] = kZeroRow;
          const int64_t first = int64_t{head} * rows;
          for_each_row_block<kMicroKernelRows>(rows, [&](int32_t row, auto block) {
            const int32_t steps =
                pv_column_steps<decltype(tag)::value, decltype(block)::value>(dim);
            subtile.plan_prefetch((words + kPrefetchWords - 1) / kPrefetchWords * steps,
                                  head * rows + row + decltype(block)::value, values.heads * rows);
            direct_pv_rows<kCompute, decltype(tag)::value, decltype(block)::value>(
                p + (first + row) * p_stride + (n - range.begin) / kWordElements<kCompute>,
                p_stride, subtile, words, dim, o + (first + row) * o_stride, o_stride);
          });
          if (count % kWordElements<kCompute> != 0) subtile.row[count] = last;
        });
  });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
