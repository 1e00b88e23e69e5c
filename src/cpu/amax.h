// Largest magnitudes, from which descales of 8-bit numbers are made.
#pragma once

#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// The largest magnitude of some numbers. A NaN is kept.
FLASHATTN_INLINE float max_magnitude(const float* x, int32_t count) {
  Floats top{};
  for (int32_t n = 0; n < count; n += kWidth) {
    const char* at = reinterpret_cast<const char*>(x + n);
    top = max_of_both(abs(load_first<FLASHATTN_DTYPE_F32>(at, count - n)), top);
  }
  Floats each[kWidth];
  for (Floats& row : each) row = top;
  return max_each(each)[0];
}

// The largest finite magnitude of a row whose last vector is filled with zeros.
FLASHATTN_INLINE float finite_magnitude(const float* x, int32_t count) {
  Floats top{};
  for (int32_t c = 0; c < count; c += kWidth) {
    const Floats each = abs(load(x + c));
    top = max_keep_nan(top, select(each <= kMaxFloat, each, Floats{}));
  }
  Floats rows[kWidth];
  for (Floats& row : rows) row = top;
  return max_each(rows)[0];
}

// *most = max(*most, x), while other threads may do the same. A NaN stays.
FLASHATTN_INLINE void raise(float* most, float x) {
  float seen;
  __atomic_load(most, &seen, __ATOMIC_RELAXED);
  while (seen == seen && !(x <= seen)) {
    if (__atomic_compare_exchange(most, &seen, &x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
