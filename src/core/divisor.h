// Division by a number that the host knows, as a multiplication: a GPU needs some 25 instructions
// for one of integers.
#pragma once

#include <cstdint>

#include "core/geometry.h"

namespace flashattn {

struct Divisor {
  int32_t by;
  uint32_t factor;
  int32_t shift;

  // by > 0. factor / 2^shift is 1 / by, rounded up: by less than makes a difference below 2^31.
  static constexpr Divisor of(int32_t by) {
    int32_t bits = 0;
    while ((int64_t{1} << bits) < by) ++bits;
    const int64_t power = int64_t{1} << (31 + bits);
    return {by, static_cast<uint32_t>(ceil_div(power, by)), 31 + bits};
  }

  // x / by, of x >= 0.
  FLASHATTN_HD constexpr int32_t quotient(int32_t x) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(x)) * factor >> shift);
  }
};

}  // namespace flashattn
