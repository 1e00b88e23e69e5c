// Barriers in shared memory, named barriers, proxies (PTX ISA, "Parallel Synchronization").
// Addresses are of shared memory.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// A phase ends after `count` arrivals and all bytes announced in it.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Barriers made so far are visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Until the phase of this parity has ended. At most one phase may end unseen.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; "
      "bra wait; done:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same, or nothing, without a branch that the compiler sees.
__device__ __forceinline__ void mbarrier_wait_if(bool some, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p, q; setp.eq.b32 q, %2, 0; wait: @q bra done; "
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra wait; done:}" ::"r"(
          barrier),
      "r"(parity), "r"(static_cast<int>(some))
      : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  int32_t ended;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.b32 %0, 1, 0, p;}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended;
}

// Barrier 0 is __syncthreads(). `threads` counts those that arrive and those that wait.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What this thread stored to shared memory is visible to wgmma and to the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory; and what it has seen of others' stores there comes before what it
// starts.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flashattn::cuda::ptx
