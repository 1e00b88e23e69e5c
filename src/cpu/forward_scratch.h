// Tiles of the forward pass, and the memory in which a thread works on one.
#pragma once

#include "cpu/scores.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Scores of some rows against as many keys as, packed, stay in a core's L2 cache beside what passes
// by: every tile costs each of its rows some 80 cycles. Blocks of many rows, so that packing is a
// small part of the work.
inline Tiling forward_tiling(const Problem& problem) {
  const int32_t dim = problem.dim_qk > problem.dim_v ? problem.dim_qk : problem.dim_v;
  if (kHasAmx && problem.dtype == FLASHATTN_DTYPE_BF16) {  // two tile registers high
    if (dim <= 128) return {1056, 32, dim <= 64 ? 1536 : 768};
    return dim <= 256 ? Tiling{512, 32, 128} : Tiling{256, 32, 256};
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
  int32_t q_units, v_columns, tile_kv;
  int64_t k_panel, v_panel;  // units from panel to panel
  uint32_t *q, *k, *v, *p;
  float *s, *o, *m, *l;
  uint8_t* keep;
  int64_t bytes;

  FLASHATTN_INLINE ForwardScratch(const Problem& problem, const Tiling& tiling, char* base) {
    constexpr int kU = kUnit<kCompute>;
    tile_kv = tiling.tile_kv;
    const int32_t k_units = (problem.dim_qk + kU - 1) / kU;
    q_units = round_up(k_units, kWidth);
    v_columns = round_up(problem.dim_v, kWidth);
    k_panel = static_cast<int64_t>(k_units) * kPanel;
    v_panel = static_cast<int64_t>(tile_kv) / kU * kPanel;
    int64_t at = 0;
    const auto take = [&](int64_t words) {
      char* p_at = base + at;
      at += (words * 4 + 63) / 64 * 64;
      return p_at;
    };
    const int64_t rows = tiling.rows;
    q = reinterpret_cast<uint32_t*>(take(rows * q_units));
    k = reinterpret_cast<uint32_t*>(take(tile_kv / kPanel * k_panel));
    v = reinterpret_cast<uint32_t*>(take(round_up(v_columns, kPanel) / kPanel * v_panel));
    s = reinterpret_cast<float*>(take(static_cast<int64_t>(tiling.tile_q) * tile_kv));
    // fp32 weights take the place of the scores.
    p = kCompute == Compute::kF32
            ? reinterpret_cast<uint32_t*>(s)
            : reinterpret_cast<uint32_t*>(take(static_cast<int64_t>(tiling.tile_q) * tile_kv / kU));
    o = reinterpret_cast<float*>(take(rows * v_columns));
    // Read in whole vectors.
    m = reinterpret_cast<float*>(take(rows + kWidth));
    l = reinterpret_cast<float*>(take(rows + kWidth));
    keep = reinterpret_cast<uint8_t*>(
        take(problem.dropout > 0 ? (static_cast<int64_t>(tiling.tile_q) + 32) * tile_kv / 4 : 0));
    bytes = at;
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
