// What the instructions of Hopper are told: no instructions themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashattn::cuda::ptx {

// What the L2 cache should do with the lines: CUTLASS's encodings of createpolicy.
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

struct BoxPosition {
  int32_t column, row, head, batch;
};

// A matrix of 16-bit elements in shared memory whose rows of 64 elements lie 128 bytes apart,
// 16-byte chunks exchanged by chunk ^ row % 8; its first row lies at a multiple of 1024.
struct SmemDescriptor {
  uint32_t low;  // of the descriptor; the rest is the same for all

  // panel_bytes: from one panel of 64 columns to the next, for operands whose rows run along k.
  static __device__ __forceinline__ SmemDescriptor at(uint32_t address, uint32_t panel_bytes) {
    return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16};
  }

  __device__ __forceinline__ uint32_t address() const { return (low & 0x3fff) << 4; }

  __device__ __forceinline__ SmemDescriptor advance(uint32_t bytes) const {
    return {low + (bytes >> 4)};
  }

  __device__ __forceinline__ uint64_t descriptor() const {
    constexpr uint32_t kHigh = 1024 >> 4 | 1u << 30;  // eight rows; the exchange of chunks
    return static_cast<uint64_t>(kHigh) << 32 | low;
  }
};

}  // namespace flashattn::cuda::ptx
