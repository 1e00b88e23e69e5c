// The GPU backends: what core sees of them.
#pragma once

#include "core/backend.h"

namespace flashattn {

// The Hopper backend, on TMA and WGMMA.
const Backend& cuda_sm90_backend();

// The portable backend, on mma.sync: Ampere and later.
const Backend& cuda_sm80_backend();

// How many GPUs there are; 0 where there is no driver.
int32_t cuda_device_count();

// index in [0, cuda_device_count()).
const Device& cuda_device(int32_t index);

// Why there are none: the runtime's own words.
const char* cuda_no_device_reason();

// The GPU architectures in this build: "sm_80, sm_90, compute_80".
const char* cuda_architectures();

}  // namespace flashattn
