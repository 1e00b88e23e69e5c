// What surrounds the products of a warpgroup: descriptors, fences, registers (PTX ISA,
// "Asynchronous Warpgroup Level Matrix Instructions").
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// A matrix of 16-bit elements in shared memory whose rows of 64 elements lie 128 bytes apart,
// 16-byte chunks exchanged by chunk ^ row % 8; its first row lies at a multiple of 1024.
struct Matrix {
  uint32_t low;  // of the descriptor; the rest is the same for all

  // panel_bytes: from one panel of 64 columns to the next, for operands whose rows run along k.
  static __device__ __forceinline__ Matrix at(uint32_t address, uint32_t panel_bytes) {
    return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16};
  }

  __device__ __forceinline__ uint32_t address() const { return (low & 0x3fff) << 4; }

  __device__ __forceinline__ Matrix further(uint32_t bytes) const { return {low + (bytes >> 4)}; }

  __device__ __forceinline__ uint64_t descriptor() const {
    constexpr uint32_t kHigh = 1024 >> 4 | 1u << 30;  // eight rows; the exchange of chunks
    return static_cast<uint64_t>(kHigh) << 32 | low;
  }
};

// Registers written so far are seen by the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of r across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Registers a thread; every warp of the warpgroup calls it.
template <int kCount>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace flashattn::cuda::ptx
