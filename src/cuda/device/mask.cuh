// Masks on accumulator fragments: keys that a query sees are an interval; a block mask beside it
// is a bit for each element.
#pragma once

#include <cmath>

#include "core/mask_geometry.h"
#include "cuda/device/fragment.cuh"

namespace flashattn::cuda {

// Calls visit(n, e) for the columns 8 n + e outside [begin, begin + count), as seen from the lane's
// first column; count may be negative.
template <int kGroups, class Visit>
__device__ __forceinline__ void visit_outside(int32_t begin, int32_t count, Visit visit) {
#pragma unroll
  for (int x = 0; x < kGroups * 2; ++x) {
    const uint32_t offset = static_cast<uint32_t>(x / 2 * 8 + x % 2 - begin);
    if (offset >= static_cast<uint32_t>(max(count, 0))) visit(x / 2, x % 2);
  }
}

// Calls visit(n, e) for the columns 8 n + e whose bit 2 n + e is not set.
template <int kGroups, class Visit>
__device__ __forceinline__ void visit_unset(uint32_t shown, Visit visit) {
#pragma unroll
  for (int x = 0; x < kGroups * 2; ++x) {
    if (!(shown >> x & 1)) visit(x / 2, x % 2);
  }
}

// Elements of a pair of neighbouring columns of which column - begin < count: all their bits.
__device__ __forceinline__ uint32_t pair_inside(int32_t column, int32_t begin, uint32_t count) {
  const uint32_t offset = static_cast<uint32_t>(column - begin);
  return (offset < count ? 0xffffu : 0) | (offset + 1 < count ? 0xffff0000u : 0);
}

// A mask of a packed pair: all bits of the elements whose bit, 0 or 1, is set.
__device__ __forceinline__ uint32_t pair_set(uint32_t shown) {
  return (shown & 1 ? 0xffffu : 0) | (shown & 2 ? 0xffff0000u : 0);
}

// Sets elements of row lane / 4 + 8 half to -inf unless their column is in [begin, begin + count),
// as seen from the lane's first column.
template <int kCount>
__device__ __forceinline__ void hide_outside(int half, float (&s)[kCount], int32_t begin,
                                             int32_t count) {
  visit_outside<kCount / 4>(
      begin, count, [&](int n, int e) { s[SRowLayout{half}.element(2 * n + e)] = -INFINITY; });
}

// Sets element x of the row to -inf unless bit x is set.
template <int kCount>
__device__ __forceinline__ void hide_unset(int half, float (&s)[kCount], uint32_t shown) {
  visit_unset<kCount / 4>(
      shown, [&](int n, int e) { s[SRowLayout{half}.element(2 * n + e)] = -INFINITY; });
}

}  // namespace flashattn::cuda
