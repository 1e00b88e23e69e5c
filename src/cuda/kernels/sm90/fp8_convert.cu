#include "cuda/kernels/sm90/fp8_convert.h"

#include "core/seqlen_info.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/preload.h"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of a row that a thread has
constexpr int kRows = 4;    // of a thread, loaded together

__device__ __forceinline__ int32_t tile_rows(const ConvertOperand& x) {
  return kThreads * kRows >> x.log2_lanes;
}

// The bits of 8 elements.
__device__ __forceinline__ uint4 load_bits(const char* from, int32_t dtype) {
  if (dtype != FLASHATTN_DTYPE_F8E4M3) return *reinterpret_cast<const uint4*>(from);
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {words.x, words.y, 0, 0};
}

__device__ __forceinline__ void unpack_bits(uint4 bits, int32_t dtype, float (&x)[kVector]) {
  uint32_t pairs[] = {bits.x, bits.y, bits.z, bits.w};
  if (dtype == FLASHATTN_DTYPE_F8E4M3) {
    const uint32_t words[] = {bits.x, bits.y};
#pragma unroll
    for (int n = 0; n < 4; ++n) pairs[n] = ptx::unpack_e4m3(words[n / 2] >> n % 2 * 16);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two = dtype == FLASHATTN_DTYPE_BF16 ? ptx::unpack<__nv_bfloat16>(pairs[n])
                                                     : ptx::unpack<__half>(pairs[n]);
    x[2 * n] = two.x, x[2 * n + 1] = two.y;
  }
}

// A CTA: some rows of a head. Heads come first, as they lie side by side.
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ ConvertParams params) {
  const ConvertOperand& x = operand_of_cta(params.operands);
  const int32_t cta = static_cast<int32_t>(blockIdx.x - x.first_cta);
  const int32_t tile_of_batch = cta / x.heads, h = cta - tile_of_batch * x.heads;
  const int32_t b = tile_of_batch / x.tiles, tile = tile_of_batch - b * x.tiles;
  const SeqlenInfo sequence = seqlen_info(params.problem, params.shape, params.inputs, b);
  const int32_t length = x.is_q ? sequence.len.q : sequence.len.kv;
  const int64_t offset = x.is_q ? sequence.offset_q : sequence.offset_kv;
  const int32_t column = (static_cast<int32_t>(threadIdx.x) & ((1 << x.log2_lanes) - 1)) * kVector;
  const int32_t step = kThreads >> x.log2_lanes;
  const int32_t first = tile * tile_rows(x) + (static_cast<int32_t>(threadIdx.x) >> x.log2_lanes);
  if (column >= x.dim) return;
  const int32_t size_from = dtype_size(x.dtype_from), size_to = dtype_size(x.dtype_to);
  uint4 bits[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int32_t i = first + n * step;
    if (i < length) {
      bits[n] = load_bits(tensor_row(x.from, size_from, b, h, offset + i) + column * size_from,
                          x.dtype_from);
    }
  }
  const int32_t kv_head = x.is_q ? h / params.problem.q_heads_per_kv_head() : h;
  const int32_t block = params.problem.descale_block;
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int32_t i = first + n * step;
    if (i >= length) return;
    float y[kVector];
    unpack_bits(bits[n], x.dtype_from, y);
    if (x.descale.data) {
      const float descale = *reinterpret_cast<const float*>(
          tensor_row(x.descale, 4, b, kv_head, block > 0 ? i / block : 0));
#pragma unroll
      for (float& each : y) each *= descale;
    }
    char* const to = tensor_row(x.to, size_to, b, h, offset + i) + column * size_to;
    switch (x.dtype_to) {
      case FLASHATTN_DTYPE_F16: store_elements(reinterpret_cast<__half*>(to), y); break;
      case FLASHATTN_DTYPE_BF16: store_elements(reinterpret_cast<__nv_bfloat16*>(to), y); break;
      default: store_elements(reinterpret_cast<float*>(to), y);
    }
  }
}

}  // namespace

cudaError_t preload_convert() { return preload(&convert_kernel); }

cudaError_t launch_convert(ConvertParams params, cudaStream_t stream) {
  int64_t ctas = 0;
  for (ConvertOperand& x : params.operands) {
    x.log2_lanes = 0;
    while (kVector << x.log2_lanes < x.dim) ++x.log2_lanes;
    x.tiles = static_cast<int32_t>(ceil_div(x.seqlen, kThreads * kRows >> x.log2_lanes));
    x.first_cta = ctas;
    ctas += int64_t{x.tiles} * x.heads * params.shape.batch;
  }
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_kernel(&convert_kernel, dim3(static_cast<unsigned>(ctas)), kThreads, 0, params,
                       stream);
}

}  // namespace flashattn::cuda::sm90
