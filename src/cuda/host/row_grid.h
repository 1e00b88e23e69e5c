// The grid of kernels that work row by row.
#pragma once

#include <cuda_runtime_api.h>

#include "core/mask_geometry.h"

namespace flashattn::cuda {

// x: one head of one sequence; check_grid() limits their number. y: rows_per_cta rows; CTAs loop if
// that would make more than 65,535 CTAs.
inline dim3 row_grid(int32_t batch, int32_t heads, int64_t rows, int64_t rows_per_cta) {
  const int64_t ctas = ceil_div(rows, rows_per_cta);
  return {static_cast<unsigned>(batch) * static_cast<unsigned>(heads),
          static_cast<unsigned>(ctas < 65535 ? ctas : 65535)};
}

}  // namespace flashattn::cuda
