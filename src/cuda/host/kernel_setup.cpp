// Set-up of kernels at plan creation, alignment checks, launch stamps.
#include "cuda/host/kernel_setup.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>

#include "core/error.h"
#include "cuda/host/driver.h"

namespace flashattn::cuda {
namespace {

bool has_strides_of(const flashattn_tensor& t, int32_t elements) {
  return t.stride_batch % elements == 0 && t.stride_head % elements == 0 &&
         t.stride_seq % elements == 0;
}

}  // namespace

int32_t status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return FLASHATTN_OK;
  cudaGetLastError();  // clears it: it is reported here, not by the caller's next call
  return fail(FLASHATTN_ERROR_DEVICE, FLASHATTN_REASON_NONE, "", "%s failed: %s; %s", what,
              cudaGetErrorString(error),
              "an earlier launch on this device may be at fault, see compute-sanitizer");
}

void throw_on(cudaError_t error, const char* what) {
  if (status_of(error, what) != FLASHATTN_OK) throw Refused{FLASHATTN_ERROR_DEVICE};
}

Residency make_ready(const void* kernel, int32_t threads, int32_t shared_bytes,
                     int32_t multiprocessors) {
  cudaFuncAttributes attributes;
  throw_on(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  throw_on(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
           "cudaFuncSetAttribute");
  int ctas = 0;
  throw_on(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads,
                                                         static_cast<size_t>(shared_bytes)),
           "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return {attributes.numRegs, std::max(ctas, 1) * multiprocessors};
}

bool CodeCheck::has_code(int32_t device, const void* kernel) {
  std::atomic<int8_t>& known = known_[device];
  if (const int8_t answer = known.load(std::memory_order_relaxed)) return answer > 0;
  const DeviceScope scope(device);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    known = 1;
    return true;
  }
  cudaGetLastError();
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled: known = -1; return false;
    default: return true;
  }
}

int64_t usable_l2_bytes(int32_t device) {
  int bytes = 0;
  throw_on(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device),
           "cudaDeviceGetAttribute");
  return std::min(bytes / 2, 25 << 20);
}

uint64_t new_stamp() {
  static std::atomic<uint64_t> launches(0);
  constexpr uint64_t kOdd = UINT64_C(0x9e3779b97f4a7c15);  // odd: multiplication is one to one
  return (launches.fetch_add(1, std::memory_order_relaxed) + 1) * kOdd;
}

int32_t make_current(int32_t device, const PlanContext& context) {
  int current = -1;
  const int32_t status = status_of(cudaGetDevice(&current), "cudaGetDevice");
  if (status != FLASHATTN_OK) return status;
  if (current == device) return context.make_current();
  return fail(
      FLASHATTN_ERROR_DEVICE, FLASHATTN_REASON_VALUE, "device_index",
      "the plan is for CUDA device %d, but device %d is current; call cudaSetDevice(%d), or "
      "make a plan for the current device",
      device, current, device);
}

bool is_aligned(const flashattn_tensor& t, int32_t dtype, int32_t bytes) {
  return has_strides_of(t, bytes / dtype_size(dtype)) &&
         reinterpret_cast<intptr_t>(t.data) % bytes == 0;
}

int32_t check_alignment(const NamedTensor& named) {
  const int32_t bytes = named.dtype == FLASHATTN_DTYPE_F32 && !named.copied ? 8 : 16;
  const flashattn_tensor& t = named.tensor;
  if (is_aligned(t, named.dtype, bytes)) return FLASHATTN_OK;
  const int32_t elements = bytes / dtype_size(named.dtype);
  const bool strides = has_strides_of(t, elements);
  return fail(FLASHATTN_ERROR_UNSUPPORTED,
              strides ? FLASHATTN_REASON_MISALIGNED : FLASHATTN_REASON_STRIDE, named.name,
              "%s lies at %p with strides %" PRId64 ", %" PRId64 ", %" PRId64
              ", but the kernels of this device move %d bytes at once; align it to %d bytes and "
              "make the strides multiples of %d elements, or copy it",
              named.name, t.data, t.stride_batch, t.stride_head, t.stride_seq, bytes, bytes,
              elements);
}

