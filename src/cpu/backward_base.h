// Weights from an lse that is large. An fp32 lse of 1e6 stands for sums of weights from e^-1/32 to
// e^1/32 of its own: of rows with one so large that this tells, the highest score and the sum of
// the weights relative to it are found again, from the products that the main pass has, to the bit.
#pragma once

#include "cpu/weights.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// From here on. Below, the rounding of lse and of its product with log2(e) changes a weight by less
// than 2^-13, a quarter of a rounding to fp16.
constexpr float kLargeLse = 1024;

FLASHATTN_INLINE bool is_large(float lse) {
  return __builtin_fabsf(lse) >= kLargeLse && __builtin_fabsf(lse) <= kLargest;
}

// The part of lse within which the highest score and the sum say what it is: scores of another
// order of summation differ by as much. An lse that is further above them counts keys that this
// call does not see, as where a ring of devices shares them.
constexpr double kLseRounding = 0x1p-21;

struct QueryBase {
  bool wanted = false;
  float m = -kInfinity;  // the highest score
  double l = 0;          // the sum of the weights relative to it

  // Scores of some more keys.
  void add(const float* s, Interval columns, float log2) {
    Floats each[1];
    highest_of<1>(s, 0, columns, each);
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

  // What lse is above m, in units of log2(e).
  float above(float lse, ScoreUnit unit, float sink) const {
    const double given = double{lse} - m * unit.nats, up = double{sink} - m * unit.nats;
    const double own = up > 0 ? up + __builtin_log(l * __builtin_exp(-up) + 1)
                              : __builtin_log(l + __builtin_exp(up));
    const bool knows = !(given - own > kLseRounding * __builtin_fabs(double{lse}));
    return static_cast<float>((knows ? own : given) * double{kLog2E});
  }
};

// Scores relative to m, in units of log2(e).
FLASHATTN_INLINE void to_exponents(float* s, Interval columns, float m, float log2) {
  for (int32_t c = columns.begin; c < columns.end; c += kWidth) {
    store(s + c, (load(s + c) - splat(m)) * splat(log2));
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
