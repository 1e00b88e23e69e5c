// Hopper backward row for E4M3: copies of q, k and v in 16 bits, then the row that computes those.
#include "cuda/host/sm90_fp8_bwd.h"

#include "core/arrays.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/sm90_fp8_convert.h"

namespace flashattn::cuda::sm90 {

// The 16-bit type is that of o and dO, which the kernels then read in place, or that of the
// gradients.
Problem Fp8BackwardRow::in_16_bits(const Problem& problem) {
  const auto is_16_bits = [](int32_t dtype) {
    return dtype == FLASHATTN_DTYPE_F16 || dtype == FLASHATTN_DTYPE_BF16;
  };
  Problem p = problem;
  p.dtype = is_16_bits(p.dtype_o)      ? p.dtype_o
            : is_16_bits(p.dtype_grad) ? p.dtype_grad
                                       : FLASHATTN_DTYPE_BF16;
  p.dtype_kv = p.dtype_grad = p.dtype;
  p.descale_block = 0;
  return p;
}

Fp8BackwardRow::Fp8BackwardRow(const Problem& problem, const Device& device)
    : problem_(problem), in_16_bits_(in_16_bits(problem)) {
  throw_on(preload_convert(), "cudaFuncGetAttributes");
  rows_.make(backward_registry(), "sm90", "", in_16_bits_, device);
}

Fp8BackwardRow::Copies Fp8BackwardRow::copies(const Shape& shape, void* base) const {
  WorkspaceAllocator memory(base);
  const auto take = [&](Rows rows, int32_t heads, int32_t dim) {
    void* const data = memory.take<uint16_t>(rows.batch * rows.tokens * heads * dim);
    return resolve_strides({data, -1, -1, -1}, rows, heads, dim);
  };
  const Rows q = query_rows(problem_, shape), kv = key_rows(problem_, shape, 0);
  Copies made{};
  made.q = take(q, problem_.heads_q, problem_.dim_qk);
  made.k = take(kv, problem_.heads_kv, problem_.dim_qk);
  made.v = take(kv, problem_.heads_kv, problem_.dim_v);
  if (problem_.dtype_grad != in_16_bits_.dtype) {
    made.dq = take(q, problem_.heads_q, problem_.dim_qk);
    made.dk = take(kv, problem_.heads_kv, problem_.dim_qk);
    made.dv = take(kv, problem_.heads_kv, problem_.dim_v);
  }
  made.bytes = memory.unaligned_bytes();
  return made;
}

int64_t Fp8BackwardRow::workspace(const Shape& shape) const {
  return copies(shape, nullptr).bytes + rows_.workspace(shape);
}

std::string Fp8BackwardRow::describe(const Shape& shape,
                                     flashattn_plan_properties* properties) const {
  const std::string type = dtype_label(in_16_bits_.dtype);
  return " on copies of q, k and v in " + type + " in the workspace" +
         (problem_.dtype_grad == in_16_bits_.dtype ? "" : ", whose gradients are converted") +
         ": " + rows_.why(shape, properties);
}

int32_t Fp8BackwardRow::launch(const BackwardArgs& args, void* workspace,
                               cudaStream_t stream) const {
  const Copies made = copies(args.shape, workspace);
  const int32_t dtype = in_16_bits_.dtype;
  const auto convert = [&](const flashattn_tensor(&from)[3], const flashattn_tensor(&to)[3],
                           const flashattn_tensor(&descale)[3], int32_t dtype_from,
                           int32_t dtype_to) {
    ConvertParams p{};
    p.problem = problem_;
    p.shape = args.shape;
    p.inputs = args.inputs;
    for (int32_t n = 0; n < 3; ++n) {
      ConvertOperand& x = p.operands[n];
      x.from = from[n];
      x.to = to[n];
      x.descale = descale[n];
      x.dtype_from = dtype_from;
      x.dtype_to = dtype_to;
    }
    return launch_convert(p, stream);
  };
  const Inputs& in = args.inputs;
  if (const int32_t status = status_of(
          convert({in.q, in.k, in.v}, {made.q, made.k, made.v},
                  {in.descale_q, in.descale_k, in.descale_v}, FLASHATTN_DTYPE_F8E4M3, dtype),
          "launching the conversion of q, k and v")) {
    return status;
  }
  BackwardArgs inner = args;
  inner.inputs.q = made.q;
  inner.inputs.k = made.k;
  inner.inputs.v = made.v;
  inner.inputs.descale_q = inner.inputs.descale_k = inner.inputs.descale_v = {};
  const bool in_place = problem_.dtype_grad == dtype;
  if (!in_place) {
    inner.dq = made.dq;
    inner.dk = made.dk;
    inner.dv = made.dv;
  }
  char* const rest = static_cast<char*>(workspace) + made.bytes;
  if (const int32_t status = rows_.choose(args.shape, &inner).launch(inner, rest, stream)) {
    return status;
  }
  if (in_place) return FLASHATTN_OK;
  return status_of(convert({made.dq, made.dk, made.dv}, {args.dq, args.dk, args.dv}, {}, dtype,
                           problem_.dtype_grad),
                   "launching the conversion of the gradients");
}

}  // namespace flashattn::cuda::sm90
