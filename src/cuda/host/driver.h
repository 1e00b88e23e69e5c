// The driver itself, where the runtime does not do. It is not linked: the library loads without.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn::cuda {

constexpr int32_t kMaxDevices = 64;  // more are not seen

// NULL: this driver has none of that name.
void* find_driver_function(const char* name);

template <class Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(find_driver_function(name));
}

// A device, current while this lives. Throws Refused. Nothing is done where it is current already,
// in the caller's own context perhaps; else that context, or that there was none, is restored:
// cudaSetDevice would put primary ones in its place, and make them.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CUcontext before_;
  decltype(cuCtxSetCurrent)* restore_;  // NULL: there is nothing to restore
};

// The context that is current where it is made, and in which a plan loads its kernels: others of
// the same device have none of them.
class PlanContext {
 public:
  explicit PlanContext(int32_t device);
  // OK while it is current, or the runtime would make it so. An enum flashattn_status.
  int32_t check_current() const;

 private:
  CUcontext context_;
  bool primary_;  // the runtime takes it where none is current
};

}  // namespace flashattn::cuda
