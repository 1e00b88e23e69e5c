#include "cuda/host/sm90_stream_k.h"

#include <algorithm>

#include "cuda/host/sm90_fwd.h"

namespace flashattn::cuda::sm90 {

// Tiles are equal without a mask and with equal lengths. Which of them are split depends on the
// batch.
ForwardStreamK::ForwardStreamK(const Problem& problem, const Device& device)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      is_on_(problem.mask == 0 && problem.layout == 0 && problem.splits == 0 &&
             problem.determinism != FLASHATTN_DETERMINISM_BATCH_INVARIANT &&
             problem.dtype_o != FLASHATTN_DTYPE_F8E4M3) {}

void ForwardStreamK::keep_within_limit(int64_t bytes) {
  if (problem_.workspace_limit == 0 || bytes <= problem_.workspace_limit) return;
  lacks_workspace_ = is_on_;
  is_on_ = false;
}

StreamK ForwardStreamK::work_items(const ForwardEntry& entry, const Shape& shape) const {
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const int64_t tiles = heads * ceil_div(shape.seqlen_q, entry.tile_q);
  if (!is_on(entry) || tiles > INT32_MAX) {
    return StreamK::unsplit(static_cast<int32_t>(std::min<int64_t>(tiles, INT32_MAX)));
  }
  return split_last_wave(entry.cost, {shape.seqlen_q, shape.seqlen_kv}, heads, multiprocessors_);
}

const char* ForwardStreamK::describe(const ForwardEntry& entry, const Shape& shape) const {
  if (lacks_workspace_) return ", none of which is split, for want of workspace_limit";
  if (work_items(entry, shape).tiles_split() == 0) return "";
  return ", and those that would not fill the device are split along their keys (without lens_q, "
         "lens_kv and starts_kv)";
}

void ForwardStreamK::take(const ForwardEntry& entry, const Shape& shape, WorkspaceAllocator* memory,
                          ForwardParams* params) const {
  if (!is_on(entry)) return;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const int64_t rows = entry.tile_q * most_partials(entry.cost, {shape.seqlen_q, shape.seqlen_kv},
                                                    heads, multiprocessors_);
  params->partial_o = memory->take<float>(rows * problem_.dim_v);
  params->partial_sums = memory->take<PartialSum>(rows);
  params->parts_done = memory->take<uint64_t>(rows > 0 ? multiprocessors_ : 0);
}

void ForwardStreamK::split(const ForwardEntry& entry, ForwardParams* params) const {
  const Inputs& in = params->args.inputs;
  if (in.lens_q || in.lens_kv || in.starts_kv || params->args.amax_o.data) return;
  params->stream_k = work_items(entry, params->args.shape);
}

}  // namespace flashattn::cuda::sm90
