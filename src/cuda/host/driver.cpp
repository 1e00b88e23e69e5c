// Driver functions, found at run time, and the CUDA contexts of plans.
#include "cuda/host/driver.h"

#include <cuda_runtime_api.h>

#include "core/error.h"
#include "cuda/host/kernel_setup.h"

namespace flashattn::cuda {
namespace {

constexpr unsigned kVersion = 12000;  // version of the driver API; no later function is used

// Calls the function. Throws Refused if it fails or is missing.
template <class... Parameters, class... Arguments>
void call(const char* name, CUresult (*function)(Parameters...), Arguments... arguments) {
  // Runtime and driver use the same error numbers.
  throw_on(function ? static_cast<cudaError_t>(function(arguments...)) : cudaErrorNotSupported,
           name);
}

}  // namespace

void* find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the caller reports what is missing
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
  // The primary context is never released: the last release would unload the kernels loaded there.
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

namespace {

CUcontext current_context() {
  static const auto get = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  call("cuCtxGetCurrent", get, &context);
  return context;
}

bool is_primary(CUcontext context, int32_t device) {
  CUdevice number;
  call("cuDeviceGet", driver_function<decltype(cuDeviceGet)>("cuDeviceGet"), &number, device);
  unsigned flags = 0;
  int active = 0;
  call("cuDevicePrimaryCtxGetState",
       driver_function<decltype(cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState"), number,
       &flags, &active);
  if (!active) return false;  // retaining it would create it
  CUcontext primary;
  call("cuDevicePrimaryCtxRetain",
       driver_function<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain"), &primary,
       number);
  call("cuDevicePrimaryCtxRelease",
       driver_function<decltype(cuDevicePrimaryCtxRelease)>("cuDevicePrimaryCtxRelease"), number);
  return primary == context;
}

}  // namespace

PlanContext::PlanContext(int32_t device)
    : context_(current_context()), primary_(is_primary(context_, device)) {}

int32_t PlanContext::make_current() const {
  try {
    const CUcontext now = current_context();
    if (now == context_) return FLASHATTN_OK;
    if (!now && primary_) {
      call("cuCtxSetCurrent", driver_function<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent"),
           context_);
      return FLASHATTN_OK;
    }
    return fail(FLASHATTN_ERROR_DEVICE, FLASHATTN_REASON_VALUE, "device_index",
                "the plan is for CUDA context %p%s, in which it was made, but context %p of the "
                "same device is current; make that one current by cuCtxSetCurrent, or make a plan "
                "in this one",
                static_cast<void*>(context_), primary_ ? ", the device's primary one" : "",
                static_cast<void*>(now));
  } catch (const Refused& refused) {
    return refused.status;
  }
}

}  // namespace flashattn::cuda
