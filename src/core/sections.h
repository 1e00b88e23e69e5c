// In which order the blocks of a grid take units of work that share what they read: pure, for the
// host and for kernels.
#pragma once

#include <algorithm>

#include "core/divisor.h"

namespace flashattn {

// Units, whose first turns take longest if any do, are taken a section at a time, as many as fit a
// cache. Of a section all units have their first turn, then all their second.
struct Sections {
  int32_t turns;          // of a unit
  Divisor blocks, units;  // of a section
  Divisor last_units;     // of the last one
  int32_t last;

  // fitting: units that fit the cache at once. at_end: the fewest of the last section. Nothing for
  // grids that cannot be launched: of no block, or of 2^31 and more.
  static constexpr Sections of(int64_t units, int64_t turns, int64_t fitting, int64_t at_end = 1) {
    if (units * turns <= 0 || units * turns > INT32_MAX) return {};
    const int64_t width = std::clamp<int64_t>(fitting, 1, units);
    const int64_t last = (units - std::clamp<int64_t>(at_end, 1, units)) / width;
    return {static_cast<int32_t>(turns), Divisor::of(static_cast<int32_t>(width * turns)),
            Divisor::of(static_cast<int32_t>(width)),
            Divisor::of(static_cast<int32_t>(units - last * width)), static_cast<int32_t>(last)};
  }

  // Units of the last section for turns that differ, taken by so many workers at the same time: two
  // turns for each, so that the long ones start before half of the section's work is done, and the
  // short ones even out the end.
  static constexpr int64_t even_end(int32_t workers, int64_t turns) {
    return ceil_div(2 * static_cast<int64_t>(workers), std::max<int64_t>(turns, 1));
  }

  // The same sections of units with so many turns each; nothing if that is too many.
  constexpr Sections with_turns(int64_t n) const {
    const int64_t all = static_cast<int64_t>(last) * units.by + last_units.by;
    if (all <= 0 || n <= 0 || n > INT32_MAX / all) return {};
    Sections s = *this;
    s.turns = static_cast<int32_t>(n);
    s.blocks = Divisor::of(static_cast<int32_t>(units.by * n));
    return s;
  }

  FLASHATTN_HD constexpr int32_t count() const { return (last * units.by + last_units.by) * turns; }

  // The units, from the first on, of which the first n blocks have a turn.
  constexpr int32_t units_of(int32_t n) const {
    const int32_t before = std::min(blocks.quotient(n), last), rest = n - before * blocks.by;
    return before * units.by + std::min(rest, before == last ? last_units.by : units.by);
  }

  struct Place {
    int32_t turn, unit;
  };

  FLASHATTN_HD constexpr Place place(int32_t block) const {
    const int32_t number = blocks.quotient(block);
    const bool at_end = number >= last;
    const int32_t section = at_end ? last : number;
    const Divisor width = at_end ? last_units : units;
    const int32_t rest = block - section * blocks.by, turn = width.quotient(rest);
    return {turn, section * units.by + rest - turn * width.by};
  }
};

}  // namespace flashattn
