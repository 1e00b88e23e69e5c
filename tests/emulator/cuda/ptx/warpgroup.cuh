// In place of src/cuda/ptx/warpgroup.cuh.
#pragma once

#include "cuda/ptx/operands.cuh"
#include "emulator.h"

namespace flashattn::cuda::ptx {

inline void wgmma_fence() { emulator::multiply_fence(); }
inline void wgmma_commit() { emulator::multiply_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::multiply_wait(kPending);
}
inline float order_after(float x, float, uint32_t) { return x; }
template <int kCount>
void reg_fence(float (&)[kCount]) {}
template <int kCount>
void reg_fence(uint32_t (&)[kCount]) {}
template <int kCount>
void setmaxnreg_dec() {}
template <int kCount>
void setmaxnreg_inc() {}

inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const emulator::Words* rows = emulator::exchange({{address}});
  const uint32_t lane = emulator::lane(), words[] = {a, b, c, d};
  for (uint32_t m = 0; m < 4; ++m) {
    emulator::store(rows[m * 8 + lane / 4].word[0] + lane % 4 * 4, words[m]);
  }
}

inline void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const emulator::Words* rows = emulator::exchange({{address}});
  const uint32_t lane = emulator::lane(), words[] = {a, b, c, d};
  for (uint32_t m = 0; m < 4; ++m) {
    for (uint32_t e = 0; e < 2; ++e) {
      const uint16_t x = static_cast<uint16_t>(words[m] >> 16 * e);
      emulator::store(rows[m * 8 + lane % 4 * 2 + e].word[0] + lane / 4 * 2, x);
    }
  }
}

}  // namespace flashattn::cuda::ptx
