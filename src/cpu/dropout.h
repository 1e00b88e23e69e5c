// The keep bytes of dropout: which elements of P are kept.
#pragma once

#include "core/philox.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <int... kLane>
FLASHATTN_INLINE Longs even_numbers(std::integer_sequence<int, kLane...>) {
  return Longs{(2ul * kLane)...};
}

// Makes kWidth calls of Philox with the counters `first`, `first` + 1, ... word[w] receives their
// words w. Even and odd calls are computed apart, in the low halves of 64-bit lanes.
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

// Writes the keep bytes of queries [16 * row, 16 * row + 16) and keys [first, first + keys), first
// a multiple of 16: keep[query % 16][key - first], rows `stride` apart, is 1 or 0. Writes at most
// 15 elements past the last key.
inline void dropout_tiles(const DropoutStream& stream, uint32_t threshold, int32_t row,
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
      philox_calls(stream, tile | call, static_cast<uint32_t>(row), word);
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

// Writes the keep bytes of some queries of a head; query queries.begin gets row queries.begin % 16
// of keep.
inline void dropout_rows(const Problem& problem, uint64_t seed, uint64_t offset, int32_t b,
                         int32_t head, Interval queries, int32_t first, int32_t keys, uint8_t* keep,
                         int32_t stride) {
  const DropoutStream stream =
      DropoutStream::make(seed, offset,
                          static_cast<uint32_t>(b) * static_cast<uint32_t>(problem.heads_q) +
                              static_cast<uint32_t>(head));
  for (int32_t row = queries.begin / 16; row * 16 < queries.end; ++row) {
    dropout_tiles(stream, problem.dropout_threshold(), row, first, keys, keep, stride);
    keep += int64_t{16} * stride;
  }
}

// x where kept, 0 elsewhere.
FLASHATTN_INLINE Floats apply_keep(Floats x, const uint8_t* keep) {
  return select_by_bytes(keep, x, Floats{});
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
