// Divisions by multiplication, where rounding could show: next to multiples, at both ends.
#include "core/fast_divmod.h"
#include "core/page_division.h"

#include <climits>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

bool right(int32_t by) {
  const FastDivmod divisor = FastDivmod::of(by);
  const PageDivision pages = PageDivision::of(by);
  const auto same = [&](int64_t x) {
    if (x < 0 || x > INT32_MAX) return true;
    const int32_t i = static_cast<int32_t>(x);
    const PageDivision::Place at = pages.place(i, by);
    return divisor.quotient(i) == i / by && at.entry == i / by && at.row == i % by;
  };
  bool ok = divisor.divisor == by;
  for (int64_t n = 0; n < 2000; ++n) {
    const int64_t multiple = n * by, last = INT32_MAX / by * static_cast<int64_t>(by) - multiple;
    for (int64_t d = -1; d <= 1; ++d) ok = ok && same(multiple + d) && same(last + d);
    ok = ok && same(n) && same(INT32_MAX - n);
  }
  return ok;
}

}  // namespace

int main() {
  for (int32_t by = 1; by <= 3000; ++by) CHECK(right(by) && right(INT32_MAX - by + 1));
  for (int bits = 12; bits < 31; ++bits) {
    for (const int32_t d : {-1, 0, 1, 3}) CHECK(right((int32_t{1} << bits) + d));
  }
  return check_report();
}
