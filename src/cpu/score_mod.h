// What happens to scores between the two products: scale, softcap, ALiBi, dense bias, masks,
// dropout.
#pragma once

#include "core/philox.h"
#include "core/score_rules.h"
#include "cpu/elementary.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Weights and gradients of scores are operands of a product next.
template <Compute kCompute>
constexpr Exp2For kExp2For = kCompute == Compute::kBf16Pairs ? Exp2For::kBf16 : Exp2For::kF32;

constexpr float kPerNat = kLog2E / kModifiedUnit.log2;

FLASHATTN_INLINE Interval round_out(Interval columns) {
  return {columns.begin / kColumnStep * kColumnStep, round_up(columns.end, kColumnStep)};
}

// Rows of a tile that the block mask does not tear apart: all cut at the same queries, wherever the
// tile starts, so that what is computed for a query does not depend on its neighbours.
FLASHATTN_INLINE Interval same_block_rows(const ScoreRules& rules, int32_t query, int32_t tile_q,
                                          Lengths len) {
  if (!rules.blocks) return {0, len.q};
  const int32_t rows =
      rules.block_q >= tile_q ? rules.block_q : tile_q / rules.block_q * rules.block_q;
  const int32_t begin = query / rows * rows;
  return {begin, clamp_index(static_cast<int64_t>(begin) + rows, len.q)};
}

// Calls body(keys, full) for each stretch of keys whose blocks are not off for all of the queries;
// full: on for all.
template <class Body>
FLASHATTN_INLINE void for_each_active_range(const ScoreRules& rules, Interval queries,
                                            Interval keys, Body body) {
  if (!rules.blocks) return body(keys, true);
  Interval run{keys.begin, keys.begin};
  bool full = true;
  for (int32_t j = keys.begin; j < keys.end;) {
    const int32_t x = j / rules.block_kv;
    const int32_t next = clamp_index((x + 1LL) * rules.block_kv, keys.end);
    bool any = false, all = true;
    for (int32_t y = queries.begin / rules.block_q; y <= (queries.end - 1) / rules.block_q; ++y) {
      const bool on = rules.blocks[y * rules.blocks_row + x] != 0;
      any |= on;
      all &= on;
    }
    if (any) {
      run.end = next;
      full &= all;
    }
    if ((!any || next == keys.end) && run.begin < run.end) body(run, full);
    if (!any) {
      run = {next, next};
      full = true;
    }
    j = next;
  }
}

