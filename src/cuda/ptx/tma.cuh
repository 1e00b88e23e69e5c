// TMA: copies of boxes of 4-dimensional tensors, (column, row, head, batch), between global and
// shared memory (PTX ISA, "cp.async.bulk.tensor"), and bulk copies of contiguous bytes. Elements
// outside the tensor are read as 0 and not written. One thread issues a copy.
#pragma once

#include <cuda.h>

#include "cuda/ptx/operands.cuh"

namespace flashattn::cuda::ptx {

// True in one lane of a warp, always the same. Only with elect.sync does ptxas know that a single
// lane issues a copy; otherwise it makes a loop over all lanes that may.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

// The mbarrier counts the bytes of the whole box, including those outside the tensor.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         TmaCoord at, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
      "hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(policy)
      : "memory");
}

// tma_load into each CTA of the cluster whose bit is set in `ranks`, at the CTA's own `to` and
// `barrier`.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap* map,
                                                   uint32_t barrier, TmaCoord at, uint64_t policy,
                                                   uint32_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
      "multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %8, %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(policy),
      "h"(static_cast<uint16_t>(ranks))
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, TmaCoord at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// Brings a box to L2.
__device__ __forceinline__ void tma_prefetch_l2(const CUtensorMap* map, TmaCoord at) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

// Copies contiguous bytes, a multiple of 16; both addresses are aligned to 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Brings contiguous bytes to L2; as above.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Brings the cache line of an address to L2.
__device__ __forceinline__ void prefetch_l2_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Adds contiguous fp32 values to global memory.
__device__ __forceinline__ void bulk_reduce_add(float* to, uint32_t from, uint32_t bytes,
                                                uint64_t policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;" ::"l"(to),
      "r"(from), "r"(bytes), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's bulk groups still read shared memory.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's bulk groups are incomplete.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashattn::cuda::ptx
