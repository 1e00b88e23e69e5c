// The backward pass with a large lse. An fp32 lse of 1e6 stands for any sum of P within a factor of
// e^(1/32). For rows with an lse so large that this shows, the maximum of the scores and the sum of
// P relative to it are computed again, from the same products as the main pass, bit for bit.
#pragma once

#include "cpu/softmax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE bool is_large(float lse) {
  return __builtin_fabsf(lse) >= kLargeLse && __builtin_fabsf(lse) <= kMaxFloat;
}

struct RowBase {
  bool wanted = false;
  float m = -kInfinity;  // the maximum of the scores
  double l = 0;          // the sum of P relative to m

  // Adds scores of some more keys.
  void add(const float* s, Interval columns, float log2) {
    Floats each[1];
    max_of_rows<1>(s, 0, columns, each);
    Floats lanes[kWidth];
    for (Floats& lane : lanes) lane = each[0];
    const float highest = max_each(lanes)[0];
    if (highest == -kInfinity) return;
    if (!(highest <= m)) {
      l = m == -kInfinity ? 0 : l * double{exp2((splat(m) - splat(highest)) * splat(log2))[0]};
      m = highest;
    }
    Floats weights{};
    for (int32_t c = columns.begin; c < columns.end; c += kWidth) {
      weights += exp2((load(s + c) - splat(m)) * splat(log2));
    }
    l += double{sum(weights)};
  }

  // Returns the recomputed lse less m, in units of log2(e). The given lse stands if it counts keys
  // that this call does not see: if it exceeds the recomputed one by more than another order of
  // summation may change a score whose products have magnitudes with the sum `magnitude`, in nats.
  float above(float lse, ScoreUnit unit, float sink, float magnitude) const {
    const double given = double{lse} - m * unit.nats, up = double{sink} - m * unit.nats;
    const double own = up > 0 ? up + __builtin_log(l * __builtin_exp(-up) + 1)
                              : __builtin_log(l + __builtin_exp(up));
    const double largest = __builtin_fmax(__builtin_fabs(double{lse}), double{magnitude});
    const bool knows = !(given - own > kLseParts * largest);
    return static_cast<float>((knows ? own : given) * double{kLog2E});
  }
};

// Makes scores relative to m, in units of log2(e).
FLASHATTN_INLINE void to_exponents(float* s, Interval columns, float m, float log2) {
  for (int32_t c = columns.begin; c < columns.end; c += kWidth) {
    store(s + c, (load(s + c) - splat(m)) * splat(log2));
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