// Turns the products of query i with the keys from `first` on into scores, in kModifiedUnit:
// columns [begin, end) of s, multiples of kWidth. Returns the highest of each lane. derivative, if
// not NULL, receives that of the softcap. add(x, key): x plus the biases of the keys from `key` on.
template <class Add>
FLASHATTN_INLINE Floats score_mod_columns(const ScoreRules& rules, int32_t i, int32_t first,
                                          int32_t begin, int32_t end, float* s, float* derivative,
                                          Add add) {
  const bool capped = rules.softcap != 0;
  const Floats factor = splat(capped ? rules.scale / rules.softcap : rules.scale * kPerNat);
  const Floats cap = splat(rules.softcap * kPerNat), slope = splat(rules.slope * kPerNat);
  Floats top = splat(-kInfinity);
  const auto step = [&](int32_t column, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    Floats x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(s + column + v * kWidth) * factor;
    if (capped) {
      tanh_each(x);
      for (int v = 0; v < kVectors; ++v) {
        if (derivative) store(derivative + column + v * kWidth, 1.0f - x[v] * x[v]);
        x[v] *= cap;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int32_t key = first + column + v * kWidth;
      if (rules.slope != 0) {
        const float at = static_cast<float>(i + static_cast<int64_t>(rules.offset) - key);
        x[v] -= abs(splat(at) - iota()) * slope;
      }
      x[v] = add(x[v], key);
      store(s + column + v * kWidth, x[v]);
      top = max_keep_nan(x[v], top);
    }
  };
  int32_t column = begin;
  for (; column + kPanel <= end; column += kPanel) {
    step(column, std::integral_constant<int, kPanelVectors>{});
  }
  for (; column < end; column += kWidth) step(column, std::integral_constant<int, 1>{});
  return top;
}

// The same with the bias of the rules; `keys`: all of the sequence.
inline Floats score_mod_row(const ScoreRules& rules, int32_t i, int32_t first, int32_t keys,
                            int32_t begin, int32_t end, float* s, float* derivative) {
  const auto modify = [&](auto add) {
    return score_mod_columns(rules, i, first, begin, end, s, derivative, add);
  };
  if (!rules.bias) return modify([](Floats x, int32_t) { return x; });
  const int64_t row_bytes = rules.bias_row * dtype_size(rules.dtype_bias);
  const char* row = rules.bias + i * row_bytes;
  // The next query's is asked for meanwhile: each starts where no processor foresees it.
  const auto fetch_next = [row_bytes](const char* at) { __builtin_prefetch(at + row_bytes); };
  if (rules.dtype_bias == FLASHATTN_DTYPE_U8) {
    // Hidden, whatever the score was.
    return modify([&](Floats x, int32_t key) {
      const int32_t count = keys - key;
      fetch_next(row + key);
      if (count >= kWidth) return select_by_bytes(row + key, x, splat(-kInfinity));
      uint8_t shown[kWidth] = {};
      if (count > 0) __builtin_memcpy(shown, row + key, static_cast<size_t>(count));
      return select_by_bytes(shown, x, splat(-kInfinity));
    });
  }
  return with_dtype(rules.dtype_bias, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    return modify([&](Floats x, int32_t key) {
      const char* at = row + key * int64_t{kElementBytes<kDtype>};
      fetch_next(at);
      return x + load_first<kDtype>(at, keys - key) * splat(kPerNat);
    });
  });
}

inline void fill(float* s, int32_t begin, int32_t end, float value) {
  for (int32_t c = begin; c < end; ++c) s[c] = value;
}

// Hides those of the columns, whole vectors, that are not shown. By whole vectors, which what reads
// them next need not wait for.
FLASHATTN_INLINE void hide(float* s, Interval shown, Interval columns) {
  const Floats hidden = splat(-kInfinity);
  if (shown.begin >= shown.end) shown = {columns.end, columns.end};
  const auto lanes_from = [](int32_t c) { return iota() >= splat(static_cast<float>(c)); };
  for (int32_t c = columns.begin; c < shown.begin; c += kWidth) {
    store(s + c, select(lanes_from(shown.begin - c), load(s + c), hidden));
  }
  for (int32_t c = shown.end / kWidth * kWidth; c < columns.end; c += kWidth) {
    store(s + c, select(lanes_from(shown.end - c), hidden, load(s + c)));
  }
}

// Hides the columns of s whose keys are not visible, or lie in blocks that are off. Column 0 is key
// `first`.
inline void mask_row(const ScoreRules& rules, bool blocks, int32_t i, int32_t first,
                     Interval visible, Interval columns, float* s) {
  const Interval shown = intersect({visible.begin - first, visible.end - first}, columns);
  hide(s, shown, columns);
  if (!blocks) return;
  const uint8_t* row = rules.blocks + i / rules.block_q * rules.blocks_row;
  for (int32_t j = first + shown.begin; j < first + shown.end;) {
    const int32_t x = j / rules.block_kv;
    const int32_t next = clamp_index((x + 1LL) * rules.block_kv, first + shown.end);
    if (!row[x]) fill(s, j - first, next - first, -kInfinity);
    j = next;
  }
}

template <int... kLane>
FLASHATTN_INLINE Longs even_numbers(std::integer_sequence<int, kLane...>) {
  return Longs{(2ul * kLane)...};
}

