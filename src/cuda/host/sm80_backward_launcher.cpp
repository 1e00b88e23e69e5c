#include "cuda/host/sm80_backward_launcher.h"

#include <algorithm>

#include "core/arrays.h"
#include "cuda/kernels/common/bwd_preprocess.h"

namespace flashattn::cuda {
namespace {

const sm80::BackwardEntry* find(const Problem& p, sm80::Table<sm80::BackwardEntry> table,
                                bool modified, int32_t shared_memory) {
  return sm80::find(table, shared_memory, [&p, modified](const sm80::BackwardEntry& e) {
    return e.dtype == p.dtype && e.modified == modified && e.dim >= std::max(p.dim_qk, p.dim_v);
  });
}

const sm80::BackwardEntry* main_entry(const Problem& p, int32_t shared_memory) {
  return find(p, sm80::backward_table(), is_modified(p), shared_memory);
}

const sm80::BackwardEntry* dbias_entry(const Problem& p) {
  return find(p, sm80::dbias_table(), true, INT32_MAX);
}

}  // namespace

int32_t BackwardLauncher::shared_bytes(const Problem& problem, int32_t shared_memory) {
  const sm80::BackwardEntry* entry = main_entry(problem, shared_memory);
  if (!entry) return 0;
  if (!problem.has_feature(FLASHATTN_FEATURE_DBIAS)) return entry->shared_bytes;
  const sm80::BackwardEntry* bias = dbias_entry(problem);
  return bias ? std::max(entry->shared_bytes, bias->shared_bytes) : 0;
}

BackwardLauncher::BackwardLauncher(const Problem& problem, const Device& device, int64_t l2_bytes,
                                   const std::vector<std::string>& passed_over)
    : problem_(problem),
      l2_bytes_(l2_bytes),
      multiprocessors_(device.properties.multiprocessors),
      main_(prepare(*main_entry(problem, device.properties.shared_memory), multiprocessors_)),
      dbias_(problem, multiprocessors_),
      name_(std::string("sm80_backward_") + dtype_name(problem.dtype) + "_" +
            std::to_string(main_.entry->dim) + (main_.entry->modified ? "_modified" : "")) {
  throw_on(load_gradient_kernels(problem), "cudaFuncGetAttributes");
  for (const std::string& reason : passed_over) {
    why_.push_back(portable_for(reason) + (ordered()
                                               ? "; CTAs add to dq in order, for bits to repeat"
                                               : "; CTAs add to dq in any order"));
  }
}

BackwardParams BackwardLauncher::params(const BackwardArgs& args, char* base,
                                        int64_t* bytes) const {
  const Shape& shape = args.shape;
  BackwardParams p{};
  p.problem = problem_;
  p.args = args;
  p.dropout_threshold = problem_.dropout_threshold();
  p.key_blocks = static_cast<int32_t>(ceil_div(shape.seqlen_kv, main_.entry->tile_kv));
  // Bytes of Q, dO and the fp32 dQ that a KV head reads and writes.
  const int32_t element = dtype_size(problem_.dtype);
  const int64_t head_bytes = static_cast<int64_t>(shape.seqlen_q) * problem_.q_heads_per_kv_head() *
                             (problem_.dim_qk * static_cast<int64_t>(4 + element) +
                              problem_.dim_v * static_cast<int64_t>(element));
  const int32_t workers = problem_.has_mask(FLASHATTN_MASK_CAUSAL) ? main_.resident : 0;
  p.swizzle =
      L2Swizzle::of(p.kv_heads(), p.key_blocks, l2_bytes_ / std::max<int64_t>(head_bytes, 1),
                    L2Swizzle::even_end(workers, p.key_blocks));
  p.by_heads_kv = FastDivmod::of(problem_.heads_kv);
  p.q_heads_per_kv_head = problem_.q_heads_per_kv_head();

  WorkspaceCutter workspace(base);
  const bool varlen = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const int64_t tokens =
      varlen ? shape.total_q : static_cast<int64_t>(shape.batch) * shape.seqlen_q;
  const int64_t rows = tokens * problem_.heads_q;
  p.lse2 = workspace.take<float>(rows);
  p.delta = workspace.take<float>(rows);
  p.base = workspace.take<float>(rows);
  p.far = workspace.take<uint64_t>(1);
  p.wide_scores = main_.entry->modified;
  p.dq = workspace.take<float>(rows * problem_.dim_qk);
  p.dout = rounded_dout(problem_, args, &workspace);
  if (ordered()) {
    p.work_counter = workspace.take<int32_t>(1);
    p.dq_order_tile_q = main_.entry->tile_q;
    p.dq_order = workspace.take<int32_t>(p.head_tiles(p.dq_order_tile_q) * problem_.heads_q);
  }
  *bytes = workspace.bytes();
  return p;
}

int64_t BackwardLauncher::workspace(const Shape& shape) const {
  BackwardArgs args{};
  args.shape = shape;
  int64_t bytes = 0;
  params(args, nullptr, &bytes);
  return bytes;
}

void BackwardLauncher::describe(size_t passed_over, flashattn_plan_properties* properties) const {
  describe_kernel(main_, main_.entry->stages, name_, "mma.sync", properties);
  properties->why = why_[passed_over].c_str();
}

int32_t check_backward_arrays(const Problem& problem, const BackwardArgs& args) {
  const bool copied = problem.dtype_o == problem.dtype;
  const NamedTensor tensors[] = {{"q", args.inputs.q, problem.dtype, true},
                                 {"k", args.inputs.k, problem.dtype, true},
                                 {"v", args.inputs.v, problem.dtype, true},
                                 {"o", args.o, problem.dtype_o},
                                 {"dout", args.dout, problem.dtype_o, copied},
                                 {"dq", args.dq, problem.dtype},
                                 {"dk", args.dk, problem.dtype},
                                 {"dv", args.dv, problem.dtype}};
  for (const NamedTensor& tensor : tensors) {
    if (const int32_t status = check_alignment(tensor)) return status;
  }
  return FLASHATTN_OK;
}

flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceCutter* workspace) {
  if (problem.dtype_o == problem.dtype) return args.dout;
  const RowLayout layout = row_layout(problem, args.shape);
  const int64_t rows = query_rows(problem, args.shape).tokens *
                       (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) ? 1 : args.shape.batch) *
                       problem.heads_q;
  return {workspace->take<uint16_t>(rows * problem.dim_v), layout.batch_stride * problem.dim_v,
          layout.head_stride * problem.dim_v, problem.dim_v};
}

