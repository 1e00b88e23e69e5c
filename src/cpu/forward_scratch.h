// Tile sizes of the forward pass, and the memory in which a thread computes a Q block.
#pragma once

#include "core/bump_allocator.h"
#include "cpu/amx_mainloop.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// tile_kv: as many packed keys as stay in a core's L2 cache beside the data that streams through
// it. Tiles are long because each KV tile costs each row some 80 cycles. Q blocks have many rows,
// so that packing is a small part of the work.
inline Tiling forward_tiling(const Problem& problem) {
  const int32_t dim = problem.dim_qk > problem.dim_v ? problem.dim_qk : problem.dim_v;
  if (kHasAmx && inputs_are_bf16(problem)) {  // tile_q: two tile registers high
    // Q blocks share packed keys, and their Q and O shall stay in the L2 cache, too.
    const int32_t rows = dim <= 256 ? 512 : dim <= 512 ? 256 : 128;
    if (uses_amx_mainloop(problem)) {
      return {rows, 32, dim <= 64 ? 1024 : dim <= 128 ? 512 : dim <= 256 ? 256 : 128};
    }
    return {rows, 32, dim <= 64 ? 1536 : dim <= 128 ? 768 : dim <= 256 || dim > 512 ? 128 : 256};
  }
  const int32_t rows = dim <= 128 ? 1056 : dim <= 256 ? 528 : dim <= 512 ? 264 : 144;
  static_assert(kDirectRows >= 48, "ScoreTile::row_columns has room for every tile_q");
  // tile_q: eight or four micro-tiles; caches of machines with wide vectors are larger. tile_kv:
  // whole panels, and whole 16 x 16 tiles of dropout.
  const bool long_vectors = kWidth == 16;
  const int32_t tile_q = long_vectors ? 48 : 24, keys = (long_vectors ? 1024 : 768) * 64;
  const int32_t tile_kv = keys / (dim < 64 ? 64 : dim) / 64 * 64;
  return {rows / tile_q * tile_q, tile_q, tile_kv < 64 ? 64 : tile_kv};
}

// The tiling of Q blocks that read K and V where they lie.
constexpr Tiling kDirectTiling = {kDirectRows, kDirectRows, kDirectKeys};

template <Compute kCompute>
struct ForwardScratch {
  KeptKvTile* kept;          // says what k and v hold
  int32_t k_words, q_words;  // words of a row of K and of Q, the latter rounded up to vectors
  int32_t v_columns;         // elements of a row of V and O, rounded up to vectors
  int32_t tile_kv;
  bool amx_mainloop;         // whole subtiles go through amx_mainloop.h
  int32_t score_columns;     // keys whose scores are held at once
  int64_t k_panel, v_panel;  // words from panel to panel
  uint32_t *q, *k, *v;       // operands of gemm.h
  float* s;                  // scores (tile_q, score_columns)
  uint32_t* p;               // P, an operand; in fp32 it takes the place of s
  // The state of each row: unnormalised O; the maximum or fixed base m of its scores; the sum l of
  // P relative to m, and what rounding took from l (rest).
  float *o, *m, *l, *rest;
  uint8_t* keep;              // keep bytes of dropout, one per element of P
  bool* redo;                 // rows that a fixed base does not serve
  float* latent;              // LATENT_KV: the rows of a KV tile before they are packed
  int64_t bytes, tile_bytes;  // bytes of all arrays; bytes of k and v

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
    BumpAllocator memory(base);
    const int64_t rows = tiling.q_block_rows, tile_q = tiling.tile_q;
    kept = memory.take<KeptKvTile>(1);
    q = memory.take<uint32_t>(rows * q_words);
    const int64_t before = memory.bytes();
    k = memory.take<uint32_t>(tile_kv / kColumns * k_panel);
    v = memory.take<uint32_t>(round_up(v_columns, kColumns) / kColumns * v_panel);
    tile_bytes = memory.bytes() - before;
    s = memory.take<float>(tile_q * score_columns);
    if constexpr (kCompute == Compute::kF32) {
      p = reinterpret_cast<uint32_t*>(s);
    } else {
      const int64_t subtiles = amx_mainloop ? kPvSubtiles : 1;
      p = memory.take<uint32_t>(tile_q * score_columns / kU * subtiles);
    }
    o = memory.take<float>(rows * v_columns);
    // These are read in whole vectors.
    m = memory.take<float>(rows + kWidth);
    l = memory.take<float>(rows + kWidth);
    rest = memory.take<float>(rows + kWidth);
    keep = memory.take<uint8_t>(problem.dropout > 0 ? (tile_q + 32) * score_columns : 0);
    redo = memory.take<bool>(kFixedBase<kCompute> ? rows : 0);
    const int64_t latent_row = round_up(problem.dim_qk, kWidth);
    latent = memory.take<float>(problem.is_latent() ? tile_kv * latent_row + kWidth : 0);
    bytes = memory.bytes();
  }

  // Points k and v to a packed tile.
  FLASHATTN_INLINE void use_tile(char* tile) {
    v = reinterpret_cast<uint32_t*>(tile +
                                    (reinterpret_cast<char*>(v) - reinterpret_cast<char*>(k)));
    k = reinterpret_cast<uint32_t*>(tile);
  }

  // The operands of the AMX mainloop: rows from `row` on, packed keys from `skip` on.
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

  // Zeroes packed values from number `count` on, to the end of a step of the AMX mainloop.
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
