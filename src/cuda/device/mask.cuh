// Masks on accumulator fragments, as members like those of a score modification: the keys that a
// query sees are an interval; a block mask beside it is a bit for each element.
#pragma once

#include <cmath>

#include "core/mask_geometry.h"
#include "cuda/device/fragment.cuh"

namespace flashattn::cuda {

// The columns of a row that the mask shows. A lane has the columns 8 n + e of a row, e = 0 or 1, as
// seen from its first one.
struct IntervalMask {
  int32_t begin, count;  // count may be negative: none

  // Calls visit(n, e) for the columns that are hidden.
  template <int kGroups, class Visit>
  __device__ __forceinline__ void visit_hidden(Visit visit) const {
#pragma unroll
    for (int x = 0; x < kGroups * 2; ++x) {
      const uint32_t offset = static_cast<uint32_t>(x / 2 * 8 + x % 2 - begin);
      if (offset >= static_cast<uint32_t>(max(count, 0))) visit(x / 2, x % 2);
    }
  }

  // Sets hidden scores of the row to -inf.
  template <int kCount>
  __device__ __forceinline__ void forward(SRowLayout row, float (&s)[kCount]) const {
    visit_hidden<kCount / 4>([&](int n, int e) { s[row.element(2 * n + e)] = -INFINITY; });
  }

  // A mask of the packed pair at `column`, as seen from the lane's first: all bits of the elements
  // that are shown. count is not negative.
  __device__ __forceinline__ uint32_t pair(int32_t column) const {
    const uint32_t offset = static_cast<uint32_t>(column - begin);
    const uint32_t shown = static_cast<uint32_t>(count);
    return (offset < shown ? 0xffffu : 0) | (offset + 1 < shown ? 0xffff0000u : 0);
  }
};

// The columns of a row that a block mask shows: bit 2 n + e of column 8 n + e.
struct BitMask {
  uint32_t shown;

  template <int kCount>
  __device__ __forceinline__ void forward(SRowLayout row, float (&s)[kCount]) const {
#pragma unroll
    for (int x = 0; x < kCount / 2; ++x) {
      if (!(shown >> x & 1)) s[row.element(x)] = -INFINITY;
    }
  }

  // A mask of packed pair n.
  __device__ __forceinline__ uint32_t pair(int n) const {
    const uint32_t bits = shown >> 2 * n;
    return (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
  }
};

}  // namespace flashattn::cuda