// kWidth calls of Philox whose counters start with `first`, `first` + 1, ...; word[w] receives
// their words w. Calls of even and of odd number go apart, in the low halves of 64-bit lanes.
FLASHATTN_INLINE void philox_calls(const DropoutStream& stream, uint32_t first, uint32_t second,
                                   Words (&word)[4]) {
  Longs w[2][4];
  for (int odd = 0; odd < 2; ++odd) {
    w[odd][0] = even_numbers(std::make_integer_sequence<int, kWidth / 2>{}) +
                (static_cast<uint64_t>(first) + static_cast<uint64_t>(odd));
    w[odd][1] = second + Longs{};
    w[odd][2] = stream.head + Longs{};
    w[odd][3] = stream.offset + Longs{};
  }
  uint32_t key0 = stream.key0, key1 = stream.key1;
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const Longs p0 = multiply_low(w[odd][0], kPhiloxFactor0);
      const Longs p1 = multiply_low(w[odd][2], kPhiloxFactor1);
      w[odd][0] = (p1 >> 32) ^ w[odd][1] ^ uint64_t { key0 };
      w[odd][1] = p1;
      w[odd][2] = (p0 >> 32) ^ w[odd][3] ^ uint64_t { key1 };
      w[odd][3] = p0;
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    word[n] = reinterpret_cast<Words>((w[0][n] & 0xffffffffu) | w[1][n] << 32);
  }
}

// Which of the weights of queries [16 * strip, 16 * strip + 16) and keys [first, first + keys),
// first a multiple of 16, are kept: 1 or 0 at keep[query % 16][key - first], rows `stride` apart.
// At most 15 elements past the last key are written.
inline void dropout_tiles(const DropoutStream& stream, uint32_t threshold, int32_t strip,
                          int32_t first, int32_t keys, uint8_t* keep, int32_t stride) {
  typedef uint16_t Numbers __attribute__((vector_size(4 * kWidth)));
  typedef uint8_t Bytes __attribute__((vector_size(2 * kWidth)));
  // No 16-bit number reaches a threshold of 65536.
  const uint16_t one = threshold > 0xffffu ? 0 : 1;
  const Numbers least = static_cast<uint16_t>(threshold) - Numbers{};
  for (int32_t j = 0; j < keys; j += 16) {
    // The 32 calls of a 16 x 16 tile, kWidth at a time.
    const uint32_t tile = static_cast<uint32_t>(first + j) >> 4 << 5;
    for (uint32_t call = 0; call < 32; call += kWidth) {
      Words word[4];
      philox_calls(stream, tile | call, static_cast<uint32_t>(strip), word);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const Numbers numbers = reinterpret_cast<Numbers>(word[w]);
        const Bytes kept =
            __builtin_convertvector(reinterpret_cast<Numbers>(numbers >= least) & one, Bytes);
        // Four calls make half a row: 8 columns.
        uint8_t bytes[2 * kWidth];
        __builtin_memcpy(bytes, &kept, sizeof bytes);
        uint8_t* at = keep + ((call >> 2) + (w & 1) * 8) * stride + j + (w >> 1) * 8;
#pragma GCC unroll 4
        for (int r = 0; r < kWidth / 4; ++r) __builtin_memcpy(at + r * stride, bytes + r * 8, 8);
      }
    }
  }
}

// Those of some queries of a head, the first one's at row queries.begin % 16 of keep.
inline void dropout_rows(const Problem& problem, uint64_t seed, uint64_t offset, int32_t b,
                         int32_t head, Interval queries, int32_t first, int32_t keys, uint8_t* keep,
                         int32_t stride) {
  const DropoutStream stream =
      DropoutStream::make(seed, offset,
                          static_cast<uint32_t>(b) * static_cast<uint32_t>(problem.heads_q) +
                              static_cast<uint32_t>(head));
  for (int32_t strip = queries.begin / 16; strip * 16 < queries.end; ++strip) {
    dropout_tiles(stream, problem.dropout_threshold(), strip, first, keys, keep, stride);
    keep += int64_t{16} * stride;
  }
}

// x where kept, 0 elsewhere.
FLASHATTN_INLINE Floats apply_keep(Floats x, const uint8_t* keep) {
  return select_by_bytes(keep, x, Floats{});
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
