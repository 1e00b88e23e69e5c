// Launches the gradients of bias and sink, which all backward rows share.
#include "cuda/host/bwd_common.h"

#include <cinttypes>

#include "core/arrays.h"
#include "core/error.h"
#include "core/score_mod.h"
#include "cuda/host/bwd_rows.h"

namespace flashattn::cuda {
namespace {

// Tiles that several CTAs share, at most; and steps of a tile.
constexpr int32_t kMostSplitTiles = 4096, kMostSteps = 1 << 30;

const sm80::DbiasEntry* dbias_entry(const Problem& p, int32_t shared_memory) {
  return sm80::find(sm80::dbias_table(), shared_memory,
                    [&p](const sm80::DbiasEntry& e) { return sm80::takes(e, p, true); });
}

// The entry for scores with the dense bias alone; NULL: there is none.
const sm80::DbiasEntry* dense_entry(const Problem& p, int32_t shared_memory) {
  if ((modifications(p) & ~kModNegativeScale) != kModDenseBias) return nullptr;
  const sm80::DbiasEntry* entry =
      sm80::find(sm80::dbias_table(), shared_memory,
                 [&p](const sm80::DbiasEntry& e) { return sm80::takes(e, p, false); });
  return entry && entry->shared_bytes <= shared_memory ? entry : nullptr;
}

// Whether the bias is the same for all that dbias sums, and dbias is not a sum over queries.
bool is_same_bias(const BackwardArgs& args, const Problem& p) {
  const Inputs& in = args.inputs;
  return args.dbias_stride_row != 0 &&
         (args.dbias_stride_batch != 0 || in.bias_stride_batch == 0 || args.shape.batch == 1) &&
         (args.dbias_stride_head != 0 || in.bias_stride_head == 0 || p.heads_q == 1);
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
  const sm80::DbiasEntry* entry = dbias_entry(problem, shared_memory);
  return entry ? entry->shared_bytes : 0;
}

Dbias::Dbias(const Problem& problem, const Device& device) : kernel_{}, dense_{} {
  if (!problem.has_feature(FLASHATTN_FEATURE_DBIAS)) return;
  const int32_t shared_memory = device.properties.shared_memory,
                multiprocessors = device.properties.multiprocessors;
  kernel_ = make_ready(*dbias_entry(problem, shared_memory), multiprocessors);
  if (const sm80::DbiasEntry* entry = dense_entry(problem, shared_memory)) {
    dense_ = make_ready(*entry, multiprocessors);
  }
}

int32_t Dbias::counters() const { return kernel_.entry ? 1 + kMostSplitTiles : 0; }

int32_t Dbias::launch_dbias(const BackwardParams& p, cudaStream_t stream, bool has_counters) const {
  const BackwardArgs& args = p.args;
  const bool has_rows = args.shape.seqlen_q > 0 || args.dbias_stride_row == 0;
  if (!args.dbias || !has_rows || args.shape.seqlen_kv == 0) return FLASHATTN_OK;
  const Kernel& kernel = dense_.entry && is_same_bias(args, p.problem) ? dense_ : kernel_;
  int64_t tiles = ceil_div(args.shape.seqlen_kv, kernel.entry->tile_kv), steps = 1;
  const auto multiply = [&](int64_t stride, int64_t count) {
    (stride != 0 ? tiles : steps) *= count;
  };
  multiply(args.dbias_stride_row, ceil_div(args.shape.seqlen_q, kernel.entry->tile_q));
  multiply(args.dbias_stride_head, p.problem.heads_q);
  multiply(args.dbias_stride_batch, args.shape.batch);
  if (tiles > INT32_MAX || steps > kMostSteps) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "dbias",
                "dbias has %" PRId64 " tiles, each the sum of %" PRId64
                " others; the most are 2^31 - 1 and 2^30: split the batch",
                tiles, steps);
  }
  sm80::DbiasParams params{
      p, OrderedSplit::unsplit(static_cast<int32_t>(tiles), static_cast<int32_t>(steps))};
  // With BATCH_INVARIANT no order of additions may depend on the batch.
  if (has_counters && tiles <= kMostSplitTiles &&
      p.problem.determinism != FLASHATTN_DETERMINISM_BATCH_INVARIANT) {
    params.split = OrderedSplit::of(params.split.tiles, params.split.steps, kernel.resident);
    params.common.arrived += p.arrived_count - counters();
  }
  return launch(*kernel.entry, params.split.ctas(), params, stream,
                "launching the gradient of the bias");
}

int32_t Dbias::launch_with_dsink(const BackwardParams& p, cudaStream_t stream,
                                 bool has_counters) const {
  if (const int32_t status = launch_dbias(p, stream, has_counters)) return status;
  if (!p.args.dsink) return FLASHATTN_OK;
  return status_of(launch_dsink(p, stream), "launching the gradient of the sink");
}

}  // namespace flashattn::cuda
