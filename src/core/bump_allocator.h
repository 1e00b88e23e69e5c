// Divides memory into aligned arrays, one behind the other. With a NULL base it only measures, so
// that the code that lays out memory also says how much there must be.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn {

// kAlignment: alignment of each array, in bytes.
template <int64_t kAlignment>
class BasicBumpAllocator {
 public:
  // A base that is not aligned loses up to kAlignment bytes.
  FLASHATTN_HD explicit BasicBumpAllocator(void* base) : base_(static_cast<char*>(base)), at_(0) {
    const int64_t beyond = reinterpret_cast<intptr_t>(base) % kAlignment;
    if (beyond != 0) at_ = kAlignment - beyond;
  }

  // Takes an array of `count` elements, uninitialised.
  template <class T>
  FLASHATTN_HD T* take(int64_t count) {
    char* array = base_ ? base_ + at_ : nullptr;
    at_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
    return reinterpret_cast<T*>(array);
  }

  // Bytes taken so far.
  FLASHATTN_HD int64_t bytes() const { return at_; }

  // Bytes that memory of any alignment must have to hold what has been taken.
  FLASHATTN_HD int64_t unaligned_bytes() const { return at_ + kAlignment; }

 private:
  char* const base_;
  int64_t at_;
};

using BumpAllocator = BasicBumpAllocator<64>;  // a cache line of a CPU

}  // namespace flashattn
