// Data movement and synchronisation, one PTX instruction per function (PTX ISA, "Data Movement" and
// "Parallel Synchronization").
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Dynamic shared memory of the CTA, aligned to 1024 bytes.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// Copies 16 bytes to shared memory asynchronously. If `valid` is false, it stores zeros and does
// not read.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// As cp_async_16, for 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores 16 bytes, 4 bytes or two floats to global memory under a predicate, without a branch.
__device__ __forceinline__ void store_if(bool condition, void* to, const uint32_t (&x)[4]) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
          static_cast<int>(condition)),
      "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// store_if with the streaming policy (.cs), for data that is not read again soon.
__device__ __forceinline__ void store_streaming_if(bool condition, void* to,
                                                   const uint32_t (&x)[4]) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.cs.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
          static_cast<int>(condition)),
      "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

__device__ __forceinline__ void store_if(bool condition, void* to, uint32_t x) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2;}" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "r"(x)
               : "memory");
}

__device__ __forceinline__ void store_if(bool condition, float* to, float x, float y) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3};}" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "f"(x), "f"(y)
               : "memory");
}

// Loads 1, 2 or 4 bytes through the non-coherent path under a predicate, without a branch; 0 if
// `valid` is false. Nothing may write the memory while the kernel runs.
template <int kBytes>
__device__ __forceinline__ uint32_t load_if(const void* from, bool valid) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4, "one number");
  uint32_t x;
  if constexpr (kBytes == 1) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u8 %0, [%1];}"
                 : "=&r"(x)
                 : "l"(from), "r"(static_cast<int>(valid)));
  } else if constexpr (kBytes == 2) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u16 %0, [%1];}"
        : "=&r"(x)
        : "l"(from), "r"(static_cast<int>(valid)));
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
        : "=&r"(x)
        : "l"(from), "r"(static_cast<int>(valid)));
  }
  return x;
}

// Loads four 8 x 8 matrices, 16-bit; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z,
                                                uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void clear_shared_16(uint32_t to) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t to, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ uint64_t load_shared_8(uint32_t from) {
  uint64_t x;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ int4 load_shared_16(uint32_t from) {
  int4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Loads four floats.
__device__ __forceinline__ void load_shared(float (&x)[4], uint32_t from) {
  const int4 words = load_shared_16(from);
  x[0] = __uint_as_float(static_cast<uint32_t>(words.x));
  x[1] = __uint_as_float(static_cast<uint32_t>(words.y));
  x[2] = __uint_as_float(static_cast<uint32_t>(words.z));
  x[3] = __uint_as_float(static_cast<uint32_t>(words.w));
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// Adds to a number in global memory under a predicate.
__device__ __forceinline__ void red_add_if(bool condition, float* to, float x) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p red.global.add.f32 [%1], %2;}" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "f"(x)
               : "memory");
}

// Whether red_add_v4() is one instruction.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasRedAddV4 = true;
#else
constexpr bool kHasRedAddV4 = false;
#endif

// Adds to four neighbours in global memory, 16-byte aligned. Only where kHasRedAddV4.
__device__ __forceinline__ void red_add_v4(float* to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
#endif
}

// Adds to two neighbours in global memory, 8-byte aligned, in one transaction where the hardware
// has that.
__device__ __forceinline__ void red_add_v2(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}

// Loads four words that other threads may store concurrently; each word is atomic.
__device__ __forceinline__ int4 load_relaxed(const int32_t* from) {
  int4 x;
  asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t x) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Stores a value that other threads may load concurrently.
__device__ __forceinline__ void store_relaxed(int32_t* to, int32_t x) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Device-wide fence: writes that this thread has made or observed are visible to every thread that
// observes its later writes.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void red_add_relaxed(int32_t* to, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Raises a number that other threads may raise concurrently.
__device__ __forceinline__ void red_max(uint32_t* to, uint32_t x) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Returns the value before. Acquires the writes that other threads released through this word.
__device__ __forceinline__ int32_t fetch_or_acquire(int32_t* at, int32_t bits) {
  int32_t found;
  asm volatile("atom.acquire.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(found)
               : "l"(at), "r"(bits)
               : "memory");
  return found;
}

// Loads 16 bytes that other multiprocessors may have written: from L2, bypassing L1.
__device__ __forceinline__ float4 load_cg(const float4* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Loads 8 bytes here, neither earlier nor later.
__device__ __forceinline__ float2 load_pair(const float2* from) {
  float2 x;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
  return x;
}

// Loads 16 bytes that the kernel reads once and does not write: no L1 line is allocated, and L2
// prefetches the surrounding 256 bytes.
__device__ __forceinline__ int4 load_nc_no_allocate(const char* from) {
  int4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// Loads 16 or 4 bytes under a predicate, without a branch; each word is `otherwise` if `valid` is
// false. Unlike loads through the non-coherent path, ptxas leaves them before a later wait for an
// mbarrier.
__device__ __forceinline__ int4 load_in_order_16_if(const char* from, bool valid,
                                                    uint32_t otherwise) {
  int4 x;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; "
      "mov.b32 %3, %6; @p ld.global.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(valid)), "r"(otherwise)
      : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_in_order_4_if(const char* from, bool valid,
                                                       uint32_t otherwise) {
  uint32_t x;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, %3; @p ld.global.b32 %0, [%1];}"
               : "=&r"(x)
               : "l"(from), "r"(static_cast<int>(valid)), "r"(otherwise)
               : "memory");
  return x;
}

__device__ __forceinline__ void red_add_release(int32_t* to, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void red_or_release(int32_t* to, int32_t bits) {
  asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// The next kernel of the stream, if launched by programmatic dependent launch, may start once all
// CTAs have called this.
__device__ __forceinline__ void griddep_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel launched by programmatic dependent launch: waits until the kernels before it are
// complete and their writes visible.
__device__ __forceinline__ void griddep_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The warp slot of the multiprocessor in which this warp runs.
__device__ __forceinline__ int32_t warp_slot() {
  int32_t x;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(x));
  return x;
}

}  // namespace flashattn::cuda::ptx
