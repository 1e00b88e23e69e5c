// Launches kernels whose only parameter is a structure.
#pragma once

#include <cuda_runtime_api.h>

namespace flashattn::cuda {

// early: by programmatic dependent launch, see launch_pdl(). cluster: CTAs of a cluster.
template <class Params>
cudaError_t launch_with(bool early, void (*kernel)(Params), dim3 grid, int threads,
                        int shared_bytes, const Params& params, cudaStream_t stream, int cluster) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                          const Params& params, cudaStream_t stream, int cluster = 1) {
  return launch_with(false, kernel, grid, threads, shared_bytes, params, stream, cluster);
}

// Launches with programmatic dependent launch (PDL). CTAs may start as soon as all CTAs of the
// previous kernel have called ptx::griddep_launch_dependents() or ended. CTAs must call
// ptx::griddep_wait() before they use the previous kernel's results, except results that it
// publishes by a release-acquire flag which carries the launch's stamp; without the stamp they
// could see a flag of an earlier launch. At least one thread must call griddep_wait(), because
// whoever waits for this kernel also waits for the kernels before it.
template <class Params>
cudaError_t launch_pdl(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                       const Params& params, cudaStream_t stream, int cluster = 1) {
  return launch_with(true, kernel, grid, threads, shared_bytes, params, stream, cluster);
}

// How many clusters of `cluster` CTAs the device runs at once; 0: it has no clusters of that size.
inline int active_clusters(const void* kernel, int cluster, int threads, int shared_bytes) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters;
  cudaGetLastError();  // clears it
  return 0;
}

}  // namespace flashattn::cuda
