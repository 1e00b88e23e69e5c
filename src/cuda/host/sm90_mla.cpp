// Hopper row for latent attention: packing of rows, split-KV, tensor map, launches.
#include "cuda/host/sm90_mla.h"

#include <algorithm>
#include <cinttypes>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "cuda/host/schedule/split_kv.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/combine.h"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int64_t kMaxRows = 1 << 30;       // per KV head of a sequence; row indices have 32 bits
constexpr int64_t kMostRecordBytes = 1024;  // arrays that lie further apart are not prefetched
constexpr int32_t kLeastBoxRows = 8;  // TMA boxes of fewer rows are slower than copies by threads

// The kernels for a problem, in ascending order of the rows of their tiles.
std::vector<const MlaEntry*> find(const Problem& p) {
  std::vector<const MlaEntry*> found;
  for (const MlaEntry* e : mla_table()) {
    if (e->dtype != p.dtype || e->dtype_kv != p.dtype_kv) continue;
    const bool fits = e->dim_qk >= p.dim_qk && e->dim_v >= p.dim_v;
    const bool same = e->dim_qk == p.dim_qk && e->dim_v == p.dim_v;
    if (p.is_latent() ? same && p.descale_dim == kLatentDescaleDim : fits) found.push_back(e);
  }
  std::sort(found.begin(), found.end(),
            [](const MlaEntry* a, const MlaEntry* b) { return a->tile_q < b->tile_q; });
  return found;
}

// Whether the strides of t, whose elements have `size` bytes, are in bytes those of v, whose
// elements have one byte.
bool lies_with_v(const flashattn_tensor& t, int32_t size, const flashattn_tensor& v) {
  return t.stride_batch * size == v.stride_batch && t.stride_head * size == v.stride_head &&
         t.stride_seq * size == v.stride_seq;
}

int64_t bytes_between(const flashattn_tensor& from, const flashattn_tensor& to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to.data) -
                              reinterpret_cast<uintptr_t>(from.data));
}

// With LATENT_KV: sets where k and descales lie in the record of a token, relative to v.
int32_t set_records(const ForwardArgs& args, const MlaEntry& entry, MlaParams* p) {
  const flashattn_tensor &v = args.inputs.v, &k = args.inputs.k, &descales = args.descale_latent;
  if (!lies_with_v(k, 2, v) || !lies_with_v(descales, 4, v)) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_STRIDE,
                lies_with_v(k, 2, v) ? "descale_latent.stride_seq" : "k.stride_seq",
                "v.stride_seq = %" PRId64 ", k.stride_seq = %" PRId64
                ", descale_latent.stride_seq = %" PRId64
                ": with LATENT_KV all strides of the three arrays must be the same in bytes on a "
                "GPU; keep them in one array of records, such as one of 656 bytes a token",
                v.stride_seq, k.stride_seq, descales.stride_seq);
  }
  p->k_of_record = bytes_between(v, k);
  p->descales_of_record = bytes_between(v, descales);
  const int32_t k_bytes = (entry.dim_qk - entry.dim_v) * 2,
                descale_bytes = entry.dim_v / kLatentDescaleDim * 4;
  const int64_t begin = std::min({int64_t{0}, p->k_of_record, p->descales_of_record});
  const int64_t end = std::max(
      {int64_t{entry.dim_v}, p->k_of_record + k_bytes, p->descales_of_record + descale_bytes});
  p->descales_in_record = entry.dim_v;
  p->k_in_record = entry.dim_v + descale_bytes;
  if (end - begin > kMostRecordBytes) return FLASHATTN_OK;
  p->record_begin = static_cast<int32_t>(begin);
  p->record_bytes = static_cast<int32_t>(end - begin);
  const Problem& problem = p->common.problem;
  const bool paged = problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  const int32_t run = paged ? std::gcd(problem.page_size, entry.tile_kv) : entry.tile_kv;
  const bool follow = run >= kLeastBoxRows && v.stride_seq <= kMostRecordBytes;
  p->record_run = follow ? run : 0;
  // Arrays that do not overlap fill no more bytes than they have only without gaps.
  if (p->record_bytes != entry.dim_v + descale_bytes + k_bytes) return FLASHATTN_OK;
  p->bulk_run = v.stride_seq == p->record_bytes ? run : 1;
  p->v_in_record = -p->record_begin;
  p->descales_in_record = p->v_in_record + static_cast<int32_t>(p->descales_of_record);
  p->k_in_record = p->v_in_record + static_cast<int32_t>(p->k_of_record);
  return FLASHATTN_OK;
}

