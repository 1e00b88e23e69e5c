// Encodes TMA descriptors by the driver.
#include "cuda/host/tensor_map.h"

#include <algorithm>
#include <cinttypes>

#include "core/error.h"
#include "cuda/bias_panels.h"
#include "cuda/host/driver.h"
#include "cuda/host/kernel_setup.h"

namespace flashattn::cuda::sm90 {
namespace {

using Encode = decltype(cuTensorMapEncodeTiled)*;

Encode encode() {
  static const Encode function =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return function;
}

}  // namespace

bool has_tensor_maps() { return encode() != nullptr; }

int32_t make_tensor_map(const flashattn_tensor& tensor, int32_t dtype, const ArrayShape& shape,
                        const char* name, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(shape.columns),
                              static_cast<cuuint64_t>(std::max<int64_t>(shape.rows, 1)),
                              static_cast<cuuint64_t>(shape.heads),
                              static_cast<cuuint64_t>(std::max<int64_t>(shape.batch, 1))};
  const int32_t size = dtype_size(dtype);
  const auto bytes = [size](int64_t extent, int64_t stride) {
    return static_cast<cuuint64_t>(extent > 1 ? stride * size : 16);
  };
  const cuuint64_t strides[] = {bytes(shape.rows, tensor.stride_seq),
                                bytes(shape.heads, tensor.stride_head),
                                bytes(shape.batch, tensor.stride_batch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(shape.box_columns),
                            static_cast<cuuint32_t>(shape.box_rows),
                            static_cast<cuuint32_t>(shape.box_heads), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result = encode()(
      map,
      size == 1                       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : size == 4                     ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : dtype == FLASHATTN_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.box_columns * size == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE) {
    return status_of(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled");
  }
  // Box coordinates have 32 bits.
  if (result == CUDA_SUCCESS && shape.rows <= INT32_MAX) return FLASHATTN_OK;
  return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_STRIDE, name,
              "%s lies at %p with strides %" PRId64 ", %" PRId64 ", %" PRId64
              ", which the copy engine does not take (driver error %d); strides must be below 2^39 "
              "elements and no array may have 2^31 rows",
              name, tensor.data, tensor.stride_batch, tensor.stride_head, tensor.stride_seq,
              static_cast<int>(result));
}

int32_t make_bias_map(const Problem& problem, const Inputs& in, const Shape& shape, int32_t tile_kv,
                      CUtensorMap* map) {
  const int32_t element = dtype_size(problem.dtype_bias);
  const int32_t columns =
      tile_kv == 64 ? BiasPanels<64>::columns(element) : BiasPanels<128>::columns(element);
  return make_tensor_map(
      bias_tensor(in), problem.dtype_bias,
      {shape.seqlen_kv, shape.seqlen_q, problem.heads_q, shape.batch, kBiasPanelRows, columns},
      "bias", map);
}

}  // namespace flashattn::cuda::sm90
