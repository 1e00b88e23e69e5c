// In which order the blocks of a grid take units of work that share what they read: pure, for the
// host and for kernels.
#pragma once

#include "core/divisor.h"

namespace flashattn {

// Units are taken a section at a time, as many as fit a cache. A unit takes `turns` blocks: of a
// section all units have their first turn, then all their second. The last section may be smaller.
struct Sections {
  Divisor blocks, units;  // of a section
  Divisor last_units;     // of the last one
  int32_t last;

  // fitting: units that fit the cache at once. Nothing for grids that cannot be launched: of no
  // block, or of 2^31 and more.
  static constexpr Sections of(int64_t units, int64_t turns, int64_t fitting) {
    if (units * turns <= 0 || units * turns > INT32_MAX) return {};
    const int64_t most = fitting < units ? fitting : units, width = most < 1 ? 1 : most;
    const int64_t last = (units - 1) / width;
    return {Divisor::of(static_cast<int32_t>(width * turns)),
            Divisor::of(static_cast<int32_t>(width)),
            Divisor::of(static_cast<int32_t>(units - last * width)), static_cast<int32_t>(last)};
  }

  struct Place {
    int32_t turn, unit;
  };

  FLASHATTN_HD constexpr Place place(int32_t block) const {
    const int32_t section = blocks.quotient(block), rest = block - section * blocks.by;
    const Divisor width = section == last ? last_units : units;
    const int32_t turn = width.quotient(rest);
    return {turn, section * units.by + rest - turn * width.by};
  }
};

}  // namespace flashattn