int32_t check_forward_arrays(const Problem& problem, const ForwardArgs& args) {
  constexpr int32_t kF32 = FLASHATTN_DTYPE_F32;
  const NamedTensor tensors[] = {{"q", args.inputs.q, problem.dtype, true},
                                 {"k", args.inputs.k, problem.dtype_k(), true},
                                 {"v", args.inputs.v, problem.dtype_kv, true},
                                 {"descale_latent", args.descale_latent, kF32, true},
                                 {"o", args.o, problem.dtype_o}};
  for (const NamedTensor& tensor : tensors) {
    if (const int32_t status = check_alignment(tensor)) return status;
  }
  return FLASHATTN_OK;
}

int32_t check_backward_arrays(const Problem& problem, const BackwardArgs& args) {
  const bool copied = problem.dtype_o == problem.dtype;
  const NamedTensor tensors[] = {
      {"q", args.inputs.q, problem.dtype, true},    {"k", args.inputs.k, problem.dtype, true},
      {"v", args.inputs.v, problem.dtype, true},    {"o", args.o, problem.dtype_o},
      {"dout", args.dout, problem.dtype_o, copied}, {"dq", args.dq, problem.dtype_grad},
      {"dk", args.dk, problem.dtype_grad},          {"dv", args.dv, problem.dtype_grad}};
  for (const NamedTensor& tensor : tensors) {
    if (const int32_t status = check_alignment(tensor)) return status;
  }
  return FLASHATTN_OK;
}

void set_problem(const Problem& problem, const Shape& shape, ForwardParams* p) {
  p->problem = problem;
  p->args.shape = shape;
  p->tree.rule = problem.mask_rule();
  // A single query at the end of its keys sees all that CAUSAL could hide. Kernels then need not
  // work out which keys a tile sees: 150 instructions of a decode kernel before its first load.
  if (shape.seqlen_q <= 1 && !problem.has_mask(FLASHATTN_MASK_TOP_LEFT)) {
    p->problem.mask &= ~static_cast<uint32_t>(FLASHATTN_MASK_CAUSAL);
  }
  if (!problem.has_mask(FLASHATTN_MASK_TREE)) return;
  const MaskRule hull = tree_hull(p->tree.rule);
  p->problem.mask = hull.mask;
  p->problem.window_left = hull.window_left;
  p->problem.window_right = hull.window_right;
  p->problem.chunk = hull.chunk;
}

int32_t set_arrays(const ForwardArgs& args, void* workspace, ForwardParams* p) {
  p->args = args;
  p->tree.bits = static_cast<const uint32_t*>(args.tree_bits.data);
  p->tree.stride_batch = args.tree_bits.stride_batch;
  p->tree.stride_row = args.tree_bits.stride_seq;
  if (p->max_splits <= 1 || p->log2_cluster > 0) return FLASHATTN_OK;
  const int64_t heads = int64_t{args.shape.batch} * p->problem.heads_q;
  if (const int32_t status = check_grid(heads)) return status;
  const int64_t rows = heads * p->max_splits * p->partial_queries, dim_v = p->problem.dim_v;
  p->partial_o = WorkspaceAllocator(workspace).take<float>(rows * (dim_v + 2));
  p->partial_sums = reinterpret_cast<PartialSum*>(p->partial_o + rows * dim_v);
  return FLASHATTN_OK;
}

int32_t check_grid(int64_t ctas) {
  if (ctas <= INT32_MAX) return FLASHATTN_OK;
  return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "shape",
              "the shape needs %" PRId64 " CTAs, above %d, the limit of a grid; split the batch",
              ctas, INT32_MAX);
}

int32_t clear_amax(const Problem& problem, const ForwardArgs& args, cudaStream_t stream) {
  // A stride of 0 has one element for all. Heads that lie side by side are cleared at once, and so
  // are sequences.
  const flashattn_tensor& amax = args.amax_o;
  int64_t batch = amax.stride_batch == 0 ? 1 : args.shape.batch;
  const int32_t heads = amax.stride_head == 0 ? 1 : problem.heads_q;
  int64_t width = amax.stride_head == 1 ? heads : 1;
  if (width == heads && (batch == 1 || amax.stride_batch == heads)) {
    width *= batch;
    batch = 1;
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; h += width) {
      float* const at =
          static_cast<float*>(amax.data) + b * amax.stride_batch + h * amax.stride_head;
      const cudaError_t error = cudaMemsetAsync(at, 0, width * sizeof(float), stream);
      if (const int32_t status = status_of(error, "clearing amax_o")) return status;
    }
  }
  return FLASHATTN_OK;
}

}  // namespace flashattn::cuda
