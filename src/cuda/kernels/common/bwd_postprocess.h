// The kernels after the backward pass: dQ in its output type, and the gradient of the sinks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace flashattn::cuda {

// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_bwd_postprocess(const Problem& problem);
// Scales the fp32 sums of dq, converts them and writes args.dq.
cudaError_t launch_bwd_postprocess(const BackwardParams& params, cudaStream_t stream);
// Clears args.dbias; and loads the kernel that does.
cudaError_t launch_clear_dbias(const BackwardParams& params, int32_t multiprocessors,
                               cudaStream_t stream);
cudaError_t preload_clear_dbias();
// Writes args.dsink from lse2, delta and base.
cudaError_t launch_dsink(const BackwardParams& params, cudaStream_t stream);

}  // namespace flashattn::cuda
