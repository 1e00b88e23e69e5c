// Operands of Hopper instructions: cache policies, TMA coordinates, shared-memory descriptors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashattn::cuda::ptx {

// L2 cache policies, in the encodings that CUTLASS uses for createpolicy.
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000,
                   kEvictNormal = 0x1000000000000000;

struct TmaCoord {
  int32_t column, row, head, batch;
};

// WGMMA descriptor of a matrix in shared memory: rows of 128 bytes, 64 elements of 16 bits, with
// the 128-byte swizzle (16-byte chunk ^ row % 8); or rows of 64 bytes with the 64-byte swizzle
// (chunk ^ row / 2 % 4). The first row is aligned to 1024 bytes.
struct SmemDescriptor {
  uint32_t low;  // low word of the descriptor; the high word is a constant

  // panel_bytes: stride between panels of 64 columns; used only by transposed operands, whose rows
  // run along k.
  static __device__ __forceinline__ SmemDescriptor at(uint32_t address, uint32_t panel_bytes) {
    return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16};
  }

  __device__ __forceinline__ uint32_t address() const { return (low & 0x3fff) << 4; }

  __device__ __forceinline__ SmemDescriptor advance(uint32_t bytes) const {
    return {low + (bytes >> 4)};
  }

  // kRowBytes: bytes of a row and of the swizzle, 128 or 64.
  template <int kRowBytes = 128>
  __device__ __forceinline__ uint64_t descriptor() const {
    // Stride of eight rows; swizzle.
    constexpr uint32_t kHigh = 8 * kRowBytes >> 4 | (kRowBytes == 128 ? 1u : 2u) << 30;
    return static_cast<uint64_t>(kHigh) << 32 | low;
  }
};

}  // namespace flashattn::cuda::ptx
