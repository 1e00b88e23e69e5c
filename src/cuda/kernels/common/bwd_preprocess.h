// Small kernels of the backward pass, beside the backends' own.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace flashattn::cuda {

// Those of this file that a plan with a backward pass may start.
cudaError_t load_gradient_kernels(const Problem& problem);
// Writes lse2, delta and, where dout is a copy, that; clears dq and turns, or sets dq_states and
// dq_first; clears the tickets. units: multiprocessors of the device.
cudaError_t launch_prepare_backward(const BackwardParams& params, int32_t units,
                                    cudaStream_t stream);
// The sums of dq to args.dq.
cudaError_t launch_convert_dq(const BackwardParams& params, cudaStream_t stream);
cudaError_t launch_dsink(const BackwardParams& params, cudaStream_t stream);

}  // namespace flashattn::cuda
