// Blocks of a cluster: their ranks, their barrier, each other's shared memory (PTX ISA, "Data
// Movement" and "Parallel Synchronization"). Remote addresses come from at_rank(); who stores to
// another block, or arrives there, must know that it has not ended.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}

// Threads that have ended count as arrived. What was done before is seen by those that wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// What lies at this address of the block's own shared memory in that of another.
__device__ __forceinline__ uint32_t at_rank(uint32_t address, uint32_t rank) {
  uint32_t x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
  return x;
}

// Says that this thread has read, not that others see what it wrote: that would be a fence of the
// whole device, hundreds of clocks.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier_wait for a barrier of this block where others of the cluster arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; "
      "@p bra done; bra wait; done:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A word to another block, counted as 4 bytes at a barrier there.
__device__ __forceinline__ void store_remote(uint32_t to, uint32_t x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(x), "r"(barrier)
      : "memory");
}

// The copy engine, from this block's shared memory to another's, whose barrier counts the bytes.
__device__ __forceinline__ void bulk_send(uint32_t to, uint32_t from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flashattn::cuda::ptx
