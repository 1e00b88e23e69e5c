// Tiles of the forward pass, and the memory in which a thread works on one.
#pragma once

#include "cpu/amx_mainloop.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Scores of some rows against as many keys as, packed, stay in a core's L2 cache beside what passes
// by: every tile costs each of its rows some 80 cycles. Blocks of many rows, so that packing is a
// small part of the work.
inline Tiling forward_tiling(const Problem& problem) {
  const int32_t dim = problem.dim_qk > problem.dim_v ? problem.dim_qk : problem.dim_v;
  if (kHasAmx && problem.dtype == FLASHATTN_DTYPE_BF16) {  // two tile registers high
    // Packed keys are shared; queries and O, too, are to stay in the L2 cache.
    const int32_t rows = dim <= 256 ? 512 : 256;
    if (uses_amx_mainloop(problem)) {
      return {rows, 32, dim <= 64 ? 1024 : dim <= 128 ? 512 : dim <= 256 ? 256 : 128};
    }
    return {rows, 32, dim <= 64 ? 1536 : dim <= 128 ? 768 : dim <= 256 ? 128 : 256};
  }
  const int32_t rows = dim <= 128 ? 1056 : dim <= 256 ? 528 : 264;
  static_assert(kDirectRows >= 48, "bands of a tile");
  // Eight or four micro-kernels high: caches of machines with wide vectors are larger. Whole panels
  // and whole tiles of the dropout.
  const bool wide = kWidth == 16;
  const int32_t tile_q = wide ? 48 : 24, keys = (wide ? 1024 : 768) * 64;
  return {rows / tile_q * tile_q, tile_q, keys / (dim < 64 ? 64 : dim) / 64 * 64};
}

// Of blocks that read keys and values as they lie.
constexpr Tiling kDirectTiling = {kDirectRows, kDirectRows, kDirectKeys};

template <Compute kCompute>
struct ForwardScratch {
  int32_t k_words, q_words, v_columns, tile_kv;
  bool amx_mainloop;         // as amx_chunks.h has it
  int32_t score_columns;     // keys of a tile whose scores are held at once
  int64_t k_panel, v_panel;  // units from panel to panel
  uint32_t *q, *k, *v, *p;
  float *s, *o, *m, *l, *rest;
  uint8_t* keep;
  bool* redo;                 // of each row, where references are kept
  int64_t bytes, tile_bytes;  // of all, and of k and v

  FLASHATTN_INLINE ForwardScratch(const Problem& problem, const Tiling& tiling, char* base) {
    constexpr int kU = kWordElements<kCompute>, kColumns = kPanelOf<kCompute>;
    tile_kv = tiling.tile_kv;
    amx_mainloop =
        kFixedBase<kCompute> && tiling.tile_q == kMainloopRows && uses_amx_mainloop(problem);
    score_columns = amx_mainloop ? kSubtileKeys : tile_kv;
    k_words = (problem.dim_qk + kU - 1) / kU;
    q_words = round_up(k_words, kWidth);
    v_columns = round_up(problem.dim_v, kWidth);
    k_panel = static_cast<int64_t>(k_words) * kColumns;
    v_panel = static_cast<int64_t>(tile_kv) / kU * kColumns + kPanelGap<kCompute>;
    int64_t at = 0;
    const auto take = [&](int64_t words) {
      char* p_at = base ? base + at : nullptr;  // NULL: only measured
      at += (words * 4 + 63) / 64 * 64;
      return p_at;
    };
    const int64_t rows = tiling.q_block_rows;
    q = reinterpret_cast<uint32_t*>(take(rows * q_words));
    const int64_t tile_at = at;
    k = reinterpret_cast<uint32_t*>(take(tile_kv / kColumns * k_panel));
    v = reinterpret_cast<uint32_t*>(take(round_up(v_columns, kColumns) / kColumns * v_panel));
    tile_bytes = at - tile_at;
    s = reinterpret_cast<float*>(take(static_cast<int64_t>(tiling.tile_q) * score_columns));
    // fp32 weights take the place of the scores.
    p = kCompute == Compute::kF32
            ? reinterpret_cast<uint32_t*>(s)
            : reinterpret_cast<uint32_t*>(take(static_cast<int64_t>(tiling.tile_q) * score_columns /
                                               kU * (amx_mainloop ? kPvSubtiles : 1)));
    o = reinterpret_cast<float*>(take(rows * v_columns));
    // Read in whole vectors.
    m = reinterpret_cast<float*>(take(rows + kWidth));
    l = reinterpret_cast<float*>(take(rows + kWidth));
    rest = reinterpret_cast<float*>(take(rows + kWidth));
    keep = reinterpret_cast<uint8_t*>(take(
        problem.dropout > 0 ? (static_cast<int64_t>(tiling.tile_q) + 32) * score_columns / 4 : 0));
    redo = reinterpret_cast<bool*>(take(kFixedBase<kCompute> ? (rows + 3) / 4 : 0));
    bytes = at;
  }

  // From now on k and v lie there.
  FLASHATTN_INLINE void use_tile(char* tile) {
    v = reinterpret_cast<uint32_t*>(tile +
                                    (reinterpret_cast<char*>(v) - reinterpret_cast<char*>(k)));
    k = reinterpret_cast<uint32_t*>(tile);
  }

  // Of rows from `row` on and packed keys from `skip` on.
  FLASHATTN_INLINE AmxMainloopOperands mainloop_operands(int64_t row, int32_t skip) const {
    constexpr int kColumns = kPanelOf<kCompute>;
    return {q + row * q_words,
            q_words,
            k + skip / kColumns * k_panel,
            v + int64_t{skip / kWordElements<kCompute>} * kColumns,
            v_panel,
            o + row * v_columns,
            v_columns,
            s,
            p};
  }

  // Zeros behind so many packed values, to the end of a step of a chunk.
  FLASHATTN_INLINE void clear_values(int32_t count) const {
    constexpr int kColumns = kPanelOf<kCompute>, kU = kWordElements<kCompute>;
    const int32_t used = (count + kU - 1) / kU, all = round_up(count, kStepKeys) / kU;
    for (int32_t c = 0; c < v_columns; c += kColumns) {
      __builtin_memset(v + c / kColumns * v_panel + used * kColumns, 0,
                       static_cast<size_t>(all - used) * kColumns * 4);
    }
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
