// Runs each call with the cheapest row of the registry, and explains the choice.
#include "cuda/host/launcher.h"

#include <algorithm>
#include <utility>

#include "core/arrays.h"
#include "core/error.h"
#include "cuda/host/append_kv.h"
#include "cuda/host/combine.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/kernels/common/block_mask.h"

namespace flashattn::cuda {

CudaLauncher::CudaLauncher(const Problem& problem, const Device& device, const char* backend,
                           const std::string& passed_over)
    : problem_(problem),
      device_(device.index),
      multiprocessors_(device.properties.multiprocessors),
      quantize_limits_{device.properties.multiprocessors, device.properties.shared_memory, 1} {
  const DeviceScope scope(device_);
  throw_on(preload_combine_kernels(problem), "cudaFuncGetAttributes");
  throw_on(preload_append_kernels(problem), "cudaFuncGetAttributes");
  if (problem.has_mask(kMaskOfBlocks))
    throw_on(preload(block_mask_kernel()), "cudaFuncGetAttributes");
  if (problem.has_8bit())
    throw_on(ready_quantize_kernels(&quantize_limits_), "cudaFuncSetAttribute");
  forward_.make(forward_registry(), backend, passed_over, problem, device);
  if (problem.has_op(FLASHATTN_OP_BACKWARD)) {
    backward_.make(backward_registry(), backend, passed_over, problem, device);
  }
  context_.reset(new PlanContext(device_));
}

const char* CudaLauncher::keep(std::string text) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return texts_.insert(std::move(text)).first->c_str();
}

int64_t CudaLauncher::workspace(uint32_t op, const Shape& shape) const {
  return op == FLASHATTN_OP_BACKWARD ? backward_.workspace(shape) : forward_.workspace(shape);
}

void CudaLauncher::describe(uint32_t op, const Shape& shape,
                            flashattn_plan_properties* properties) const {
  properties->why = keep(op == FLASHATTN_OP_BACKWARD ? backward_.why(shape, properties)
                                                     : forward_.why(shape, properties));
}

void CudaLauncher::describe_maxima(uint32_t op, const Shape& maxima,
                                   flashattn_plan_properties* properties) const {
  constexpr int32_t kLongSeqlen = 4096;
  Shape shape = maxima;
  if (shape.batch == 0) shape.batch = multiprocessors_;
  if (shape.seqlen_q == 0) shape.seqlen_q = kLongSeqlen;
  if (shape.seqlen_kv == 0) shape.seqlen_kv = kLongSeqlen;
  if (shape.total_q == 0) shape.total_q = static_cast<int64_t>(shape.batch) * shape.seqlen_q;
  if (shape.total_kv == 0) shape.total_kv = static_cast<int64_t>(shape.batch) * shape.seqlen_kv;
  describe(op, shape, properties);
  if (op == FLASHATTN_OP_FORWARD) {
    properties->why = keep(forward_.why_of_unknown_shape());
  } else if (backward_.rows.size() > 1) {
    properties->why = keep(backward_.why_of_unknown_shape());
  }
}

int32_t CudaLauncher::forward(const ForwardArgs& args, void* workspace, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  if (const int32_t status = check_forward_arrays(problem_, args)) return status;
  return forward_.choose(args.shape, &args)
      .launch(args, workspace, static_cast<cudaStream_t>(on.stream));
}

int32_t CudaLauncher::clear_amax(const ForwardArgs& args, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  return cuda::clear_amax(problem_, args, static_cast<cudaStream_t>(on.stream));
}

int32_t CudaLauncher::backward(const BackwardArgs& args, void* workspace,
                               const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  if (const int32_t status = check_backward_arrays(problem_, args)) return status;
  return backward_.choose(args.shape, &args)
      .launch(args, workspace, static_cast<cudaStream_t>(on.stream));
}

int32_t CudaLauncher::make_block_mask(const BlockMaskArgs& args, const BlockMaskRows& mask,
                                      uint8_t* base, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  const int64_t rows = mask.batch * mask.heads * mask.rows;
  if (rows == 0) return FLASHATTN_OK;
  if (const int32_t status = check_grid(rows)) return status;
  return status_of(
      launch_kernel(block_mask_kernel(), dim3(static_cast<unsigned>(rows)), kBlockMaskThreads, 0,
                    BlockMaskParams{args, mask, base}, static_cast<cudaStream_t>(on.stream)),
      "launching the block mask kernel");
}

