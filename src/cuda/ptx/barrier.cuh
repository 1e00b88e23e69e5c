// mbarriers, named barriers and proxy fences (PTX ISA, "Parallel Synchronization"). Addresses are
// shared-memory addresses.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// A phase completes after `count` arrivals and the transfer of all bytes expected in it.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised mbarriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and expects bytes that TMA will transfer in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. A waiter may fall behind by at most one phase.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; "
      "bra wait; done:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// mbarrier_wait() in a loop that computes with x and y in turn. ptxas gives them a register of even
// number and the next: two banks, each of which keeps an operand for the next instruction (.reuse).
// In one bank, every second instruction would wait for a register. The store asks for such a pair;
// it lies on the way back of the wait, and never runs, as no grid is empty.
__device__ __forceinline__ void mbarrier_wait_with_pair(uint32_t barrier, uint32_t parity, float x,
                                                        float y) {
  asm volatile(
      "{.reg .pred p, q; .reg .u32 rows; "
      "wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; "
      "mov.u32 rows, %%nctaid.y; setp.eq.u32 q, rows, 0; @q st.shared.v2.f32 [%0], {%2, %3}; "
      "bra wait; done:}" ::"r"(barrier),
      "r"(parity), "f"(x), "f"(y)
      : "memory");
}

// Waits only if `valid` is true, without a branch that the compiler sees.
__device__ __forceinline__ void mbarrier_wait_if(bool valid, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p, q; setp.eq.b32 q, %2, 0; wait: @q bra done; "
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra wait; done:}" ::"r"(
          barrier),
      "r"(parity), "r"(static_cast<int>(valid))
      : "memory");
}

// Whether the phase of this parity is complete.
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

// Named barriers; barrier 0 is __syncthreads(). `threads` counts those that arrive and those that
// wait. named_arrive() does not wait.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes this thread's stores to shared memory visible to the async proxy: WGMMA and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As above for global memory. Stores of other threads that this thread has observed are also
// visible to the async operations that it starts afterwards.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flashattn::cuda::ptx
