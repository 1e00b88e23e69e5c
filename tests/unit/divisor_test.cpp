// Division by multiplication, where rounding could show: next to multiples, at both ends; and the
// order of work that is found with it.
#include "core/sections.h"

#include <climits>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

bool right(int32_t by) {
  const Divisor divisor = Divisor::of(by);
  const auto same = [&](int64_t x) {
    return x < 0 || x > INT32_MAX ||
           divisor.quotient(static_cast<int32_t>(x)) == static_cast<int32_t>(x) / by;
  };
  bool ok = divisor.by == by;
  for (int64_t n = 0; n < 2000; ++n) {
    const int64_t multiple = n * by, last = INT32_MAX / by * static_cast<int64_t>(by) - multiple;
    for (int64_t d = -1; d <= 1; ++d) ok = ok && same(multiple + d) && same(last + d);
    ok = ok && same(n) && same(INT32_MAX - n);
  }
  return ok;
}

// Every unit has every turn once, section by section, and in each all units before the next turn.
bool in_order(int32_t units, int32_t turns, int32_t fitting) {
  const Sections sections = Sections::of(units, turns, fitting);
  const int32_t width = fitting < 1 ? 1 : fitting;
  int32_t block = 0;
  for (int32_t first = 0; first < units; first += width) {
    for (int32_t turn = 0; turn < turns; ++turn) {
      for (int32_t unit = first; unit < units && unit < first + width; ++unit, ++block) {
        const Sections::Place at = sections.place(block);
        if (at.turn != turn || at.unit != unit) return false;
      }
    }
  }
  return block == units * turns;
}

void test_sections() {
  for (int32_t units = 1; units <= 20; ++units) {
    for (int32_t turns = 1; turns <= 7; ++turns) {
      for (int32_t fitting = 0; fitting <= 22; ++fitting) CHECK(in_order(units, turns, fitting));
    }
  }
  CHECK(Sections::of(0, 5, 1).blocks.by == 0 && Sections::of(5, 0, 1).blocks.by == 0);
  CHECK(Sections::of(INT64_C(1) << 16, INT64_C(1) << 15, 1).blocks.by == 0);
  CHECK(Sections::of(INT32_MAX, 1, INT32_MAX).place(INT32_MAX - 1).unit == INT32_MAX - 1);
}

}  // namespace

int main() {
  test_sections();
  for (int32_t by = 1; by <= 3000; ++by) CHECK(right(by) && right(INT32_MAX - by + 1));
  for (int bits = 12; bits < 31; ++bits) {
    for (const int32_t d : {-1, 0, 1, 3}) CHECK(right((int32_t{1} << bits) + d));
  }
  return check_report();
}
