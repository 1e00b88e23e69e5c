// Q K^T and P V with K and V where they lie, for so few rows that packing would cost more than it
// saves: each row of a cache is read once.
#pragma once

#include "cpu/direct_gemm.h"
#include "cpu/softmax_state.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
class DirectKv {
 public:
  using Tile = ScoreTile<kCompute>;
  // All rows of a tile have the same columns.
  static constexpr bool kSameColumns = true;

  FLASHATTN_INLINE DirectKv(const QBlock& block, ForwardScratch<kCompute>& scratch,
                            SoftmaxState<kCompute>& softmax)
      : block_(block), scratch_(scratch), softmax_(softmax) {}

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
    direct_qk<kCompute>(cache(block_.k(), block_.in.k.stride_head, block_.problem.dim_qk), read,
                        block_.problem.dim_qk, block_.problem.dtype_kv,
                        scratch_.q + static_cast<int64_t>(tile.row) * scratch_.q_words,
                        scratch_.q_words, tile.rows() / block_.kv_heads, s, scratch_.score_columns);
    if (has_units()) multiply_by_units(block_.in.descale_k, read, tile.rows(), s);
  }

  // O += P V.
  void pv(const Tile& tile) {
    const Interval read = keys_read(tile);
    const int32_t rows = tile.rows(), head_rows = rows / block_.kv_heads;
    const int64_t columns = scratch_.v_columns;
    float* o = scratch_.o + static_cast<int64_t>(tile.row) * columns;
    // Where P may be 0 it must not meet infinities and NaN, which the result shows: such a row is
    // then computed again from its old value.
    float* saved = reinterpret_cast<float*>(scratch_.v);
    if (!tile.full) {
      __builtin_memcpy(saved, o, sizeof(float) * static_cast<size_t>(rows * columns));
    }
    uint32_t* p = scratch_.p + (read.begin - tile.keys.begin) / kWordElements<kCompute>;
    if (has_units()) {
      multiply_by_units(block_.in.descale_v, read, rows, reinterpret_cast<float*>(p));
    }
    direct_pv<kCompute>(cache(block_.v(), block_.in.v.stride_head, block_.problem.dim_v), read,
                        block_.problem.dim_v, block_.problem.dtype_kv, p,
                        scratch_.score_columns / kWordElements<kCompute>, head_rows, o,
                        scratch_.v_columns);
    if (tile.full) return;
    for (int32_t r = 0; r < rows; ++r, o += columns, saved += columns) {
      if (all_finite(o, columns)) continue;
      __builtin_memcpy(o, saved, sizeof(float) * static_cast<size_t>(columns));
      TokenRows values = block_.v(r / head_rows);
      const float per_unit = 1 / unit();
      if (has_units()) values.descales = {&per_unit, 0, 1};  // P already holds unit and descale
      softmax_.add_pv_nonzero_rows(tile, o, r, 1, values, block_.problem.dtype_kv, read);
    }
  }

 private:
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

  // Whether K and V have 8 bits. The unit of a key, times its descale, then multiplies scores and
  // P, of which there are fewer than elements of K and V.
  FLASHATTN_INLINE bool has_units() const {
    return kCompute == Compute::kF32 && block_.problem.has_8bit_cache();
  }
  FLASHATTN_INLINE float unit() const {
    return block_.problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3 ? kUnit<FLASHATTN_DTYPE_F8E4M3>
                                                             : kUnit<FLASHATTN_DTYPE_I8>;
  }

  // x[r][j - keys.begin] *= unit of key j, r < rows. A P of 0 stays 0 whatever the descale.
  void multiply_by_units(const flashattn_tensor& descales, Interval keys, int32_t rows,
                         float* x) const {
    const int32_t head_rows = rows / block_.kv_heads, count = keys.end - keys.begin;
    float units[kDirectKeys + kWidth];
    for (int32_t r = 0; r < rows; ++r, x += scratch_.score_columns) {
      if (r % head_rows == 0) {
        const Descales head =
            descales_of(block_.problem, descales, block_.b, block_.kv_head + r / head_rows);
        if (head.data && head.block == 1) {  // without a division for each token
          const float* of_key = head.data + keys.begin * head.stride;
          for (int32_t n = 0; n < count; ++n) units[n] = unit() * of_key[n * head.stride];
        } else {
          for (int32_t j = keys.begin; j < keys.end;) {
            const int64_t next = (int64_t{j / head.block} + 1) * head.block;
            const int32_t end = head.data ? clamp_index(next, keys.end) : keys.end;
            fill(units, j - keys.begin, end - keys.begin, unit() * head.of(j));
            j = end;
          }
        }
        fill(units, count, round_up(count, kWidth), 1.0f);
      }
      for (int32_t c = 0; c < count; c += kWidth) {
        const Floats before = load(x + c);
        store(x + c, select(before == 0.0f, before, before * load(units + c)));
      }
    }
  }

  const QBlock& block_;
  ForwardScratch<kCompute>& scratch_;
  SoftmaxState<kCompute>& softmax_;
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
