// Q K^T and P V from packed operands: K and V of a tile are packed once for all rows of a Q block,
// and, where that pays, once for all Q blocks.
#pragma once

#include "cpu/latent.h"
#include "cpu/softmax_state.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
class PackedKv {
 public:
  using Tile = ScoreTile<kCompute>;
  // Rows of a micro-tile may need fewer columns than others.
  static constexpr bool kSameColumns = false;

  FLASHATTN_INLINE PackedKv(const QBlock& block, ForwardScratch<kCompute>& scratch,
                            SoftmaxState<kCompute>& softmax)
      : block_(block),
        scratch_(scratch),
        softmax_(softmax),
        own_tile_(reinterpret_cast<char*>(scratch.k)) {}

  void prepare_queries() {}

  // Sets the KV tile to work on. It is packed when some rows see it.
  void begin_tile(Interval kv_tile) {
    kv_tile_ = kv_tile;
    packed_ = false;
  }

  // Computes scores of whole subtiles, beginning with the keys of `active`, in a loop that includes
  // the softmax and P V. Returns how many subtiles: none here.
  int32_t run_mainloop(int32_t, int32_t, Interval) { return 0; }

  // S = Q K^T.
  void qk(const Tile& tile) {
    need_packed();
    gemm<kCompute>(
        tile.rows(), tile.columns, scratch_.k_words,
        {scratch_.q + static_cast<int64_t>(tile.row) * scratch_.q_words, scratch_.q_words, 1},
        {scratch_.k + tile.skip / kPanelOf<kCompute> * scratch_.k_panel, scratch_.k_panel},
        {scratch_.s, scratch_.score_columns}, false,
        [&](int32_t r) { return tile.scored_columns(r); });
  }

  // O += P V.
  void pv(const Tile& tile) {
    constexpr int kU = kWordElements<kCompute>;
    const int32_t rows = tile.rows();
    float* o = scratch_.o + static_cast<int64_t>(tile.row) * scratch_.v_columns;
    // P = 0 must not meet an infinity or a NaN. P may be 0 where all rows see all keys, too: by
    // underflow or dropout. All rows therefore take this path, and a row's bits do not depend on
    // what other rows see.
    if (!finite_) {
      const Source source = source_of(tile.visible);
      return softmax_.add_pv_nonzero_rows(tile, o, 0, rows, source.v, source.dtype, tile.visible);
    }
    const int32_t step = tile.full ? rows : kMicroTileRows<kCompute>;
    for (int32_t r = 0; r < rows; r += step) {
      const Interval k = tile.at(r).k;
      if (k.begin >= k.end) continue;
      gemm<kCompute>(
          rows - r < step ? rows - r : step, {0, scratch_.v_columns}, k.end - k.begin,
          {scratch_.p + int64_t{r} * scratch_.score_columns / kU + k.begin,
           scratch_.score_columns / kU, 1},
          {scratch_.v + int64_t{tile.skip / kU + k.begin} * kPanelOf<kCompute>, scratch_.v_panel},
          {o + int64_t{r} * scratch_.v_columns, scratch_.v_columns}, true);
    }
  }

 protected:
  FLASHATTN_INLINE void need_packed() {
    if (!packed_) pack();
    packed_ = true;
  }

  const QBlock& block_;
  ForwardScratch<kCompute>& scratch_;
  SoftmaxState<kCompute>& softmax_;
  Interval kv_tile_{0, 0};
  bool finite_ = true;  // all values of V in the packed tile are finite

 private:
  // The rows of K and V that are packed, and their type.
  struct Source {
    TokenRows k, v;
    int32_t dtype;
  };

  Source source_of(Interval keys) const {
    if constexpr (kCompute == Compute::kF32) {
      if (block_.problem.is_latent()) {
        const TokenRows rows = widen_latent(block_, keys, scratch_.latent);
        return {rows, rows, FLASHATTN_DTYPE_F32};
      }
    }
    return {block_.k(), block_.v(), block_.problem.dtype_kv};
  }

  void pack() {
    const int64_t shared = block_.shared_tile(kv_tile_.begin);
    scratch_.use_tile(shared < 0 ? own_tile_ : block_.packed_tile(shared));
    if (shared < 0) {
      if (!is_kept()) {
        *scratch_.kept = {block_.b, block_.kv_head, kv_tile_, pack_tile(kv_tile_)};
      }
      finite_ = scratch_.kept->finite;
      return;
    }
    const Interval whole{kv_tile_.begin, kv_tile_.begin + scratch_.tile_kv};
    finite_ = pack_once(block_.job.shared.states + shared,
                        [&] { return pack_tile(intersect(whole, {0, block_.sequence.len.kv})); });
  }

  // Whether the thread's last Q block has left this tile behind.
  bool is_kept() const {
    const KeptKvTile& kept = *scratch_.kept;
    return kept.b == block_.b && kept.kv_head == block_.kv_head &&
           kept.keys.begin == kv_tile_.begin && kept.keys.end == kv_tile_.end;
  }

  // Returns whether all values are finite.
  bool pack_tile(Interval keys) const {
    const Problem& problem = block_.problem;
    const Source source = source_of(keys);
    pack_b_transposed<kCompute>(source.k, keys, problem.dim_qk, source.dtype, scratch_.k);
    const bool finite =
        pack_b<kCompute>(source.v, keys, problem.dim_v, source.dtype, scratch_.v, scratch_.v_panel);
    if (scratch_.amx_mainloop) scratch_.clear_values(keys.end - keys.begin);
    return finite;
  }

  char* const own_tile_;  // where this block packs tiles that it does not share
  bool packed_ = false;
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
