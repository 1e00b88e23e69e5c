// Q K^T and P V with K and V where they lie, for so few rows that packing would cost more than it
// saves: each row of a cache is read once.
#pragma once

#include <type_traits>

#include "cpu/direct_gemm.h"
#include "cpu/softmax_state.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// kProducts: how Q K^T and P V are computed, if not as kCompute says: 8 bits as pairs of bf16.
template <Compute kCompute, Compute kProducts = kCompute>
class DirectKv {
 public:
  using Tile = ScoreTile<kCompute>;
  // All rows of a tile have the same columns.
  static constexpr bool kSameColumns = true;

  FLASHATTN_INLINE DirectKv(const QBlock& block, ForwardScratch<kCompute>& scratch,
                            SoftmaxState<kCompute>& softmax)
      : block_(block), scratch_(scratch), softmax_(softmax) {}

  // Makes packed queries the operand of Q K^T.
  void prepare_queries() {
    if constexpr (kIsPairs) {
      for (int32_t r = 0; r < block_.rows; ++r) {
        uint32_t* q = scratch_.q + int64_t{r} * scratch_.q_words;
        pair_in_place(reinterpret_cast<float*>(q), block_.problem.dim_qk);
      }
    }
  }

  void begin_tile(Interval) {}

  int32_t run_mainloop(int32_t, int32_t, Interval) { return 0; }

  // S = Q K^T; 0 in columns that no row sees.
  void qk(const Tile& tile) {
    const Interval read = keys_read(tile);
    const int32_t first = tile.keys.begin;
    for (int32_t r = 0; r < tile.rows(); ++r) {
      float* s = scratch_.s + int64_t{r} * scratch_.score_columns;
      fill(s, tile.columns.begin, read.begin - first, 0.0f);
      fill(s, read.end - first, tile.columns.end, 0.0f);
    }
    float* s = scratch_.s + (read.begin - first);
    direct_qk<kProducts>(cache(block_.k(), block_.in.k.stride_head, block_.problem.dim_qk), read,
                         block_.problem.dim_qk, block_.problem.dtype_kv,
                         scratch_.q + static_cast<int64_t>(tile.row) * scratch_.q_words,
                         scratch_.q_words, tile.rows() / block_.kv_heads, s,
                         scratch_.score_columns);
    if (!has_units()) return;
    with_units(block_.in.descale_k, tile, read, [&](int32_t r, auto unit_of_keys) {
      apply_units(s + int64_t{r} * scratch_.score_columns, read.end - read.begin, unit_of_keys);
    });
  }

  // O += P V.
  void pv(const Tile& tile) {
    const Interval read = keys_read(tile);
    const int32_t rows = tile.rows(), head_rows = rows / block_.kv_heads;
    const int64_t columns = scratch_.v_columns, p_stride = words(scratch_.score_columns);
    float* o = scratch_.o + static_cast<int64_t>(tile.row) * columns;
    uint32_t* p = scratch_.p + words(read.begin - tile.keys.begin);
    const auto multiply = [&](float* sums) FLASHATTN_INLINED {
      direct_pv<kProducts>(cache(block_.v(), block_.in.v.stride_head, block_.problem.dim_v), read,
                           block_.problem.dim_v, block_.problem.dtype_kv, p, p_stride, head_rows,
                           sums, columns);
    };
    // Rows of O beside which P may be 0 must not meet infinities and NaN, which the result shows:
    // such a row is then computed again from its old value.
    float* const other = reinterpret_cast<float*>(scratch_.v);
    const size_t bytes = sizeof(float) * static_cast<size_t>(rows * columns);
    const auto again = [&](int32_t r, float value_unit) {
      TokenRows values = block_.v(r / head_rows);
      values.descales = {&value_unit, 0, 1};  // P already holds the descales
      add_pv_nonzero<kProducts>(values, block_.problem.dtype_kv, block_.problem.dim_v,
                                p + r * p_stride, read.begin, read, o + r * columns);
    };
    if constexpr (kIsPairs) {
      float factor[kDirectRows];
      with_units(block_.in.descale_v, tile, read, [&](int32_t r, auto unit_of_keys) {
        factor[r] = make_pairs(p + r * p_stride, read.end - read.begin, unit_of_keys);
      });
      __builtin_memset(other, 0, bytes);
      multiply(other);
      for (int32_t r = 0; r < rows; ++r) {
        const float* sums = other + r * columns;
        if (!tile.full && !all_finite(sums, static_cast<int32_t>(columns))) {
          again(r, factor[r] / unit());
          continue;
        }
        for (int64_t c = r * columns; c < (r + 1) * columns; c += kWidth) {
          store(o + c, load(o + c) + load(other + c) * splat(factor[r]));
        }
      }
    } else {
      if (!tile.full) __builtin_memcpy(other, o, bytes);
      if (has_units()) {
        with_units(block_.in.descale_v, tile, read, [&](int32_t r, auto unit_of_keys) {
          apply_units(reinterpret_cast<float*>(p + r * p_stride), read.end - read.begin,
                      unit_of_keys);
        });
      }
      multiply(o);
      for (int32_t r = 0; !tile.full && r < rows; ++r) {
        if (all_finite(o + r * columns, static_cast<int32_t>(columns))) continue;
        __builtin_memcpy(o + r * columns, other + r * columns,
                         sizeof(float) * static_cast<size_t>(columns));
        again(r, 1 / unit());
      }
    }
  }

 private:
  static constexpr bool kIsPairs = kProducts != kCompute;
  static_assert(!kIsPairs || kCompute == Compute::kF32);

  // Words of a row of P.
  FLASHATTN_INLINE static int32_t words(int32_t keys) { return keys / kWordElements<kCompute>; }

