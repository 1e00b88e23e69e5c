// Launches the kernels before and after the backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/common/bwd_rows.h"

namespace flashattn::cuda {

// These load the kernels that a plan with this problem may launch.
cudaError_t preload_bwd_preprocess(const Problem& problem);
cudaError_t preload_bwd_postprocess(const Problem& problem);
cudaError_t preload_clear_dbias();

// multiprocessors: of the device.
cudaError_t launch_bwd_preprocess(const BackwardParams& params, int32_t multiprocessors,
                                  cudaStream_t stream);
cudaError_t launch_bwd_postprocess(const BackwardParams& params, cudaStream_t stream);
cudaError_t launch_clear_dbias(const BackwardParams& params, int32_t multiprocessors,
                               cudaStream_t stream);
cudaError_t launch_dsink(const BackwardParams& params, cudaStream_t stream);

}  // namespace flashattn::cuda
