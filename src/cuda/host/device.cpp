// The GPUs of the machine. The CUDA runtime is not initialised before a GPU is asked for.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda/host/driver.h"
#include "cuda/host/backend.h"

namespace flashattn {
namespace {

using cuda::kMaxDevices;

// The kernels that this build has for a compute capability.
const char* best_kernels(int32_t capability) {
#if FLASHATTN_CUDA_SM90
  if (capability / 10 == 9) return "sm90";
#endif
  return capability >= 80 ? "sm80" : "none";
}

struct Machine {
  int32_t count;
  const char* reason;
  Device devices[kMaxDevices];
  char names[kMaxDevices][64];

  Machine() : count(0), reason("there is no CUDA device"), devices{}, names{} {
    int found = 0;
    const cudaError_t error = cudaGetDeviceCount(&found);
    if (error != cudaSuccess) {
      reason = cudaGetErrorString(error);
      cudaGetLastError();  // clears it: it is reported here, not by another call
      return;
    }
    for (; count < found && count < kMaxDevices; ++count) read(count);
  }

  void read(int32_t index) {
    const auto attribute = [index](cudaDeviceAttr which) {
      int value = 0;
      if (cudaDeviceGetAttribute(&value, which, index) != cudaSuccess) cudaGetLastError();
      return static_cast<int32_t>(value);
    };
    Device& device = devices[index];
    device.kind = FLASHATTN_DEVICE_CUDA;
    device.index = index;
    flashattn_device_properties& p = device.properties;
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
      std::snprintf(names[index], sizeof names[index], "%.63s", properties.name);
      p.memory = static_cast<int64_t>(properties.totalGlobalMem);
    } else {
      cudaGetLastError();
    }
    p.name = names[index];
    p.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    p.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                           attribute(cudaDevAttrComputeCapabilityMinor);
    p.shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.l2_cache = attribute(cudaDevAttrL2CacheSize);
    p.isa = best_kernels(p.compute_capability);
  }
};

const Machine& machine() {
  static const Machine found;
  return found;
}

}  // namespace

int32_t cuda_device_count() { return machine().count; }

const Device& cuda_device(int32_t index) { return machine().devices[index]; }

const char* cuda_no_device_reason() { return machine().reason; }

const char* cuda_architectures() { return FLASHATTN_GPU_ARCHS; }

}  // namespace flashattn
