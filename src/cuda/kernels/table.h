// A table of kernels that this build has, in the order of the rows of table.txt.
#pragma once

#include <cstddef>

namespace flashattn::cuda {

template <class Entry>
struct Table {
  const Entry* const* entries;
  size_t count;

  const Entry* const* begin() const { return entries; }
  const Entry* const* end() const { return entries + count; }
};

}  // namespace flashattn::cuda
