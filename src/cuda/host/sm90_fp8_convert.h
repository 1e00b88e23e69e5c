// Launches the kernels that convert rows to and from E4M3.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/sm90/fp8_convert.h"

namespace flashattn::cuda::sm90 {

cudaError_t preload_convert();
// Vectors of 8 elements must be aligned in all arrays. One launch; rows past a sequence's length
// are neither read nor written.
cudaError_t launch_convert(ConvertParams params, cudaStream_t stream);

}  // namespace flashattn::cuda::sm90