bool same_rows(const flashattn_tensor& k, const flashattn_tensor& v) {
  return k.data == v.data && k.stride_batch == v.stride_batch && k.stride_head == v.stride_head &&
         k.stride_seq == v.stride_seq;
}

}  // namespace

bool takes_mla(const Problem& problem) {
  return problem.dim_qk > 256 && problem.dim_v <= problem.dim_qk && !find(problem).empty();
}

MlaKernels::MlaKernels(const Problem& problem, const Device& device)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      combine_starts_early_(false) {
  for (const MlaEntry* e : find(problem)) {
    kernels_.push_back({make_ready(*e, multiprocessors_),
                        std::string("sm90_mla_") + dtype_label(problem.dtype) + "_" +
                            (problem.is_latent() ? dtype_label(problem.dtype_kv) + std::string("_")
                                                 : std::string()) +
                            std::to_string(e->dim_qk) + "_" + std::to_string(e->dim_v) + "_q" +
                            std::to_string(e->tile_q) + "_kv" + std::to_string(e->tile_kv)});
  }
  throw_on(combine_waits(&combine_starts_early_), "cudaFuncGetAttributes");
}

bool MlaKernels::supports(const Shape& shape, const char** why_not) const {
  *why_not = shape.seqlen_kv == 0 ? "there are no keys" : "there are too many queries";
  // No other kernel takes LATENT_KV: launch() refuses what is too large.
  return problem_.is_latent() || (shape.seqlen_kv > 0 && rows(shape) <= kMaxRows);
}

int64_t MlaKernels::rows(const Shape& shape) const {
  return static_cast<int64_t>(shape.seqlen_q) * problem_.q_heads_per_kv_head();
}

bool MlaKernels::accepts(const ForwardArgs& args) const {
  return problem_.is_latent() || same_rows(args.inputs.k, args.inputs.v);
}

const MlaKernels::Kernel& MlaKernels::kernel(const Shape& shape) const {
  // The longest sequence of a batch must not choose for the others.
  const bool any = problem_.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT &&
                   problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  for (const Kernel& kernel : kernels_) {
    if (!any && kernel.ready.entry->tile_q >= rows(shape)) return kernel;
  }
  return kernels_.back();
}

int64_t MlaKernels::ctas(const MlaParams& params, const Shape& shape) const {
  return int64_t{params.row_tiles} * shape.batch * problem_.heads_kv;
}

MlaParams MlaKernels::grid(const Shape& shape) const {
  const ReadyKernel<MlaEntry>& ready = kernel(shape).ready;
  const MlaEntry& entry = *ready.entry;
  const int32_t group = problem_.q_heads_per_kv_head();
  MlaParams p{};
  p.row_tiles = static_cast<int32_t>(ceil_div(std::min(rows(shape), kMaxRows), entry.tile_q));
  p.kv_box_rows = entry.tile_kv;
  if (problem_.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) {
    const int32_t rows = std::gcd(problem_.page_size, entry.tile_kv);
    const bool hides = problem_.has_mask(FLASHATTN_MASK_PAGES);
    p.kv_box_rows = hides || rows < kLeastBoxRows ? 0 : rows;
  }
  if (problem_.is_latent()) p.kv_box_rows = 0;
  p.by_row_tiles = FastDivmod::of(std::max(p.row_tiles, 1));
  p.by_group = FastDivmod::of(group);
  p.by_page_size = FastDivmod::of(std::max(problem_.page_size, 1));
  cuda::ForwardParams& common = p.common;
  set_problem(problem_, shape, &common);
  const int64_t all_rows = static_cast<int64_t>(shape.batch) * problem_.heads_q * shape.seqlen_q;
  const int32_t step = 2 * entry.tile_kv;  // the warpgroups take a tile each
  const int64_t splits = whole_wave_splits(std::max<int64_t>(ctas(p, shape), 1), shape.seqlen_kv,
                                           all_rows, ready.resident, step);
  common.split =
      split_rule(problem_, shape, splits, step, may_be_uneven(problem_, shape, multiprocessors_));
  common.max_splits = max_split_count(common.split, {shape.seqlen_q, shape.seqlen_kv});
  common.partial_queries = std::min(shape.seqlen_q, common.split.max_queries);
  common.by_splits = FastDivmod::of(common.max_splits);
  common.by_heads_kv = FastDivmod::of(problem_.heads_kv);
  common.q_heads_per_kv_head = group;
  return p;
}

