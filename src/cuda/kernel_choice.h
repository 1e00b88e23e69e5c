// What the launchers share: kernels made ready at plan creation, and checks of a call.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flashattn::cuda {

// Records a failure of the runtime; OK for cudaSuccess.
int32_t status_of(cudaError_t error, const char* what);
void throw_on(cudaError_t error, const char* what);

// Restores the caller's current device.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
};

// A kernel of a table, with what the device says of it.
template <class Entry>
struct Choice {
  const Entry* entry;
  int32_t registers;
  int32_t resident;  // blocks at once on the whole device

  const void* address() const { return reinterpret_cast<const void*>(entry->kernel); }
};

struct Residency {
  int32_t registers, resident;
};

// Allows the kernel its shared memory. Throws Refused.
Residency make_ready(const void* kernel, int32_t threads, int32_t shared_bytes, int32_t units);

template <class Entry>
Choice<Entry> prepare(const Entry& entry, int32_t units) {
  const Residency r = make_ready(reinterpret_cast<const void*>(entry.kernel), entry.threads,
                                 entry.shared_bytes, units);
  return {&entry, r.registers, r.resident};
}

// Whether scores need more than a factor.
bool is_modified(const Problem& p);

inline const char* dtype_name(int32_t dtype) {
  return dtype == FLASHATTN_DTYPE_BF16 ? "bf16" : "f16";
}

// OK when the device is the current one.
int32_t check_current(int32_t device);

// The first multiple of 16 in a workspace, which may lie anywhere; counted in its size.
constexpr int64_t kAlignmentRoom = 15;
inline void* aligned(void* workspace) {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace) + kAlignmentRoom) &
                                 ~static_cast<uintptr_t>(kAlignmentRoom));
}

struct NamedTensor {
  const char* name;
  const flashattn_tensor& tensor;
  int32_t dtype;
};

// OK when it can be moved in pieces of 16 bytes, fp32 of 8.
int32_t check_alignment(const NamedTensor& named);

// One launch of a one-dimensional grid, refused where that has too many blocks.
int32_t launch(const void* kernel, int64_t blocks, int32_t threads, int32_t shared_bytes,
               void* params, cudaStream_t stream, const char* what);

}  // namespace flashattn::cuda
