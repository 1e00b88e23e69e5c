// Chooses a kernel's template argument by a dtype.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "flashattn.h"

namespace flashattn::cuda {

// Calls use() with a number of a dtype's type; of 16 or 32 bits.
template <class Use>
auto with_type(int32_t dtype, Use use) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return use(__half());
    case FLASHATTN_DTYPE_BF16: return use(__nv_bfloat16());
    default: return use(0.0f);
  }
}

}  // namespace flashattn::cuda
