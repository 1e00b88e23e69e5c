// Launches the gradients of bias and sink, which all backward rows share.
#include "cuda/host/bwd_common.h"

#include "core/arrays.h"
#include "cuda/host/bwd_rows.h"

namespace flashattn::cuda {
namespace {

const sm80::BackwardEntry* dbias_entry(const Problem& p, int32_t shared_memory) {
  return sm80::find(sm80::dbias_table(), shared_memory,
                    [&p](const sm80::BackwardEntry& e) { return sm80::takes(e, p, true); });
}

}  // namespace

flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceAllocator* workspace) {
  if (problem.dtype_o == problem.dtype) return args.dout;
  const RowLayout layout = row_layout(problem, args.shape);
  const int64_t rows = query_rows(problem, args.shape).tokens *
                       (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) ? 1 : args.shape.batch) *
                       problem.heads_q;
  return {workspace->take<uint16_t>(rows * problem.dim_v), layout.batch_stride * problem.dim_v,
          layout.head_stride * problem.dim_v, problem.dim_v};
}

int32_t Dbias::shared_bytes(const Problem& problem, int32_t shared_memory) {
  const sm80::BackwardEntry* entry = dbias_entry(problem, shared_memory);
  return entry ? entry->shared_bytes : 0;
}

Dbias::Dbias(const Problem& problem, const Device& device) : kernel_{} {
  if (problem.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    kernel_ = make_ready(*dbias_entry(problem, device.properties.shared_memory),
                         device.properties.multiprocessors);
  }
}

int32_t Dbias::launch_dbias(const BackwardParams& p, cudaStream_t stream) const {
  const BackwardArgs& args = p.args;
  const bool has_rows = args.shape.seqlen_q > 0 || args.dbias_stride_row == 0;
  if (!args.dbias || !has_rows || args.shape.seqlen_kv == 0) return FLASHATTN_OK;
  const sm80::BackwardEntry& entry = *kernel_.entry;
  int64_t ctas = ceil_div(args.shape.seqlen_kv, entry.tile_kv);
  if (args.dbias_stride_row != 0) ctas *= ceil_div(args.shape.seqlen_q, entry.tile_q);
  if (args.dbias_stride_head != 0) ctas *= p.problem.heads_q;
  if (args.dbias_stride_batch != 0) ctas *= args.shape.batch;
  return launch(entry, ctas, p, stream, "launching the gradient of the bias");
}

int32_t Dbias::launch_with_dsink(const BackwardParams& p, cudaStream_t stream) const {
  if (const int32_t status = launch_dbias(p, stream)) return status;
  if (!p.args.dsink) return FLASHATTN_OK;
  return status_of(launch_dsink(p, stream), "launching the gradient of the sink");
}

}  // namespace flashattn::cuda
