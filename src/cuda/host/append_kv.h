// Launches the kernels of flashattn_append_kv.
#pragma once

#include <cuda_runtime_api.h>

#include "core/append_rows.h"

namespace flashattn::cuda {

// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_append_kernels(const Problem& problem);
// vectors: rows of all arrays of the call can be moved 8 elements at once. multiprocessors: of the
// device.
cudaError_t launch_append_kv(const Problem& problem, const AppendArgs& args, bool vectors,
                             int32_t multiprocessors, cudaStream_t stream);

}  // namespace flashattn::cuda
