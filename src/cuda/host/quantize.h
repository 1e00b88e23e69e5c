// Launches the kernels of flashattn_quantize.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/common/quantize.h"

namespace flashattn::cuda {

// The resources of a device that the kernels may use.
struct QuantizeLimits {
  int32_t multiprocessors, shared_bytes;
  int32_t max_ctas;        // CTAs of a cluster
  int32_t stream_threads;  // of a CTA of quantize_stream_kernel, unless it loads rows again
  // Clusters of 2^n CTAs that run at once, each CTA with half of a multiprocessor or a whole one.
  // 0: no kernel may run in clusters.
  int32_t clusters_of_halves[5], clusters_of_wholes[5];
};

// Loads the kernels, and fills limits->max_ctas.
cudaError_t ready_quantize_kernels(QuantizeLimits* limits);
cudaError_t launch_quantize(const Problem& problem, const QuantizeArgs& args,
                            const QuantizeLimits& limits, cudaStream_t stream);

}  // namespace flashattn::cuda
