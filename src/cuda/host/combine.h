// Launches what combines KV splits and stream-K's partials, merges the caller's partial results,
// and writes the dropout mask.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/common/combine.h"

namespace flashattn::cuda {

// Whether the combine kernel that the current device runs contains griddepcontrol.wait. It does not
// if the driver has compiled it from PTX of an older architecture.
cudaError_t combine_waits(bool* waits);
// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_combine_kernels(const Problem& problem);
// early: launches by PDL, before the forward kernel has ended. Only if combine_waits().
cudaError_t launch_combine(const ForwardParams& params, bool early, cudaStream_t stream);

cudaError_t launch_combine_tiles(const CombineTilesParams& params, bool early, cudaStream_t stream);
cudaError_t launch_merge(const MergeParams<kMaxMergeParts>& params, cudaStream_t stream);
cudaError_t launch_dropout_mask(const Problem& problem, const ForwardArgs& args, uint8_t* keep,
                                cudaStream_t stream);

}  // namespace flashattn::cuda
