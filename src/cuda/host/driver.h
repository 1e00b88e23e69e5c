// Functions of the CUDA driver that the runtime lacks. libcuda is not linked: the library loads on
// machines without it.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn::cuda {

constexpr int32_t kMaxDevices = 64;  // further devices are ignored

// NULL: the driver has no such function.
void* find_driver_function(const char* name);

template <class Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(find_driver_function(name));
}

// Makes a device current while the object lives. Throws Refused. Does nothing if the device is
// current already, perhaps in a context of the caller's. Otherwise the destructor restores the
// caller's context, or none if the caller had none; cudaSetDevice would create and install primary
// contexts instead.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CUcontext before_;
  decltype(cuCtxSetCurrent)* restore_;  // NULL: nothing to restore
};

// The context that is current when a plan is created. The plan's kernels are loaded there, and not
// in other contexts of the same device.
class PlanContext {
 public:
  explicit PlanContext(int32_t device);
  // Returns OK if the context is current, or if the thread has no context and this is the primary
  // one, which is then made current: the runtime would do so by itself, driver functions do not.
  // Returns an enum flashattn_status.
  int32_t make_current() const;

 private:
  CUcontext context_;
  bool primary_;  // the runtime uses it if no context is current
};

}  // namespace flashattn::cuda