int64_t MlaKernels::workspace(const Shape& shape) const {
  const ReadyKernel<MlaEntry>& largest = kernels_.back().ready;  // that smaller shapes may need
  const int64_t rows = partial_rows(problem_, shape, grid(shape).common.split,
                                    kMostWaves * largest.resident * largest.entry->tile_q);
  return rows == 0 ? 0 : workspace_of<float>(rows * (problem_.dim_v + 2));
}

std::string MlaKernels::describe(const Shape& shape, flashattn_plan_properties* properties) const {
  const Kernel& chosen = kernel(shape);
  describe_kernel(chosen.ready, chosen.ready.entry->stages, chosen.name, "wgmma", properties);
  properties->splits = split_count(grid(shape).common.split, {shape.seqlen_q, shape.seqlen_kv});
  if (problem_.is_latent()) {
    return chosen.ready.entry->transposes ? "; E4M3 becomes fp16 in registers"
                                          : "; E4M3 becomes 16 bits in shared memory";
  }
  return "; for calls with V in the first columns of K, others run on the portable kernels";
}

int32_t MlaKernels::launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const {
  const Shape& shape = args.shape;
  const MlaEntry& entry = *kernel(shape).ready.entry;
  MlaParams p = grid(shape);
  cuda::ForwardParams& common = p.common;
  if (rows(shape) > kMaxRows) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "seqlen_q",
                "seqlen_q = %d times %d query heads of a KV head is above %" PRId64
                ", the limit with LATENT_KV; split the queries",
                shape.seqlen_q, problem_.q_heads_per_kv_head(), kMaxRows);
  }
  if (const int32_t status = set_arrays(args, workspace, &common)) return status;
  if (problem_.is_latent()) {
    if (const int32_t status = set_records(args, entry, &p)) return status;
  }
  const bool varlen = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem_.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  // Where all sequences have the same rows, both CTAs of a cluster have work.
  const bool even = p.row_tiles % 2 == 0 && !args.inputs.lens_q &&
                    !problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  p.cluster_size = even && p.kv_box_rows > 0 ? 2 : 1;
  p.releases_early = p.row_tiles == 1 || p.kv_box_rows == 0;
  if (p.kv_box_rows > 0) {
    const int64_t rows = paged ? problem_.page_size : varlen ? shape.total_kv : shape.seqlen_kv;
    const int64_t batch = paged ? args.inputs.pages : varlen ? 1 : shape.batch;
    if (const int32_t status = make_tensor_map(
            args.inputs.k, problem_.dtype,
            {problem_.dim_qk, rows, problem_.heads_kv, batch, p.kv_box_rows, 64}, "k", &p.k)) {
      return status;
    }
  }
  const bool early = combine_starts_early_ && !reads_lengths(problem_, args.inputs);
  const int32_t status =
      cuda::launch(entry, ctas(p, shape) * common.max_splits, p, stream,
                   "launching the kernel for latent attention", p.cluster_size, early);
  if (status != FLASHATTN_OK || common.max_splits <= 1) return status;
  return status_of(launch_combine(common, combine_starts_early_, stream),
                   "launching the combine kernel");
}

}  // namespace flashattn::cuda::sm90
