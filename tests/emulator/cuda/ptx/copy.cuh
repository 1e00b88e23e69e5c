// In place of src/cuda/ptx/copy.cuh.
#pragma once

#include "emulator.h"

namespace flashattn::cuda::ptx {

inline uint32_t shared_address(const void* p) { return emulator::shared_address(p); }
inline char* dynamic_shared() { return emulator::dynamic_shared(); }

inline void cp_async_16(uint32_t to, const void* from, bool valid) {
  emulator::copy_async(to, valid ? from : nullptr, 16);
}
inline void cp_async_4(uint32_t to, const void* from, bool valid) {
  emulator::copy_async(to, valid ? from : nullptr, 4);
}
inline void cp_async_commit() { emulator::copy_commit(); }
template <int kPending>
void cp_async_wait() {
  emulator::copy_wait(kPending);
}

inline void store_if(bool condition, void* to, const uint32_t (&x)[4]) {
  if (condition) std::memcpy(to, x, 16);
}
inline void store_streaming_if(bool condition, void* to, const uint32_t (&x)[4]) {
  store_if(condition, to, x);
}
inline void store_if(bool condition, void* to, uint32_t x) {
  if (condition) std::memcpy(to, &x, 4);
}
inline void store_if(bool condition, float* to, float x, float y) {
  if (!condition) return;
  to[0] = x;
  to[1] = y;
}

template <int kBytes>
uint32_t load_if(const void* from, bool valid) {
  uint32_t x = 0;
  if (valid) std::memcpy(&x, from, kBytes);
  return x;
}

// Word `lane % 4` of row `lane / 4` of each of four matrices.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const emulator::Words* rows = emulator::exchange({{address}});
  const uint32_t lane = emulator::lane();
  for (uint32_t m = 0; m < 4; ++m) {
    std::memcpy(&r[m], emulator::shared(rows[m * 8 + lane / 4].word[0], 16) + lane % 4 * 4, 4);
  }
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const emulator::Words* rows = emulator::exchange({{address}});
  const uint32_t lane = emulator::lane();
  for (uint32_t m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t row = rows[m * 8 + lane % 4 * 2 + e].word[0];
      std::memcpy(&pair[e], emulator::shared(row, 16) + lane / 4 * 2, 2);
    }
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

inline void store_shared(uint32_t to, uint32_t x) { emulator::store(to, x); }
inline void store_shared_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  emulator::store(to, make_uint4(x, y, z, w));
}
inline void store_shared(uint32_t to, float x, float y, float z, float w) {
  emulator::store(to, make_float4(x, y, z, w));
}
inline void store_shared_8(uint32_t to, uint32_t x, uint32_t y) {
  emulator::store(to, make_uint2(x, y));
}
inline void store_shared_pair(uint32_t to, float2 x) { emulator::store(to, x); }
inline void clear_shared_16(uint32_t to) { emulator::store(to, make_int4(0, 0, 0, 0)); }
inline uint32_t load_shared(uint32_t from) { return emulator::load<uint32_t>(from); }
inline int4 load_shared_16(uint32_t from) { return emulator::load<int4>(from); }
inline uint64_t load_shared_8(uint32_t from) { return emulator::load<uint64_t>(from); }

inline void load_shared(float (&x)[4], uint32_t from) {
  for (uint32_t n = 0; n < 4; ++n) x[n] = emulator::load<float>(from + 4 * n);
}
inline float2 load_shared_pair(uint32_t from) { return emulator::load<float2>(from); }

constexpr bool kHasRedAddV4 = true;
inline void red_add_v4(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("red_add_v4 to misaligned %p", to);
  const float sums[] = {x, y, z, w};
  for (int n = 0; n < 4; ++n) emulator::add(to + n, sums[n]);
}
inline void red_add_if(bool condition, float* to, float x) {
  if (condition) emulator::add(to, x);
}
inline void red_add_v2(float* to, float x, float y) {
  emulator::add(to, x);
  emulator::add(to + 1, y);
}
template <class T>
T load_acquire(const T* from) {
  return emulator::load_as_one(from, emulator::Order::kAcquire);
}
inline int4 load_relaxed(const int32_t* from) {
  const auto word = [from](int n) {
    return emulator::load_as_one(from + n, emulator::Order::kRelaxed);
  };
  return make_int4(word(0), word(1), word(2), word(3));
}
template <class T>
void store_relaxed(T* to, T x) {
  emulator::store_as_one(to, x, emulator::Order::kRelaxed);
}
template <class T>
void store_release(T* to, T x) {
  emulator::store_as_one(to, x, emulator::Order::kRelease);
}
inline int32_t fetch_or_acquire(int32_t* at, int32_t bits) {
  return emulator::fetch_or(at, bits, emulator::Order::kAcquire);
}
inline void fence_gpu() { emulator::fence_gpu(); }
// Another thread goes on at the next call of the emulator at the earliest.
UNTOLD inline void red_max(uint32_t* to, uint32_t x) {
  emulator::before_change(to, sizeof x, emulator::Order::kRelaxed);
  volatile uint32_t* const at = to;
  if (*at < x) *at = x;
}
inline void red_add_relaxed(int32_t* to, int32_t x) {
  emulator::fetch_add(to, x, emulator::Order::kRelaxed);
}
inline void red_add_release(int32_t* to, int32_t x) {
  emulator::fetch_add(to, x, emulator::Order::kRelease);
}
inline void red_or_release(int32_t* to, int32_t bits) {
  emulator::fetch_or(to, bits, emulator::Order::kRelease);
}
inline float4 load_cg(const float4* from) { return *from; }
inline float2 load_pair(const float2* from) { return *from; }
inline int4 load_nc_no_allocate(const char* from) { return *reinterpret_cast<const int4*>(from); }

inline int4 load_in_order_16_if(const char* from, bool valid, uint32_t otherwise) {
  const int32_t x = static_cast<int32_t>(otherwise);
  return valid ? load_nc_no_allocate(from) : make_int4(x, x, x, x);
}
inline uint32_t load_in_order_4_if(const char* from, bool valid, uint32_t otherwise) {
  return valid ? load_if<4>(from, true) : otherwise;
}

// The next kernel may start now, or has to wait: it sees no more of this one either way.
inline void griddep_launch_dependents() {}
inline void griddep_wait() { emulator::griddep_wait(); }

inline int32_t warp_slot() { return static_cast<int32_t>(threadIdx.x / 32); }

}  // namespace flashattn::cuda::ptx
