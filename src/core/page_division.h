// The page and row of a token in a paged cache, by a multiplication and a correction. A kernel
// makes the factor at its start, with one 32-bit division, and keeps it in one register.
#pragma once

#include <cstdint>

#include "core/mask_geometry.h"

namespace flashattn {

struct PageDivision {
  uint32_t factor;  // (2^32 - 1) / page_size: a quotient below 2^31 is too small by at most 1

  struct Place {
    int32_t entry;  // index in the sequence's row of the page table
    int32_t row;    // row in the page
  };

  // page_size: 0 without pages.
  static FLASHATTN_HD constexpr PageDivision of(int32_t page_size) {
    return {page_size > 0 ? ~uint32_t{0} / static_cast<uint32_t>(page_size) : 0};
  }

  // The place of token i >= 0 of a sequence.
  FLASHATTN_HD constexpr Place place(int32_t i, int32_t page_size) const {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(i)) * factor;
    const int32_t entry = static_cast<int32_t>(product >> 32), row = i - entry * page_size;
    return row < page_size ? Place{entry, row} : Place{entry + 1, row - page_size};
  }
};

}  // namespace flashattn
