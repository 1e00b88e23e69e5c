// Loads kernels at plan creation. Otherwise the first launch would load them, which takes long and
// may wait for the device.
#pragma once

#include <cuda_runtime_api.h>

namespace flashattn::cuda {

template <class... Params>
cudaError_t preload(void (*... kernels)(Params)) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

}  // namespace flashattn::cuda
