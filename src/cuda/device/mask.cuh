// Masks on accumulator fragments, as members like those of a score modification: the keys that a
// query sees are an interval; a block mask beside it is a bit for each element.
#pragma once

#include <cmath>

#include "core/mask_geometry.h"
#include "cuda/device/fragment.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// The columns of a row that the mask shows. A lane has the columns 8 n + e of a row, e = 0 or 1, as
// seen from its first one.
struct IntervalMask {
  int32_t begin, count;  // count may be negative: none

  // Calls visit(n, e) for the columns that are hidden.
  template <int kMmaN, class Visit>
  __device__ __forceinline__ void visit_hidden(Visit visit) const {
#pragma unroll
    for (int x = 0; x < kMmaN * 2; ++x) {
      const uint32_t offset = static_cast<uint32_t>(x / 2 * 8 + x % 2 - begin);
      if (offset >= static_cast<uint32_t>(max(count, 0))) visit(x / 2, x % 2);
    }
  }

  // Sets hidden scores of the row to -inf.
  template <int kCount>
  __device__ __forceinline__ void forward(SRowLayout row, float (&s)[kCount]) const {
    visit_hidden<kCount / 4>([&](int n, int e) { s[row.element(2 * n + e)] = -INFINITY; });
  }

  // A bit mask for the packed pair at `column`, counted from the lane's first: all ones for
  // elements that are shown. count is not negative.
  __device__ __forceinline__ uint32_t pair(int32_t column) const {
    const uint32_t offset = static_cast<uint32_t>(column - begin);
    const uint32_t shown = static_cast<uint32_t>(count);
    return (offset < shown ? 0xffffu : 0) | (offset + 1 < shown ? 0xffff0000u : 0);
  }
  // Zeros the hidden elements of that pair, with one register fewer than pair().
  __device__ __forceinline__ void zero_hidden(uint32_t& packed, int32_t column) const {
    const uint32_t offset = static_cast<uint32_t>(column - begin);
    const uint32_t shown = static_cast<uint32_t>(count);
    if (offset >= shown) packed &= 0xffff0000u;
    if (offset + 1 >= shown) packed &= 0x0000ffffu;
  }
};

// IntervalMask for packed pairs of kColumns columns. A pair takes two instructions, where
// comparisons take six, but more registers.
template <int kColumns>
class PairMasks {
 public:
  // count is not negative.
  __device__ __forceinline__ PairMasks(int32_t begin, int32_t count) {
#pragma unroll
    for (int x = 0; x < kWords; ++x) {
      const uint32_t shown = ones_from(begin - 32 * x) & ~ones_from(begin + count - 32 * x);
      even_[x] = shown << 7;
      odd_[x] = shown << 6;
    }
  }

  // column: a multiple of 8, and the one after it.
  __device__ __forceinline__ void zero_hidden(uint32_t& packed, int32_t column) const {
    const uint32_t byte = 8 + column / 8 % 4;
    packed &= ptx::permute_bytes(even_[column / 32], odd_[column / 32],
                                 byte * 0x11 | (byte + 4) * 0x1100);
  }

 private:
  static constexpr int kWords = (kColumns + 31) / 32;

  static __device__ __forceinline__ uint32_t ones_from(int32_t bit) {
    return __funnelshift_lc(0, ~0u, max(bit, 0));
  }

  // Signs of bytes. Byte n of word x: whether column 32 x + 8 n (even_), or the one after it
  // (odd_), is shown.
  uint32_t even_[kWords], odd_[kWords];
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

  // A bit mask for packed pair n.
  __device__ __forceinline__ uint32_t pair(int n) const {
    const uint32_t bits = shown >> 2 * n;
    return (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
  }
};

}  // namespace flashattn::cuda
