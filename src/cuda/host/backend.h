// The GPU backends, for the registry.
#pragma once

#include "core/backend.h"

namespace flashattn {

// The Hopper kernels (TMA, WGMMA).
const Backend& cuda_sm90_backend();

// The Hopper kernels for q, k and v in E4M3.
const Backend& cuda_sm90_fp8_backend();

// The Hopper kernels for latent attention.
const Backend& cuda_sm90_mla_backend();

// The portable kernels (mma.sync): Ampere and later.
const Backend& cuda_sm80_backend();

// Whether the portable backend refuses the problem. Plans of most Hopper backends also use its
// kernels.
bool is_refused_by_portable(const Problem& problem, const Device& device);

// The number of GPUs; 0 without a driver.
int32_t cuda_device_count();

// index in [0, cuda_device_count()).
const Device& cuda_device(int32_t index);

// The CUDA runtime's message if there is no GPU.
const char* cuda_no_device_reason();

// The GPU architectures of this build, as "sm_80, sm_90, compute_80".
const char* cuda_architectures();

}  // namespace flashattn
