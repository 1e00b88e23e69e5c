// The kernel before the backward pass: row statistics, rounded dO, cleared workspace.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace flashattn::cuda {

// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_bwd_preprocess(const Problem& problem);
// Writes lse2, delta and base, and dO rounded to the problem's dtype where that differs from dO's.
// Clears dq and dq_order, or sets dq_states and dq_first; clears the work counters.
// multiprocessors: of the device.
cudaError_t launch_bwd_preprocess(const BackwardParams& params, int32_t multiprocessors,
                                  cudaStream_t stream);

}  // namespace flashattn::cuda
