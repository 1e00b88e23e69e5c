// The grid of the kernels that convert rows to and from E4M3.
#include "cuda/host/sm90_fp8_convert.h"

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"

namespace flashattn::cuda::sm90 {
namespace {

// If there are more tiles, each CTA converts several: CTAs start slowly, and sequences may be much
// shorter than the shape says.
constexpr int64_t kManyCtas = 1 << 12;

}  // namespace

cudaError_t preload_convert() {
  const ConvertKernels of = convert_kernels();
  return preload(of.f8_to_f16, of.f8_to_bf16, of.other);
}

cudaError_t launch_convert(ConvertParams params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const Shape& shape = params.shape;
  int64_t tiles[3], all = 0, ctas = 0;
  for (int n = 0; n < 3; ++n) {
    ConvertOperand& x = params.operands[n];
    x.is_q = n == 0;
    x.heads = x.is_q ? problem.heads_q : problem.heads_kv;
    x.dim = n == 2 ? problem.dim_v : problem.dim_qk;
    x.log2_lanes = 0;
    while (kConvertVector << x.log2_lanes < x.dim) ++x.log2_lanes;
    const int32_t rows = x.is_q ? shape.seqlen_q : shape.seqlen_kv;
    tiles[n] = x.from.data ? ceil_div(rows, x.tile_rows()) : 0;
    all += tiles[n] * x.heads * shape.batch;
  }
  for (int n = 0; n < 3; ++n) {
    ConvertOperand& x = params.operands[n];
    x.ctas =
        static_cast<int32_t>(ceil_div(tiles[n], std::max<int64_t>(ceil_div(all, kManyCtas), 1)));
    x.first_cta = ctas;
    ctas += int64_t{x.ctas} * x.heads * shape.batch;
  }
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
  const ConvertOperand& x = params.operands[1];
  const ConvertKernels of = convert_kernels();
  const auto kernel = x.dtype_from != FLASHATTN_DTYPE_F8E4M3 ? of.other
                      : x.dtype_to == FLASHATTN_DTYPE_F16    ? of.f8_to_f16
                                                             : of.f8_to_bf16;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(ctas)), kConvertThreads, 0, params,
                       stream);
}

}  // namespace flashattn::cuda::sm90
