// Of launches whose blocks, or the next kernel's, wait for something to be cleared.
#pragma once

#include <atomic>
#include <cstdint>

namespace flashattn::cuda::sm90 {

// Of a launch: no other of the process has it, nor is it likely to lie in memory. Never 0.
inline uint64_t new_stamp() {
  static std::atomic<uint64_t> launches(0);
  constexpr uint64_t kOdd = UINT64_C(0x9e3779b97f4a7c15);  // a product with it is one to one
  return (launches.fetch_add(1, std::memory_order_relaxed) + 1) * kOdd;
}

}  // namespace flashattn::cuda::sm90
