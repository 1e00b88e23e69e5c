// In place of what src/cuda/ptx/wgmma.py writes.
#pragma once

#include <type_traits>

#include "cuda/ptx/fp8.cuh"
#include "emulator.h"

namespace flashattn::cuda::ptx {

template <class T>
constexpr emulator::Number kNumber =
    std::is_same<T, E4m3>::value            ? emulator::Number::kE4m3
    : std::is_same<T, __nv_bfloat16>::value ? emulator::Number::kBf16
                                            : emulator::Number::kF16;

template <class T, int kTransposeA, int kTransposeB, int kCount>
void wgmma_ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply({d, nullptr, a, b, 2 * kCount, kNumber<T>, kTransposeA != 0, kTransposeB != 0,
                      accumulate != 0});
}

template <class T, int kTransposeB, int kCount>
void wgmma_rs(float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate) {
  emulator::multiply(
      {d, a, 0, b, 2 * kCount, kNumber<T>, false, kTransposeB != 0, accumulate != 0});
}

}  // namespace flashattn::cuda::ptx
