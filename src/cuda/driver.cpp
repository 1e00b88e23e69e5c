#include "cuda/driver.h"

#include <cuda_runtime_api.h>

#include "cuda/kernel_choice.h"

namespace flashattn::cuda {
namespace {

constexpr unsigned kVersion = 12000;  // of the driver's interface; the library needs no later one

// Calls it. Throws Refused, also where there is none.
template <class... Parameters, class... Arguments>
void call(const char* name, CUresult (*function)(Parameters...), Arguments... arguments) {
  // The runtime numbers errors as the driver does.
  throw_on(function ? static_cast<cudaError_t>(function(arguments...)) : cudaErrorNotSupported,
           name);
}

}  // namespace

void* find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();  // the caller says what is missing
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

DeviceScope::DeviceScope(int32_t device) : before_(nullptr), restore_(nullptr) {
  int current = -1;
  throw_on(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  const auto set_current = driver_function<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent");
  call("cuCtxGetCurrent", driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent"), &before_);
  CUdevice number;
  call("cuDeviceGet", driver_function<decltype(cuDeviceGet)>("cuDeviceGet"), &number, device);
  // Never released: what is loaded there, the last to release it would unload.
  CUcontext primary;
  call("cuDevicePrimaryCtxRetain",
       driver_function<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain"), &primary,
       number);
  call("cuCtxSetCurrent", set_current, primary);
  restore_ = set_current;
}

DeviceScope::~DeviceScope() {
  if (restore_) restore_(before_);
}

}  // namespace flashattn::cuda
