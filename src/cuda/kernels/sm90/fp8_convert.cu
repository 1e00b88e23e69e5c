#include "cuda/kernels/sm90/fp8_convert.h"

#include "core/seqlen_info.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kThreads = kConvertThreads, kVector = kConvertVector, kRows = kConvertRows;

// Eight elements as they lie in memory. kFrom: F8E4M3, or 0: F16 or BF16.
template <int32_t kFrom>
__device__ __forceinline__ uint4 load_bits(const char* from) {
  if constexpr (kFrom == 0) return *reinterpret_cast<const uint4*>(from);
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {words.x, words.y, 0, 0};
}

template <int32_t kFrom>
__device__ __forceinline__ void unpack_bits(uint4 bits, int32_t dtype, float (&x)[kVector]) {
  uint32_t pairs[] = {bits.x, bits.y, bits.z, bits.w};
  if constexpr (kFrom != 0) {
    const uint32_t words[] = {bits.x, bits.y};
#pragma unroll
    for (int n = 0; n < 4; ++n) pairs[n] = ptx::unpack_e4m3(words[n / 2] >> n % 2 * 16);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two = kFrom == 0 && dtype == FLASHATTN_DTYPE_BF16
                           ? ptx::unpack<__nv_bfloat16>(pairs[n])
                           : ptx::unpack<__half>(pairs[n]);
    x[2 * n] = two.x, x[2 * n + 1] = two.y;
  }
}

// Multiplies elements of E4M3 by a descale. They saturate at the largest number of dtype.
__device__ __forceinline__ void descale(float (&x)[kVector], float by, int32_t dtype) {
  const float most = dtype == FLASHATTN_DTYPE_F16 ? 65504.0f : 0x1.fep127f;
#pragma unroll
  for (float& each : x) each *= by;
  if (by <= most / ptx::kMaxE4m3) return;
#pragma unroll
  for (float& each : x) each = fabsf(each) > most ? copysignf(most, each) : each;
}

template <int32_t kTo>
__device__ __forceinline__ void store(char* to, int32_t dtype, const float (&x)[kVector]) {
  switch (kTo == 0 ? dtype : kTo) {
    case FLASHATTN_DTYPE_F16: return store_elements(reinterpret_cast<__half*>(to), x);
    case FLASHATTN_DTYPE_BF16: return store_elements(reinterpret_cast<__nv_bfloat16*>(to), x);
    default: store_elements(reinterpret_cast<float*>(to), x);
  }
}

// The rows of a sequence to write, and among them those to read; the others are 0.
struct RowRanges {
  Interval written, read;
};

__device__ __forceinline__ RowRanges row_ranges(const ConvertParams& params, bool is_q,
                                                Lengths len) {
  const Interval all{0, is_q ? len.q : len.kv};
  if (!params.visible_only || is_q) return {all, all};
  if (len.q == 0) return {};
  const Interval seen = key_span(params.problem.mask_rule(), {0, len.q}, len).any;
  if (seen.begin >= seen.end) return {};
  const int32_t behind = len.kv - seen.end;
  return {{seen.begin > kMaxTileKv ? seen.begin - kMaxTileKv : 0,
           behind > kMaxTileKv ? seen.end + kMaxTileKv : len.kv},
          seen};
}

// A CTA converts every x.ctas-th tile of rows of a head. The head varies fastest among CTAs, as
// heads lie side by side in memory. kFrom and kTo: types; 0: those of the operand.
template <int32_t kFrom, int32_t kTo>
__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ ConvertParams params) {
  const ConvertOperand& x = operand_of_cta(params.operands);
  const Problem& problem = params.problem;
  const int32_t cta = static_cast<int32_t>(blockIdx.x - x.first_cta);
  const int32_t cta_of_batch = cta / x.heads, h = cta - cta_of_batch * x.heads;
  const int32_t b = cta_of_batch / x.ctas, cta_of_head = cta_of_batch - b * x.ctas;
  const SeqlenInfo sequence = seqlen_info(problem, params.shape, params.inputs, b);
  const RowRanges rows = row_ranges(params, x.is_q, sequence.len);
  const int64_t offset = x.is_q ? sequence.offset_q : sequence.offset_kv;
  const int32_t thread = threadIdx.x, step = kThreads >> x.log2_lanes;
  const int32_t column = (thread & ((1 << x.log2_lanes) - 1)) * kVector;
  if (column >= x.dim) return;
  const int32_t size_from = dtype_size(x.dtype_from), size_to = dtype_size(x.dtype_to);
  const bool paged = !x.is_q && problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  const PagedRowView from{
      {tensor_row(x.from, size_from, paged ? 0 : b, h, paged ? 0 : offset) + column * size_from,
       x.from.stride_seq * size_from},
      paged ? params.inputs.page_table + b * params.inputs.page_table_stride : nullptr,
      problem.page_size,
      x.from.stride_batch * size_from,
      params.inputs.pages};
  char* const to = tensor_row(x.to, size_to, b, h, offset) + column * size_to;
  const int64_t to_row_bytes = x.to.stride_seq * size_to;
  const int32_t block = problem.descale_block;
  const char* const descales =
      x.descale.data
          ? tensor_row(x.descale, 4, b, x.is_q ? h / problem.q_heads_per_kv_head() : h, 0)
          : nullptr;
  const auto descale_of = [&](int32_t n) {
    return *reinterpret_cast<const float*>(descales + n * x.descale.stride_seq * 4);
  };
  const uint32_t page_size = problem.page_size;
  const bool has_blocks = descales && block > 0;
  const float single = descales && block == 0 && rows.read.end > 0 ? descale_of(0) : 1.0f;
  // Unsigned: the last sum may be above 2^31.
  uint32_t first = rows.written.begin + cta_of_head * x.tile_rows() + (thread >> x.log2_lanes);
  const uint32_t end = rows.written.end, count = rows.read.end - rows.read.begin;
#pragma unroll 1
  for (; first < end; first += x.ctas * x.tile_rows()) {
    int32_t pages[kRows];
    if (paged) {
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const uint32_t i = first + n * step;
        pages[n] = i - rows.read.begin < count ? from.pages[i / page_size] : 0;
      }
    }
    uint4 bits[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const uint32_t i = first + n * step;
      bits[n] = {};
      if (i - rows.read.begin >= count) continue;
      bits[n] = load_bits<kFrom>(paged ? from.row(pages[n], static_cast<int32_t>(i))
                                       : from.base + i * from.row_bytes);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const uint32_t i = first + n * step;
      if (i >= end) break;
      float y[kVector];
      unpack_bits<kFrom>(bits[n], x.dtype_from, y);
      if constexpr (kFrom != 0) {
        float by = single;
        if (has_blocks && i - rows.read.begin < count)
          by = descale_of(static_cast<int32_t>(i) / block);
        descale(y, by, kTo);
      }
      store<kTo>(to + i * to_row_bytes, x.dtype_to, y);
    }
  }
}

}  // namespace

ConvertKernels convert_kernels() {
  constexpr int32_t kF8 = FLASHATTN_DTYPE_F8E4M3;
  return {&convert_kernel<kF8, FLASHATTN_DTYPE_F16>, &convert_kernel<kF8, FLASHATTN_DTYPE_BF16>,
          &convert_kernel<0, 0>};
}

}  // namespace flashattn::cuda::sm90
