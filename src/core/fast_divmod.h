// Division by a number that the host knows, as a multiplication. An integer division takes some 25
// instructions on a GPU.
#pragma once

#include <cstdint>

#include "core/mask_geometry.h"

namespace flashattn {

struct FastDivmod {
  int32_t divisor;
  uint32_t factor;
  int32_t shift;

  // divisor > 0. factor / 2^shift is 1 / divisor rounded up; the error changes no quotient below
  // 2^31.
  static constexpr FastDivmod of(int32_t divisor) {
    int32_t bits = 0;
    while ((int64_t{1} << bits) < divisor) ++bits;
    const int64_t power = int64_t{1} << (31 + bits);
    return {divisor, static_cast<uint32_t>(ceil_div(power, divisor)), 31 + bits};
  }

  // x / divisor, for x >= 0.
  FLASHATTN_HD constexpr int32_t quotient(int32_t x) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(x)) * factor >> shift);
  }
};

}  // namespace flashattn
