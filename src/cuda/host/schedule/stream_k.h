// The end of a grid of equal items, cut into shares so that all workers are done at the same time:
// pure, for the host and for kernels. Osama et al. 2023, "Stream-K".
#pragma once

#include <algorithm>

#include "core/fast_divmod.h"

namespace flashattn {

// Workers take tickets in order. The first are for an item each; the others for a share of what
// is left, which is the same number of steps for each: one piece of an item, or two, of an item and
// of the next. Who comes last to an item adds up its pieces.
struct StreamK {
  int32_t whole;     // items before those that are cut
  int32_t tickets;   // in all
  int32_t end;       // steps of all items that are cut
  FastDivmod steps;  // of an item
  FastDivmod share;  // steps of a ticket

  // Of so many items nothing is cut.
  static constexpr StreamK uncut(int32_t items) {
    return {items, items, 0, FastDivmod::of(1), FastDivmod::of(1)};
  }

  // What no full round of all workers has is cut, if that saves as many steps as `least`. A piece
  // costs as much as `cost` steps beside its own.
  static constexpr StreamK of(int32_t items, int32_t steps, int32_t workers, int32_t cost,
                              int32_t least) {
    const int32_t left = workers > 0 ? items % workers : 0;
    const int64_t end = static_cast<int64_t>(left) * steps;
    if (end <= 0 || end > INT32_MAX || steps - end / workers < least) return uncut(items);
    const int64_t share = std::max<int64_t>(ceil_div(end, workers), cost);
    if (share + 2 * cost >= steps) return uncut(items);
    return {items - left, items - left + static_cast<int32_t>(ceil_div(end, share)),
            static_cast<int32_t>(end), FastDivmod::of(steps),
            FastDivmod::of(static_cast<int32_t>(share))};
  }

  // Of an item that is cut.
  struct Piece {
    int32_t item;        // in the grid
    int32_t begin, end;  // its steps
    int32_t cut;         // of the items that are cut
    int32_t number;      // below pieces(); those of an item follow each other
    int32_t first;       // the number of the item's first
    int32_t count;       // of the item; 1: all of it
    bool more;           // the ticket has a second
  };

  FLASHATTN_HD constexpr bool cuts(int32_t ticket) const { return ticket >= whole; }

  // second: the ticket's, if its first says that there is one.
  FLASHATTN_HD constexpr Piece piece(int32_t ticket, bool second) const {
    const int32_t n = ticket - whole, last = (n + 1) * share.divisor;
    const int32_t share_end = last < end ? last : end;
    int32_t cut = steps.quotient(n * share.divisor);
    if (second) ++cut;
    const int32_t from = cut * steps.divisor, to = from + steps.divisor;
    const int32_t begin = second ? from : n * share.divisor;
    const int32_t first = share.quotient(from);
    return {whole + cut, begin - from, (to < share_end ? to : share_end) - from, cut,
            n + cut,     first + cut,  share.quotient(to - 1) - first + 1,       to < share_end};
  }

  FLASHATTN_HD constexpr int32_t items_cut() const { return steps.quotient(end); }
  FLASHATTN_HD constexpr int32_t pieces() const { return tickets - whole + items_cut(); }
};

}  // namespace flashattn