int32_t CudaLauncher::merge(const MergeArgs& args, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  if (args.parts > kMaxMergeParts) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "parts",
                "parts = %d is above %d, the limit on a GPU; merge in several steps", args.parts,
                kMaxMergeParts);
  }
  MergeParams<kMaxMergeParts> p{};
  const Rows rows = query_rows(problem_, args.shape);
  p.o = args.o;
  p.lse = args.lse;
  p.lse_layout = row_layout(problem_, args.shape);
  p.dtype = problem_.dtype_o;
  p.dtype_part = args.dtype_part;
  p.dim = problem_.dim_v;
  p.heads = problem_.heads_q;
  p.batch = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) ? 1 : args.shape.batch;
  if (const int32_t status = check_grid(int64_t{p.batch} * problem_.heads_q)) return status;
  p.tokens = rows.tokens;
  p.parts = args.parts;
  p.vectors = is_aligned(args.o, problem_.dtype_o, 8);
  for (int32_t n = 0; n < args.parts; ++n) {
    p.part_o[n] = resolve_strides(args.part_o[n], rows, problem_.heads_q, problem_.dim_v);
    p.part_lse[n] = args.part_lse[n];
    p.vectors &= is_aligned(p.part_o[n], args.dtype_part, 4 * dtype_size(args.dtype_part));
  }
  return status_of(launch_merge(p, static_cast<cudaStream_t>(on.stream)),
                   "launching the merge kernel");
}

int32_t CudaLauncher::quantize(const QuantizeArgs& args, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  const int32_t dim = std::max(problem_.dim_qk, problem_.dim_v);
  if (dim > kMaxQuantizeDim) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk",
                "dim_qk = %d, dim_v = %d: a GPU quantises heads of up to %d; quantise on the CPU",
                problem_.dim_qk, problem_.dim_v, kMaxQuantizeDim);
  }
  return status_of(
      launch_quantize(problem_, args, quantize_limits_, static_cast<cudaStream_t>(on.stream)),
      "launching the quantisation kernel");
}

int32_t CudaLauncher::append_kv(const AppendArgs& args, const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  const Inputs& in = args.inputs;
  const int32_t f8 = FLASHATTN_DTYPE_F8E4M3, dtype_kv = problem_.dtype_kv;
  const auto moves = [&](const flashattn_tensor& from, const flashattn_tensor& to, int32_t dtype_to,
                         int32_t dim) {
    return !from.data || (dim % 8 == 0 && is_aligned(from, args.dtype, 16) &&
                          is_aligned(to, dtype_to, dtype_to == f8 ? 8 : 16));
  };
  const bool tables =
      !args.rotary_cos.data || (is_aligned(args.rotary_cos, args.dtype_rotary, 16) &&
                                is_aligned(args.rotary_sin, args.dtype_rotary, 16));
  const bool vectors = tables && args.rotary_dim % 16 == 0 &&
                       moves(in.q, args.q_out, args.dtype, problem_.dim_qk) &&
                       moves(in.k, args.k_cache, dtype_kv, problem_.dim_qk) &&
                       moves(in.v, args.v_cache, dtype_kv, problem_.dim_v);
  return status_of(launch_append_kv(problem_, args, vectors, multiprocessors_,
                                    static_cast<cudaStream_t>(on.stream)),
                   "launching the append kernel");
}

int32_t CudaLauncher::dropout_mask(const ForwardArgs& args, uint8_t* keep,
                                   const Executor& on) const {
  if (const int32_t status = make_current(device_, *context_)) return status;
  if (const int32_t status = check_grid(int64_t{args.shape.batch} * problem_.heads_q))
    return status;
  return status_of(launch_dropout_mask(problem_, args, keep, static_cast<cudaStream_t>(on.stream)),
                   "launching the dropout mask kernel");
}

}  // namespace flashattn::cuda
