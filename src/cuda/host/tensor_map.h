// TMA descriptors (tensor maps) of the arrays that the Hopper kernels load and store.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "core/problem.h"

namespace flashattn::cuda::sm90 {

// An array (batch, row, head, column) of one of the dtypes, and its TMA boxes of box_heads x
// box_rows x box_columns: rows of 128 or 64 bytes, with the swizzle of that size.
struct ArrayShape {
  int64_t columns, rows, heads, batch;
  int32_t box_rows, box_columns = 64, box_heads = 1;
};

// Returns an enum flashattn_status. name: the argument, for the message.
int32_t make_tensor_map(const flashattn_tensor& tensor, int32_t dtype, const ArrayShape& shape,
                        const char* name, CUtensorMap* map);

// The map of a dense bias, whose boxes are the panels of tiles of tile_kv keys, see BiasPanels.
int32_t make_bias_map(const Problem& problem, const Inputs& in, const Shape& shape, int32_t tile_kv,
                      CUtensorMap* map);

inline flashattn_tensor bias_tensor(const Inputs& in) {
  return {const_cast<void*>(in.bias), in.bias_stride_batch, in.bias_stride_head,
          in.bias_stride_row};
}

// Strides, in elements, must be below this, TMA's limit.
constexpr int64_t kMostStride = INT64_C(1) << 39;

inline bool copies_strides(const flashattn_tensor& tensor) {
  return std::max({tensor.stride_batch, tensor.stride_head, tensor.stride_seq}) < kMostStride;
}

// Whether kernels of ScoreModKind::kDenseBias take the bias of a call.
bool accepts_bias(const Problem& problem, const Inputs& in);

// Whether the driver has TMA descriptors.
bool has_tensor_maps();

}  // namespace flashattn::cuda::sm90
