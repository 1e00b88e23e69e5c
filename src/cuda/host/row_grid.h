// The grid of kernels that work row by row.
#pragma once

#include <cuda_runtime_api.h>

#include "core/mask_geometry.h"

namespace flashattn::cuda {

// x: a head of a sequence, at most as many as check_grid() allows. y: rows; CTAs loop if there are
// more than 65,535 of them.
inline dim3 row_grid(int32_t batch, int32_t heads, int64_t rows, int64_t rows_per_cta) {
  const int64_t ctas = ceil_div(rows, rows_per_cta);
  return {static_cast<unsigned>(batch) * static_cast<unsigned>(heads),
          static_cast<unsigned>(ctas < 65535 ? ctas : 65535)};
}

}  // namespace flashattn::cuda
