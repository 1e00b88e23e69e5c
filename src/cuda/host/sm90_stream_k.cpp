#include "cuda/host/sm90_stream_k.h"

#include <algorithm>

#include "cuda/host/sm90_fwd.h"
#include "cuda/host/combine.h"

namespace flashattn::cuda::sm90 {

// Stream-K needs equal tiles: no mask, equal lengths. It breaks BATCH_INVARIANT, because the batch
// decides which tiles are split, and the combine kernel writes no E4M3.
ForwardStreamK::ForwardStreamK(const Problem& problem, const Device& device)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      is_on_(problem.mask == 0 && problem.layout == 0 && problem.splits == 0 &&
             problem.determinism != FLASHATTN_DETERMINISM_BATCH_INVARIANT &&
             problem.dtype_o != FLASHATTN_DTYPE_F8E4M3) {
  if (is_on_) throw_on(combine_waits(&combine_starts_early_), "cudaFuncGetAttributes");
}

void ForwardStreamK::keep_within_limit(int64_t bytes) {
  if (problem_.workspace_limit == 0 || bytes <= problem_.workspace_limit) return;
  lacks_workspace_ = is_on_;
  is_on_ = false;
}

StreamK ForwardStreamK::work_items(const ForwardEntry& entry, const Shape& shape) const {
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const int64_t tiles = heads * ceil_div(shape.seqlen_q, entry.tile_q);
  if (!is_on_ || !entry.uses_stream_k || tiles > INT32_MAX) {
    return StreamK::unsplit(static_cast<int32_t>(std::min<int64_t>(tiles, INT32_MAX)));
  }
  return split_last_wave(entry.cost, {shape.seqlen_q, shape.seqlen_kv}, heads, multiprocessors_);
}

int64_t ForwardStreamK::partial_floats(const ForwardEntry& entry, const Shape& shape) const {
  if (!is_on_ || !entry.uses_stream_k) return 0;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  return most_partials(entry.cost, {shape.seqlen_q, shape.seqlen_kv}, heads, multiprocessors_) *
         entry.tile_q * (problem_.dim_v + 2);
}

const char* ForwardStreamK::describe(const ForwardEntry& entry, const Shape& shape) const {
  if (lacks_workspace_) return ", none of which is split, for want of workspace_limit";
  if (work_items(entry, shape).tiles_split() == 0) return "";
  return ", and those that would not fill the device are split along their keys (without lens_q, "
         "lens_kv and starts_kv)";
}

int32_t ForwardStreamK::launch(const ReadyKernel<ForwardEntry>& kernel, ForwardParams* params,
                               TileCounter* counter, float* partial_o, cudaStream_t stream) const {
  ForwardParams& p = *params;
  const Inputs& in = p.args.inputs;
  if (!in.lens_q && !in.lens_kv && !in.starts_kv && !p.args.amax_o.data) {
    p.stream_k = work_items(*kernel.entry, p.args.shape);
  }
  const int32_t tile_q = kernel.entry->tile_q;
  const int64_t rows = static_cast<int64_t>(p.stream_k.partials()) * tile_q;
  p.partial_o = partial_o;
  p.partial_sums = reinterpret_cast<PartialSum*>(partial_o + rows * problem_.dim_v);
  const int32_t status = launch_forward(kernel, &p, counter, stream);
  if (status != FLASHATTN_OK || rows == 0) return status;
  const CombineTilesParams combine{problem_, p.args,      p.stream_k,    p.swizzle,
                                   tile_q,   p.partial_o, p.partial_sums};
  return status_of(launch_combine_tiles(combine, combine_starts_early_, stream),
                   "launching the combine kernel");
}

}  // namespace flashattn::cuda::sm90
