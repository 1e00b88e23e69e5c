// The order of work: every unit has every turn once, section by section, and in each all units
// before the next turn. The last section is long enough to even out the end.
#include "core/sections.h"

#include <climits>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

bool in_order(const Sections& sections, int32_t units, int32_t turns) {
  int32_t block = 0, most = 0;
  for (int32_t section = 0; section <= sections.last; ++section) {
    const int32_t width = section == sections.last ? sections.last_units.by : sections.units.by;
    const int32_t first = section * sections.units.by;
    for (int32_t turn = 0; turn < turns; ++turn) {
      for (int32_t unit = first; unit < first + width; ++unit, ++block) {
        const Sections::Place at = sections.place(block);
        if (at.turn != turn || at.unit != unit) return false;
        most = most > unit ? most : unit + 1;
        if (sections.units_of(block + 1) != most) return false;
      }
    }
  }
  return block == units * turns && block == sections.count() && sections.turns == turns;
}

bool right(int32_t units, int32_t turns, int32_t fitting, int32_t workers) {
  const Sections sections = Sections::of(units, turns, fitting, Sections::even_end(workers, turns));
  const int32_t most = fitting < 1 ? 1 : fitting < units ? fitting : units;
  const int32_t rest = sections.last_units.by;
  // Two turns a worker in the last section, or all there are; and not a section too many.
  const bool even = rest == units || rest * turns >= 2 * workers;
  const bool least = rest <= most || (rest - most) * turns < 2 * workers;
  const Sections others = sections.with_turns(3);
  return in_order(others, units, 3) && others.last == sections.last &&
         in_order(sections, units, turns) && sections.units.by == most && even && least;
}

}  // namespace

int main() {
  for (int32_t units = 1; units <= 20; ++units) {
    for (int32_t turns = 1; turns <= 9; ++turns) {
      for (int32_t fitting = 0; fitting <= 22; ++fitting) {
        for (const int32_t workers : {0, 1, 2, 5, 132}) {
          CHECK(right(units, turns, fitting, workers));
        }
      }
    }
  }
  CHECK(Sections::of(0, 5, 1).count() == 0 && Sections::of(5, 0, 1, 132).count() == 0);
  CHECK(Sections::of(INT64_C(1) << 16, INT64_C(1) << 15, 1).count() == 0);
  CHECK(Sections::of(INT32_MAX, 1, INT32_MAX).place(INT32_MAX - 1).unit == INT32_MAX - 1);
  CHECK(Sections::of(INT32_MAX, 1, 7, 132).count() == INT32_MAX);
  CHECK(Sections::of(0, 5, 1).with_turns(3).count() == 0);
  CHECK(Sections::of(5, 2, 1).with_turns(0).count() == 0);
  CHECK(Sections::of(5, 2, 1).with_turns(INT32_MAX).count() == 0);
  return check_report();
}
