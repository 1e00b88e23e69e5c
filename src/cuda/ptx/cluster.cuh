// Thread-block clusters: CTA rank, cluster barrier, distributed shared memory (PTX ISA, "Data
// Movement" and "Parallel Synchronization"). mapa() makes remote addresses. A CTA that stores to
// another, or arrives at its mbarrier, must know that the other has not exited.
#pragma once

#include <cstdint>

namespace flashattn::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

}  // namespace flashattn::cuda

namespace flashattn::cuda::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}

// Releases writes made before; threads that have exited count as arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Arrives without releasing this thread's writes: a release takes a device-wide fence, some 500
// clocks. This is enough for mbarriers that fence_mbarrier_init() has made visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address, in the shared memory of CTA `rank`, that corresponds to `address` in this CTA's.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
  return x;
}

// Orders this thread's reads only. To release its writes would need a device-wide fence, hundreds
// of clocks.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier_arrive_remote() unless `barrier` is 0, without a branch that the compiler sees.
__device__ __forceinline__ void mbarrier_arrive_remote_if(uint32_t barrier) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(
          barrier)
      : "memory");
}

// mbarrier_wait for a barrier of this CTA at which other CTAs of the cluster arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; "
      "@p bra done; bra wait; done:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Stores a word to another CTA, whose mbarrier counts 4 bytes.
__device__ __forceinline__ void st_async(uint32_t to, uint32_t x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(x), "r"(barrier)
      : "memory");
}

// Store two or four words at once.
__device__ __forceinline__ void st_async_8(uint32_t to, uint32_t x, uint32_t y, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void st_async_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z,
                                            uint32_t w, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Bulk copy from this CTA's shared memory to another's, whose mbarrier counts the bytes.
__device__ __forceinline__ void bulk_copy_cluster(uint32_t to, uint32_t from, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flashattn::cuda::ptx
