// The driver itself, where the runtime does not do. It is not linked: the library loads without.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn::cuda {

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

}  // namespace flashattn::cuda