  // The visible keys, from a whole vector on, so that the scores of a row end before those of the
  // next begin.
  FLASHATTN_INLINE static Interval keys_read(const Tile& tile) {
    return {tile.visible.begin - (tile.visible.begin - tile.keys.begin) % kWidth, tile.visible.end};
  }

  FLASHATTN_INLINE KvCacheHeads cache(const TokenRows& rows, int64_t stride_head,
                                      int32_t dim) const {
    const int32_t size = dtype_size(block_.problem.dtype_kv);
    return {rows, stride_head * size, block_.kv_heads, dim * size, block_.keys.end};
  }

  // Replaces queries, bf16 as fp32, by the pairs that load_byte_pairs() makes of keys.
  static void pair_in_place(float* q, int32_t dim) {
    for (int32_t d = 0; d < dim; d += 2 * kWidth) {
      const Floats low = load(q + d), high = d + kWidth < dim ? load(q + d + kWidth) : Floats{};
      store_words(reinterpret_cast<uint32_t*>(q) + d / 2, high_halves(low, high));
    }
  }

  // A score or a P of 0 stays 0 whatever the descale.
  FLASHATTN_INLINE static Floats times_unit(Floats x, Floats unit) {
    return select(x == 0.0f, x, x * unit);
  }

  // Multiplies a row of scores or P by units.
  template <class UnitOfKeys>
  FLASHATTN_INLINE static void apply_units(float* p, int32_t keys, UnitOfKeys unit_of_keys) {
    for (int32_t c = 0; c < keys; c += kWidth) {
      store(p + c, times_unit(load(p + c), unit_of_keys(c)));
    }
  }

  // The unit of all keys.
  struct OneUnit {
    Floats value;
    FLASHATTN_INLINE Floats operator()(int32_t) const { return value; }
  };

  // Replaces a row of P, times units, by pairs of bf16 and the factor that it returns: the unit
  // that all keys have, or the largest product, so that a P that is alone loses nothing. Behind the
  // last row is memory for a vector.
  template <class UnitOfKeys>
  FLASHATTN_INLINE static float make_pairs(uint32_t* p, int32_t keys, UnitOfKeys unit_of_keys) {
    auto* weights = reinterpret_cast<float*>(p);
    float factor = 0;
    const auto is_usual = [&] { return factor >= 0x1p-120f && factor <= 0x1p120f; };
    const auto round = [&](Floats inverse) FLASHATTN_INLINED {
      for (int32_t c = 0; c < keys; c += 2 * kWidth) {
        store_bf16_row(p + c / 2, load(weights + c) * inverse,
                       load(weights + c + kWidth) * inverse);
      }
      return factor;
    };
    if constexpr (std::is_same_v<UnitOfKeys, OneUnit>) {
      factor = unit_of_keys.value[0];
      if (is_usual()) return round(splat(1.0f));
      factor = 0;
    }
    Floats largest{};
    for (int32_t c = 0; c < keys; c += kWidth) {
      const Floats x = times_unit(load(weights + c), unit_of_keys(c));
      store(weights + c, x);
      largest = max_of_both(largest, abs(x));
    }
    float lanes[kWidth];
    store(lanes, largest);
    for (const float lane : lanes) factor = lane > factor ? lane : factor;
    if (!is_usual()) factor = 1;  // the quotient of others could overflow
    return round(splat(1 / factor));
  }

  // Whether K and V have 8 bits. The unit of a key, times its descale, then multiplies scores and
  // P, of which there are fewer than elements of K and V.
  FLASHATTN_INLINE bool has_units() const {
    return kCompute == Compute::kF32 && block_.problem.has_8bit_cache();
  }
  FLASHATTN_INLINE float unit() const {
    return block_.problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3 ? kUnit<FLASHATTN_DTYPE_F8E4M3>
                                                             : kUnit<FLASHATTN_DTYPE_I8>;
  }

  // Calls apply(row, unit_of_keys) for each row; unit_of_keys(c): the units of kWidth keys from
  // keys.begin + c on, anything behind keys.end.
  template <class Apply>
  void with_units(const flashattn_tensor& descales, const Tile& tile, Interval keys,
                  Apply apply) const {
    // The tile decides whether all keys have one unit: the keys that other rows see must not.
    const int32_t first = tile.keys.begin,
                  last = clamp_index(int64_t{first} + kDirectKeys - 1, INT32_MAX);
    const int32_t rows = tile.rows(), head_rows = rows / block_.kv_heads,
                  count = keys.end - keys.begin;
    float units[kDirectKeys + kWidth];
    for (int32_t r = 0; r < rows; r += head_rows) {
      const Descales head =
          descales_of(block_.problem, descales, block_.b, block_.kv_head + r / head_rows);
      if (!head.data || first / head.block == last / head.block) {
        const Floats one = splat(unit() * head.of(keys.begin));
        for (int32_t n = 0; n < head_rows; ++n) apply(r + n, OneUnit{one});
        continue;
      }
      if (head.block == 1) {  // without a division for each token
        const float* of_key = head.data + keys.begin * head.stride;
        for (int32_t n = 0; n < count; ++n) units[n] = unit() * of_key[n * head.stride];
      } else {
        for (int32_t j = keys.begin; j < keys.end;) {
          const int64_t next = (int64_t{j / head.block} + 1) * head.block;
          const int32_t end = clamp_index(next, keys.end);
          fill(units, j - keys.begin, end - keys.begin, unit() * head.of(j));
          j = end;
        }
      }
      fill(units, count, round_up(count, kWidth), 1.0f);
      for (int32_t n = 0; n < head_rows; ++n) {
        apply(r + n, [&](int32_t c) { return load(units + c); });
      }
    }
  }

  const QBlock& block_;
  ForwardScratch<kCompute>& scratch_;
  SoftmaxState<kCompute>& softmax_;
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
