// In place of src/cuda/host/launch.h: kernels start in the emulator.
#pragma once

#include "emulator.h"

namespace flashattn::cuda {

template <class Params>
cudaError_t launch_with(bool early, void (*kernel)(Params), dim3 grid, int threads,
                        int shared_bytes, const Params& params, cudaStream_t stream, int cluster) {
  const cudaError_t error = emulator::start_error(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  emulator::enqueue(stream, [=] {
    emulator::run_grid(grid, threads, shared_bytes, [&] { kernel(params); }, cluster, early);
  });
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_pdl(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                       const Params& params, cudaStream_t stream, int cluster = 1) {
  return launch_with(true, kernel, grid, threads, shared_bytes, params, stream, cluster);
}

template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                          const Params& params, cudaStream_t stream, int cluster = 1) {
  return launch_with(false, kernel, grid, threads, shared_bytes, params, stream, cluster);
}

// Larger clusters than there are multiprocessors run, too.
inline int active_clusters(const void*, int cluster, int, int) {
  return cluster > emulator::kMultiprocessors ? 1 : emulator::kMultiprocessors / cluster;
}

}  // namespace flashattn::cuda
