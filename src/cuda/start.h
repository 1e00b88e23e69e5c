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

// The same, early: blocks may start as soon as those of the kernel before have called
// ptx::let_next_start() or ended, and must call ptx::wait_for_previous() before they use its
// results.
template <class Params>
cudaError_t start_early(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                        const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace flashattn::cuda
