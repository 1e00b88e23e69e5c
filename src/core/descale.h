// Descales of 8-bit numbers: an element times its descale is the number meant. Used by the CPU
// backend and the kernels.
#pragma once

#include <cstring>

#include "core/problem.h"

namespace flashattn {

// Of a block whose largest magnitude is most. largest: what the type holds. A smaller descale would
// have no finite inverse.
FLASHATTN_HD float descale_of(float most, float largest) {
  constexpr float kLeast = 0x1p-126f;
  const float descale = most / largest;
  return descale > kLeast ? descale : most == 0 ? 1.0f : kLeast;
}

// The descale of a block of a cache that gets new tokens, of which most is the largest magnitude.
// old: its descale, where it held some. Rescaling by a power of two rounds E4M3 no second time, but
// for subnormal numbers.
FLASHATTN_HD float updated_descale(float most, float largest, int32_t block, bool held, float old) {
  if (held && most <= old * largest) return old;
  float descale = descale_of(most, largest);
  if (block == 1) return descale;
  if (most == 0) return 0x1p-126f;  // whatever comes makes it grow
  uint32_t bits;
  memcpy(&bits, &descale, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000;
  memcpy(&descale, &bits, sizeof descale);
  return descale;
}

}  // namespace flashattn
