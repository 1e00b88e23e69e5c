// Descales of 8-bit numbers: an element times its descale is its value. Used by the CPU backend and
// the kernels.
#pragma once

#include <cstring>

#include "core/problem.h"

namespace flashattn {

// The least descale. A smaller one would have no finite inverse.
constexpr float kLeastDescale = 0x1p-126f;

// Returns the descale of a block whose largest magnitude is `most`. largest: the largest number of
// the 8-bit type.
FLASHATTN_HD float descale_of(float most, float largest) {
  const float descale = most / largest;
  return descale > kLeastDescale ? descale : most == 0 ? 1.0f : kLeastDescale;
}

// Returns the new descale of a block of a cache that gets new tokens, whose largest magnitude is
// `most`. held: the block has tokens already, with the descale `old`. If the descale grows it
// becomes a power of two, so that rescaling the old tokens rounds E4M3 no second time, except
// subnormal numbers.
FLASHATTN_HD float updated_descale(float most, float largest, int32_t block, bool held, float old) {
  if (held && most <= old * largest) return old;
  float descale = descale_of(most, largest);
  if (block == 1) return descale;
  if (most == 0) return kLeastDescale;  // any later token makes it grow
  uint32_t bits;
  memcpy(&bits, &descale, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000;
  memcpy(&descale, &bits, sizeof descale);
  return descale;
}

}  // namespace flashattn
