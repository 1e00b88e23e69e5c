// Fences, register allocation and stmatrix around WGMMA (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Instructions").
#pragma once

#include "cuda/ptx/operands.cuh"

namespace flashattn::cuda::ptx {

// Orders writes of registers before the WGMMAs that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending WGMMA groups are incomplete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Returns x, but depends on y, so that ptxas cannot schedule uses of the result before y is known.
// zero: 0, in a form that ptxas cannot fold.
__device__ __forceinline__ float order_after(float x, float y, uint32_t zero) {
  float same;
  asm volatile("{ .reg .b32 t; and.b32 t, %2, %3; or.b32 %0, %1, t; }"
               : "=f"(same)
               : "f"(x), "f"(y), "r"(zero));
  return same;
}

// Keeps the compiler from moving uses of r across this point.
template <int kCount>
__device__ __forceinline__ void reg_fence(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void reg_fence(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// kCount: registers per thread. Every warp of the warpgroup calls it.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Stores four 8 x 8 matrices, 16-bit; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Stores the transposed matrices: lane l gives the address of column l % 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b,
                                                  uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

}  // namespace flashattn::cuda::ptx
