// Hopper gradient of a dense bias: choice of kernel, stream-K along what is summed, launch.
#include "cuda/host/sm90_dbias.h"

#include <algorithm>
#include <cinttypes>

#include "core/error.h"
#include "cuda/host/launch.h"

namespace flashattn::cuda::sm90 {

Table<BackwardEntry> dbias_table();

namespace {

// The cost of a partial, and the least that is worth splitting tiles, in iterations.
constexpr int32_t kPartialCost = 2, kLeastSaved = 4;

const BackwardEntry* find(const Problem& p, const BackwardEntry& backward) {
  if (!p.has_feature(FLASHATTN_FEATURE_DBIAS) || !has_dense_bias_alone(p)) return nullptr;
  const Table<BackwardEntry> table = dbias_table();
  const auto found = std::find_if(table.begin(), table.end(), [&](const BackwardEntry* e) {
    return e->dtype == p.dtype && e->dim_qk >= p.dim_qk && e->dim_v >= p.dim_v;
  });
  if (found == table.end()) return nullptr;
  // TMA boxes and tiles of row statistics are those of the backward kernel.
  const BackwardEntry& e = **found;
  const bool fits = backward.tile_q * e.consumers == e.tile_q &&
                    backward.tile_kv / backward.cluster_size == e.tile_kv;
  return fits ? &e : nullptr;
}

int64_t summed(const BackwardArgs& args, const Problem& p) {
  return (args.dbias_stride_batch == 0 ? int64_t{args.shape.batch} : 1) *
         (args.dbias_stride_head == 0 ? p.heads_q : 1);
}

}  // namespace

DbiasKernel::DbiasKernel(const Problem& problem, const Device& device,
                         const BackwardEntry& backward)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      entry_(find(problem, backward)) {
  if (entry_) make_ready(*entry_, multiprocessors_);
}

bool DbiasKernel::accepts(const BackwardArgs& args) const {
  if (!entry_ || !args.dbias || args.dbias_stride_row == 0) return false;
  const Inputs& in = args.inputs;
  const bool same_batch = in.bias_stride_batch == 0 || args.shape.batch == 1,
             same_head = in.bias_stride_head == 0 || problem_.heads_q == 1;
  return (args.dbias_stride_batch != 0 || same_batch) &&
         (args.dbias_stride_head != 0 || same_head) && summed(args, problem_) <= INT32_MAX;
}

bool DbiasKernel::beats_adding() const {
  constexpr int32_t kSmallDim = 32;  // measured on an H200; this kernel computes masked tiles, too
  return entry_ && problem_.mask == 0 && std::max(problem_.dim_qk, problem_.dim_v) > kSmallDim;
}

int32_t DbiasKernel::counters() const {
  // One for each warp of a split tile, of which there are fewer than multiprocessors; one more
  // counts the CTAs that have started.
  return entry_ ? multiprocessors_ * entry_->consumers * 4 + 1 : 0;
}

int32_t DbiasKernel::launch(BackwardParams p, cudaStream_t stream) const {
  const BackwardArgs& args = p.common.args;
  const int64_t tiles = ceil_div(args.shape.seqlen_q, entry_->tile_q) *
                        ceil_div(args.shape.seqlen_kv, entry_->tile_kv) *
                        (args.dbias_stride_head == 0 ? 1 : problem_.heads_q) *
                        (args.dbias_stride_batch == 0 ? 1 : args.shape.batch);
  // CTAs add the size of the grid to the index of a tile, which must not overflow.
  if (tiles > INT32_MAX / 2) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "dbias",
                "dbias has %" PRId64 " tiles of %d x %d, above 2^30; split the batch", tiles,
                entry_->tile_q, entry_->tile_kv);
  }
  p.stream_k =
      StreamK::of(static_cast<int32_t>(tiles), static_cast<int32_t>(summed(args, problem_)),
                  multiprocessors_, kPartialCost, kLeastSaved);
  p.common.arrived_count -= counters();
  return cuda::launch(*entry_, std::min(p.stream_k.work_items, multiprocessors_), p, stream,
                      "launching the gradient of the bias");
}

}  // namespace flashattn::cuda::sm90
