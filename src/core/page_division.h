// Where a token lies in a paged cache, by a multiplication and a correction: a GPU makes the factor
// when a kernel starts, with one division of 32 bits, and needs one register for it.
#pragma once

#include <cstdint>

#include "core/mask_geometry.h"

namespace flashattn {

struct PageDivision {
  uint32_t factor;  // (2^32 - 1) / page_size: a quotient below 2^31 is too small by at most 1

  struct Place {
    int32_t entry;  // of the page table
    int32_t row;    // in the page
  };

  // page_size: 0 without pages.
  static FLASHATTN_HD constexpr PageDivision of(int32_t page_size) {
    return {page_size > 0 ? ~uint32_t{0} / static_cast<uint32_t>(page_size) : 0};
  }

  // i >= 0.
  FLASHATTN_HD constexpr Place place(int32_t i, int32_t page_size) const {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(i)) * factor;
    const int32_t entry = static_cast<int32_t>(product >> 32), row = i - entry * page_size;
    return row < page_size ? Place{entry, row} : Place{entry + 1, row - page_size};
  }
};

}  // namespace flashattn
