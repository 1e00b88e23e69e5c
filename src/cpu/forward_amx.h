// Q K^T and P V on AMX tile registers: whole subtiles of 32 rows in one loop with the softmax
// (amx_mainloop.h), the rest as PackedKv computes it.
#pragma once

#include "cpu/forward_packed.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
class AmxKv : public PackedKv<kCompute> {
 public:
  using PackedKv<kCompute>::PackedKv;

  // Runs the mainloop over as many subtiles from the start of `active` as it can; returns how many.
  int32_t run_mainloop(int32_t row, int32_t end_row, Interval active) {
    if (!softmax_.fixed_base || end_row - row != kMainloopRows) return 0;
    int32_t keys = 0, subtiles = 0;
    for (; subtiles < kMaxSubtiles && keys == subtiles * kSubtileKeys; ++subtiles) {
      const int32_t first = active.begin + keys;
      const Interval all = intersect({first, first + kSubtileKeys}, active);
      if (block_.meets_tree(all)) break;  // visible_ holds intervals, a tree needs bits
      bool full = true;
      const Interval visible = block_.visible_to(row, end_row, all, &full);
      if (visible.begin >= visible.end) break;
      this->need_packed();
      const int32_t count = round_up(visible.end - first, kStepKeys);
      // Values past the end of the tile are zeros, but not those of keys whose mask block is off.
      masked_[subtiles] = !full || count != visible.end - first;
      if (!this->finite_) break;
      if (masked_[subtiles]) block_.rows_visible(row, first, all, visible_[subtiles]);
      keys += count;
    }
    if (keys == 0) return 0;
    int32_t left = static_cast<int32_t>(ceil_div(block_.rows - row, kMainloopRows)) * subtiles;
    return amx_mainloop(
        scratch_.mainloop_operands(row, active.begin - this->kv_tile_.begin), keys,
        block_.problem.scale * kLog2E, scratch_.m + row, scratch_.l + row, scratch_.rest + row,
        [&](int32_t n) { return masked_[n] ? visible_[n] : nullptr; },
        [&] {
          for (RowPrefetch& next : softmax_.prefetch) next.prefetch(left);
          --left;
        });
  }

 private:
  using PackedKv<kCompute>::block_;
  using PackedKv<kCompute>::scratch_;
  using PackedKv<kCompute>::softmax_;

  static constexpr int32_t kMaxSubtiles = 8;
  bool masked_[kMaxSubtiles];                      // some row does not see some key of the subtile
  Interval visible_[kMaxSubtiles][kMainloopRows];  // if masked_: the columns that each row sees
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
