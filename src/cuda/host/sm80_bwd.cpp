// Portable backward row: grid, workspace and launches.
#include "cuda/host/sm80_bwd.h"

#include <algorithm>

#include "core/score_mod.h"
#include "cuda/host/bwd_rows.h"

namespace flashattn::cuda::sm80 {
namespace {

// Large heads, and heads from 192 on where shared memory is small, have only the kernel that takes
// any score modification at run time.
const BackwardEntry* main_entry(const Problem& p, int32_t shared_memory) {
  const auto entry = [&](bool modified) {
    return find(backward_table(), shared_memory,
                [&](const BackwardEntry& e) { return takes(e, p, modified); });
  };
  const BackwardEntry* plain = modifications(p) != 0 ? nullptr : entry(false);
  return plain && plain->shared_bytes <= shared_memory ? plain : entry(true);
}

}  // namespace

int32_t BackwardKernels::shared_bytes(const Problem& problem, int32_t shared_memory) {
  const BackwardEntry* entry = main_entry(problem, shared_memory);
  if (!entry) return 0;
  if (!problem.has_feature(FLASHATTN_FEATURE_DBIAS)) return entry->shared_bytes;
  const int32_t dbias = Dbias::shared_bytes(problem, shared_memory);
  return dbias == 0 ? 0 : std::max(entry->shared_bytes, dbias);
}

BackwardKernels::BackwardKernels(const Problem& problem, const Device& device)
    : problem_(problem),
      l2_bytes_(usable_l2_bytes(device.index)),
      multiprocessors_(device.properties.multiprocessors),
      main_(make_ready(*main_entry(problem, device.properties.shared_memory), multiprocessors_)),
      dbias_(problem, device),
      name_(std::string("sm80_backward_") + dtype_label(problem.dtype) + "_" +
            std::to_string(main_.entry->dim) + (main_.entry->modified ? "_modified" : "")) {
  throw_on(preload_bwd_preprocess(problem), "cudaFuncGetAttributes");
  throw_on(preload_bwd_postprocess(problem), "cudaFuncGetAttributes");
}

BackwardParams BackwardKernels::params(const BackwardArgs& args, char* base, int64_t* bytes) const {
  const Shape& shape = args.shape;
  BackwardParams p{};
  p.problem = problem_;
  p.args = args;
  p.dropout_threshold = problem_.dropout_threshold();
  p.kv_tiles = static_cast<int32_t>(ceil_div(shape.seqlen_kv, main_.entry->tile_kv));
  // Bytes of Q, dO and the fp32 dQ that a KV head reads and writes.
  const int32_t element = dtype_size(problem_.dtype);
  const int64_t head_bytes = static_cast<int64_t>(shape.seqlen_q) * problem_.q_heads_per_kv_head() *
                             (problem_.dim_qk * static_cast<int64_t>(4 + element) +
                              problem_.dim_v * static_cast<int64_t>(element));
  const int32_t ctas = problem_.has_mask(FLASHATTN_MASK_CAUSAL) ? main_.resident : 0;
  p.swizzle = L2Swizzle::of(p.kv_heads(), p.kv_tiles, l2_bytes_ / std::max<int64_t>(head_bytes, 1),
                            L2Swizzle::even_end(ctas, p.kv_tiles));
  p.by_heads_kv = FastDivmod::of(problem_.heads_kv);
  p.q_heads_per_kv_head = problem_.q_heads_per_kv_head();

  WorkspaceAllocator workspace(base);
  const bool varlen = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const int64_t tokens =
      varlen ? shape.total_q : static_cast<int64_t>(shape.batch) * shape.seqlen_q;
  const int64_t rows = tokens * problem_.heads_q;
  p.lse2 = workspace.take<float>(rows);
  p.delta = workspace.take<float>(rows);
  p.softmax_base = workspace.take<float>(rows);
  p.large_lse = workspace.take<uint64_t>(1);
  p.wide_scores = main_.entry->modified;
  p.dq = workspace.take<float>(rows * problem_.dim_qk);
  p.dout = rounded_dout(problem_, args, &workspace);
  if (ordered()) {
    p.work_counter = workspace.take<int32_t>(1);
    p.dq_order_tile_q = main_.entry->tile_q;
    p.dq_order = workspace.take<int32_t>(p.head_tiles(p.dq_order_tile_q) * problem_.heads_q);
  }
  p.arrived_count = dbias_.counters();
  if (p.arrived_count > 0) p.arrived = workspace.take<int32_t>(p.arrived_count);
  *bytes = workspace.unaligned_bytes();
  return p;
}

int64_t BackwardKernels::workspace(const Shape& shape) const {
  BackwardArgs args{};
  args.shape = shape;
  int64_t bytes = 0;
  params(args, nullptr, &bytes);
  return bytes;
}

std::string BackwardKernels::describe(const Shape&, flashattn_plan_properties* properties) const {
  describe_kernel(main_, main_.entry->stages, name_, "mma.sync", properties);
  return ordered() ? "; CTAs add to dq in order, so that bits repeat"
                   : "; CTAs add to dq in any order";
}

int32_t BackwardKernels::launch(const BackwardArgs& args, void* workspace,
                                cudaStream_t stream) const {
  const int64_t heads = static_cast<int64_t>(args.shape.batch) * problem_.heads_q;
  if (const int32_t status = check_grid(heads)) return status;
  int64_t bytes = 0;
  BackwardParams p = params(args, static_cast<char*>(workspace), &bytes);
  p.large_lse_stamp = new_stamp();
  if (args.shape.seqlen_q > 0) {
    const int32_t status = status_of(launch_bwd_preprocess(p, multiprocessors_, stream),
                                     "launching the preprocessing of the backward pass");
    if (status != FLASHATTN_OK) return status;
  } else {
    p.dq_order = nullptr;  // nothing has cleared it, and nothing is added to dQ
  }
  if (p.kv_tiles > 0) {
    const int32_t status = cuda::launch(*main_.entry, p.kv_heads() * p.kv_tiles, p, stream,
                                        "launching the backward kernel");
    if (status != FLASHATTN_OK) return status;
  }
  if (args.shape.seqlen_q > 0) {
    const int32_t status =
        status_of(launch_bwd_postprocess(p, stream), "launching the conversion of dq");
    if (status != FLASHATTN_OK) return status;
  }
  // The preprocessing has cleared the counters of dbias.
  return dbias_.launch_with_dsink(p, stream, args.shape.seqlen_q > 0);
}

}  // namespace flashattn::cuda::sm80
