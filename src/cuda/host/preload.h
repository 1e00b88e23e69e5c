// Loading kernels before their first launch, which would do it, take long and perhaps wait for the
// device.
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
