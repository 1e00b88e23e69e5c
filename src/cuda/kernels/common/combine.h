// Small kernels beside the backends' own: merging partial results, and the mask of the dropout.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace flashattn::cuda {

// Parts that one launch of flashattn_merge takes: as many as the parameters of a kernel can name.
constexpr int32_t kMaxMergeParts = 64;

// Whether the current device runs code of the kernel below that was compiled for an architecture
// which knows how to wait. From older PTX, which a driver can be told to compile, it is not.
cudaError_t combine_waits(bool* waits);
// Those of this file that a plan may start.
cudaError_t preload_combine_kernels(const Problem& problem);
// early, if it waits: before the forward kernel's blocks are done, for which its results wait.
cudaError_t launch_combine(const ForwardParams& params, bool early, cudaStream_t stream);
cudaError_t launch_merge(const MergeParams<kMaxMergeParts>& params, cudaStream_t stream);
cudaError_t launch_dropout_mask(const Problem& problem, const ForwardArgs& args, uint8_t* keep,
                                cudaStream_t stream);

}  // namespace flashattn::cuda