int32_t BackwardLauncher::run(const BackwardArgs& args, void* workspace,
                              cudaStream_t stream) const {
  if (const int32_t status = check_backward_arrays(problem_, args)) return status;
  const int64_t heads = static_cast<int64_t>(args.shape.batch) * problem_.heads_q;
  if (const int32_t status = check_grid(heads)) return status;
  int64_t bytes = 0;
  BackwardParams p = params(args, static_cast<char*>(workspace), &bytes);
  p.far_stamp = new_stamp();
  if (args.shape.seqlen_q > 0) {
    const int32_t status = status_of(launch_prepare_backward(p, multiprocessors_, stream),
                                     "launching the preparation of the backward pass");
    if (status != FLASHATTN_OK) return status;
  } else {
    p.dq_order = nullptr;  // nothing has cleared it, and nothing is added to dQ
  }
  if (p.key_blocks > 0) {
    const int32_t status = launch(*main_.entry, p.kv_heads() * p.key_blocks, p, stream,
                                  "launching the backward kernel");
    if (status != FLASHATTN_OK) return status;
  }
  if (args.shape.seqlen_q > 0) {
    const int32_t status =
        status_of(launch_convert_dq(p, stream), "launching the conversion of dq");
    if (status != FLASHATTN_OK) return status;
  }
  if (const int32_t status = dbias_.run(p, stream)) return status;
  if (!args.dsink) return FLASHATTN_OK;
  return status_of(launch_dsink(p, stream), "launching the gradient of the sink");
}

Dbias::Dbias(const Problem& problem, int32_t multiprocessors) : kernel_{} {
  if (problem.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    kernel_ = prepare(*dbias_entry(problem), multiprocessors);
  }
}

int32_t Dbias::run(const BackwardParams& p, cudaStream_t stream) const {
  const BackwardArgs& args = p.args;
  const bool has_rows = args.shape.seqlen_q > 0 || args.dbias_stride_row == 0;
  if (!args.dbias || !has_rows || args.shape.seqlen_kv == 0) return FLASHATTN_OK;
  const sm80::BackwardEntry& entry = *kernel_.entry;
  int64_t blocks = ceil_div(args.shape.seqlen_kv, entry.tile_kv);
  if (args.dbias_stride_row != 0) blocks *= ceil_div(args.shape.seqlen_q, entry.tile_q);
  if (args.dbias_stride_head != 0) blocks *= p.problem.heads_q;
  if (args.dbias_stride_batch != 0) blocks *= args.shape.batch;
  return launch(entry, blocks, p, stream, "launching the gradient of the bias");
}

}  // namespace flashattn::cuda
