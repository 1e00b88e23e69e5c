// Vectors for processors of which nothing is known: 128 bits, which all have, in the portable form.
#pragma once

namespace flashattn::cpu::FLASHATTN_ISA {
#if defined(FLASHATTN_WIDE_VECTORS)  // tests: the widths of AVX-512, on any processor
constexpr int kWidth = 16;           // floats a vector
constexpr int kPanelVectors = 4;
#else
constexpr int kWidth = 4;
constexpr int kPanelVectors = 2;
#endif
}  // namespace flashattn::cpu::FLASHATTN_ISA

#include "cpu/simd/portable.h"

namespace flashattn::cpu::FLASHATTN_ISA {
using namespace portable;
}
