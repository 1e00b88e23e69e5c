// Starting a kernel, whose one parameter is a structure.
#pragma once

#include <cuda_runtime_api.h>

namespace flashattn::cuda {

template <class Params>
cudaError_t start(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                  const Params& params, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                          dim3(static_cast<unsigned>(threads)), arguments,
                          static_cast<size_t>(shared_bytes), stream);
}

}  // namespace flashattn::cuda
