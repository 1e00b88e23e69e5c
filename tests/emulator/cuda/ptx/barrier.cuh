// In place of src/cuda/ptx/barrier.cuh.
#pragma once

#include "emulator.h"

namespace flashattn::cuda::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  emulator::mbarrier_init(barrier, count);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulator::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return emulator::mbarrier_test(barrier, parity);
}
inline void mbarrier_wait_with_pair(uint32_t barrier, uint32_t parity, float, float) {
  emulator::mbarrier_wait(barrier, parity);
}
inline void mbarrier_wait_if(bool valid, uint32_t barrier, uint32_t parity) {
  if (valid) emulator::mbarrier_wait(barrier, parity);
}
inline void named_sync(int barrier, int threads) { emulator::barrier(barrier, threads, true); }
inline void named_arrive(int barrier, int threads) { emulator::barrier(barrier, threads, false); }
inline void fence_async_proxy() { emulator::fence_async(); }
inline void fence_async_proxy_global() { emulator::fence_async_global(); }

}  // namespace flashattn::cuda::ptx
