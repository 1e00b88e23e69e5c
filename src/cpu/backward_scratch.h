// Tile sizes of the backward pass, and the memory in which a thread computes a tile.
#pragma once

#include "core/bump_allocator.h"
#include "cpu/dropout.h"
#include "cpu/mask.h"
#include "cpu/score_mod.h"

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE bool backward_is_bf16(const Problem& problem) {
  return kHasBf16Dot && inputs_are_bf16(problem) && problem.dtype_o == FLASHATTN_DTYPE_BF16;
}

// On AMX dK and dV are computed transposed, with keys as columns. P and dS, in words of two
// queries, are then B operands as the softmax writes them, and only Q and dO, which all keys share,
// are transposed.
template <Compute kCompute>
constexpr bool kKeysAsColumns = kHasAmx && kCompute == Compute::kBf16Pairs;

constexpr int32_t kMaxBackwardRows = 128;  // rows of a Q tile, at most

inline Tiling backward_tiling(const Problem& problem) {
  const int32_t dim = problem.dim_qk > problem.dim_v ? problem.dim_qk : problem.dim_v;
  // Sequences may share dbias: then all have the same tiles, whatever their length.
  const bool same = problem.features & FLASHATTN_FEATURE_DBIAS;
  if (kHasAmx && backward_is_bf16(problem)) {
    // Sizes are multiples of a tile register. They are large, so that sums seldom move between the
    // caches, and keep rows of scores from lying a power of two apart.
    const int32_t rows = dim <= 64 ? 128 : dim <= 128 || dim > 256 ? 96 : 64;
    const int32_t keys = dim <= 256 ? 320 : dim <= 512 ? 192 : 128;
    return {rows, rows, keys, same ? 0 : keys};
  }
  Tiling tiling{};
  if (kWidth == 16) {  // machines with wide vectors have larger caches
    // fp32 tiles are so small that threads of unequal speed end together.
    const int32_t most = !backward_is_bf16(problem) ? 192 : dim <= 64 ? 384 : 256;
    const int32_t many = dim <= 128 ? most : dim <= 256 ? 192 : 128;
    tiling = {96, 96, many, same ? 0 : many * 2 / 3 / kPanel * kPanel};
  } else {
    const int32_t rows = dim <= 256 ? 96 : 48;
    tiling = {rows, rows, dim <= 64 ? 256 : dim <= 192 ? 128 : 64};
  }
  if (problem.has_mask(FLASHATTN_MASK_BLOCKS)) {
    // Chooses tiles that do not straddle mask blocks, of whole 16 x 16 tiles of dropout.
    for (int32_t rows = tiling.q_block_rows * 4 / 3; rows >= tiling.q_block_rows / 3; rows -= 16) {
      if (problem.block_q % rows != 0) continue;
      tiling.q_block_rows = tiling.tile_q = rows;
      break;
    }
  }
  return tiling;
}

inline int32_t dq_columns(const Problem& problem) { return round_up(problem.dim_qk, kWidth); }

template <Compute kCompute>
struct BackwardScratch {
  static constexpr bool kIsF32 = kCompute == Compute::kF32;
  int32_t tile_q, tile_kv, qk_words, v_words, qk_columns, v_columns;
  int64_t qk_panel, v_panel;  // K^T and V^T: words from panel to panel
  int64_t q_panel, kv_panel;  // operands with queries, keys as k: words from panel to panel
  uint32_t *kt, *vt, *k;
  uint32_t *q_a, *do_a;  // Q and dO with the head dimension as k
  uint32_t *q_k, *do_k;  // Q and dO with queries as k; in fp32 also q_a and do_a
  float *s, *dp, *derivative, *dk, *dv;
  // P and dS. p_t and ds_t: words of two queries, pair_panel words from panel to panel of keys and
  // pair_row from pair to pair of queries. ds: words of two keys.
  uint32_t *p_t, *ds_t, *ds;
  int64_t pair_panel, pair_row;
  uint8_t* keep;
  int64_t bytes;

  FLASHATTN_INLINE BackwardScratch(const Problem& problem, int32_t queries, int32_t keys,
                                   char* base) {
    constexpr int kU = kWordElements<kCompute>, kColumns = kPanelOf<kCompute>;
    tile_q = queries;
    tile_kv = keys;
    const int32_t qk = (problem.dim_qk + kU - 1) / kU, v = (problem.dim_v + kU - 1) / kU;
    qk_words = round_up(qk, kWidth);
    v_words = round_up(v, kWidth);
    qk_columns = round_up(problem.dim_qk, kWidth);
    v_columns = round_up(problem.dim_v, kWidth);
    qk_panel = static_cast<int64_t>(qk) * kColumns;
    v_panel = static_cast<int64_t>(v) * kColumns;
    q_panel = static_cast<int64_t>(tile_q) / kU * kColumns + kPanelGap<kCompute>;
    kv_panel = static_cast<int64_t>(tile_kv) / kU * kColumns + kPanelGap<kCompute>;
    const int64_t qk_panels = round_up(qk_columns, kColumns) / kColumns;
    const int64_t v_panels = round_up(v_columns, kColumns) / kColumns;
    const int64_t tile = static_cast<int64_t>(tile_q) * tile_kv;
    BumpAllocator memory(base);
    const auto words = [&](int64_t n) { return memory.take<uint32_t>(n); };
    const auto floats = [&](int64_t n) { return memory.take<float>(n); };
    kt = words(tile_kv / kColumns * qk_panel);
    vt = words(tile_kv / kColumns * v_panel);
    k = words(qk_panels * kv_panel);
    q_k = words(qk_panels * q_panel);
    do_k = words(v_panels * q_panel);
    q_a = kIsF32 ? q_k : words(static_cast<int64_t>(tile_q) * qk_words);
    do_a = kIsF32 ? do_k : words(static_cast<int64_t>(tile_q) * v_words);
    s = floats(tile);
    dp = floats(tile);
    derivative = floats(problem.softcap != 0 ? 2 * tile_kv : 0);
    dk = floats(static_cast<int64_t>(tile_kv) * qk_columns);
    dv = floats(static_cast<int64_t>(tile_kv) * v_columns);
    // In fp32 P and dS overwrite the scores and dP, and serve in either orientation.
    pair_panel = kKeysAsColumns<kCompute> ? q_panel : kColumns;
    pair_row = kKeysAsColumns<kCompute> ? kColumns : tile_kv;
    const int64_t pairs = kKeysAsColumns<kCompute> ? tile_kv / kColumns * pair_panel : tile / kU;
    p_t = kIsF32 ? reinterpret_cast<uint32_t*>(s) : words(pairs);
    ds_t = kIsF32 ? reinterpret_cast<uint32_t*>(dp) : words(pairs);
    ds = kIsF32 ? ds_t : words(tile / kU);
    keep = memory.take<uint8_t>(problem.dropout > 0 ? tile : 0);
    bytes = memory.bytes();
  }

  // q_a or do_a as an A operand. words: words of a row.
  FLASHATTN_INLINE MatrixA left(const uint32_t* rows, int32_t words) const {
    return kIsF32 ? MatrixA{rows, kPanel, 1, q_panel} : MatrixA{rows, words, 1};
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
