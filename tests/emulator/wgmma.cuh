// In place of what src/cuda/ptx/wgmma.py writes.
#pragma once

#include <type_traits>

#include "emulator.h"

namespace flashattn::cuda::ptx {

template <class T, int kTransposeA, int kTransposeB, int kCount>
void wgmma_ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply({d, nullptr, a, b, 2 * kCount, std::is_same<T, __nv_bfloat16>::value,
                      kTransposeA != 0, kTransposeB != 0, accumulate != 0});
}

template <class T, int kTransposeB, int kCount>
void wgmma_rs(float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate) {
  emulator::multiply({d, a, 0, b, 2 * kCount, std::is_same<T, __nv_bfloat16>::value, false,
                      kTransposeB != 0, accumulate != 0});
}

}  // namespace flashattn::cuda::ptx
