// What nvcc gives a kernel without an include. Comes before every source of an emulated kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstring>

#include "emulator.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__ thread_local  // a block is at work on one thread of the machine

#define threadIdx (emulator::place().thread)
#define blockIdx (emulator::place().block)
#define blockDim (emulator::place().threads)
#define gridDim (emulator::place().blocks)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

template <class To, class From>
To with_bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(uint32_t x) { return with_bits_of<float>(x); }
inline float __int_as_float(int32_t x) { return with_bits_of<float>(x); }
inline uint32_t __float_as_uint(float x) { return with_bits_of<uint32_t>(x); }
inline int32_t __float_as_int(float x) { return with_bits_of<int32_t>(x); }

namespace emulator {

// All lanes take part: kernels that leave some out do not run here.
inline const Words* lanes(unsigned mask, uint32_t x) {
  if (mask != ~0u) fail("a shuffle or vote of some lanes only");
  return exchange({{x}});
}

}  // namespace emulator

inline uint32_t __shfl_sync(unsigned mask, uint32_t x, int from) {
  return emulator::lanes(mask, x)[from % 32].word[0];
}
inline int32_t __shfl_sync(unsigned mask, int32_t x, int from) {
  return static_cast<int32_t>(__shfl_sync(mask, static_cast<uint32_t>(x), from));
}
inline float __shfl_sync(unsigned mask, float x, int from) {
  return __uint_as_float(__shfl_sync(mask, __float_as_uint(x), from));
}
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t x, int step) {
  return emulator::lanes(mask, x)[emulator::lane() ^ step].word[0];
}
inline float __shfl_xor_sync(unsigned mask, float x, int step) {
  return __uint_as_float(
      emulator::lanes(mask, __float_as_uint(x))[emulator::lane() ^ step].word[0]);
}
inline int __any_sync(unsigned mask, int x) {
  const emulator::Words* all = emulator::lanes(mask, x != 0);
  bool any = false;
  for (int n = 0; n < 32; ++n) any |= all[n].word[0] != 0;
  return any;
}
inline int __all_sync(unsigned mask, int x) { return !__any_sync(mask, !x); }
inline uint32_t __ballot_sync(unsigned mask, int x) {
  const emulator::Words* all = emulator::lanes(mask, x != 0);
  uint32_t bits = 0;
  for (int n = 0; n < 32; ++n) bits |= all[n].word[0] << n;
  return bits;
}
// Rounded by themselves: no product and sum become one operation.
inline float __fmul_rn(float x, float y) {
  float product = x * y;
  asm("" : "+x"(product));
  return product;
}
inline float __fadd_rn(float x, float y) {
  float sum = x + y;
  asm("" : "+x"(sum));
  return sum;
}
inline float __fsub_rn(float x, float y) {
  float difference = x - y;
  asm("" : "+x"(difference));
  return difference;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) {
    result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
  }
  return result;
}
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both << min(shift, 32u) >> 32);
}
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __reduce_min_sync(unsigned mask, int x) {
  const emulator::Words* all = emulator::lanes(mask, static_cast<uint32_t>(x));
  for (int n = 0; n < 32; ++n) x = min(x, static_cast<int>(all[n].word[0]));
  return x;
}
inline int __reduce_max_sync(unsigned mask, int x) { return ~__reduce_min_sync(mask, ~x); }
inline void __syncwarp() { emulator::warp_sync(); }
inline void __syncthreads() { emulator::barrier(0, 0, true); }
inline void __threadfence() { emulator::fence_gpu(); }
inline void __nanosleep(unsigned) { emulator::yield(); }
inline int atomicAdd(int* to, int x) {
  return emulator::fetch_add(to, x, emulator::Order::kRelaxed);
}
