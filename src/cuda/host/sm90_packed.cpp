// Hopper forward row with packed heads: packing of rows, split-KV, launches.
#include "cuda/host/sm90_packed.h"

#include <algorithm>

#include "cuda/host/combine.h"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int32_t kMostGroup = 64;      // query heads of a KV head: a warpgroup's rows
constexpr int64_t kMostRows = 1 << 30;  // per KV head of a sequence; row indices have 32 bits

const ForwardEntry* find(const Problem& p) {
  for (const ForwardEntry* e : packed_forward_table()) {
    if (e->dtype == p.dtype && e->dim_qk >= std::max(p.dim_qk, p.dim_v)) return e;
  }
  return nullptr;
}

}  // namespace

bool PackedForwardKernels::supports_problem(const Problem& p, const char** why_not) {
  *why_not = "";  // the other Hopper kernels say why
  // With o in fp32 the P of the only key that a tree shows must be exactly 1, which this kernel
  // does not ensure.
  const bool shows_weights = p.has_mask(FLASHATTN_MASK_TREE) && p.dtype_o == FLASHATTN_DTYPE_F32;
  return p.dtype_kv == p.dtype && score_mod_of(p) == ScoreModKind::kPlain && !shows_weights &&
         !p.has_mask(FLASHATTN_MASK_PAGES) && p.q_heads_per_kv_head() <= kMostGroup &&
         find(p) != nullptr;
}

PackedForwardKernels::PackedForwardKernels(const Problem& problem, const Device& device)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      l2_bytes_(usable_l2_bytes(device.index)) {
  while (1 << log2_group_ < problem.q_heads_per_kv_head()) ++log2_group_;
  const ForwardEntry* const first = find(problem);
  for (const ForwardEntry* e : packed_forward_table()) {
    if (e->dtype != first->dtype || e->dim_qk != first->dim_qk) continue;
    kernels_.push_back(
        {make_ready(*e, multiprocessors_), forward_name("sm90", *e) + "_packed_heads"});
  }
  throw_on(combine_waits(&combine_starts_early_), "cudaFuncGetAttributes");
}

int64_t PackedForwardKernels::rows(const Shape& shape) const {
  return static_cast<int64_t>(shape.seqlen_q) << log2_group_;
}

bool PackedForwardKernels::supports(const Shape& shape, const char** why_not) const {
  *why_not = shape.seqlen_kv == 0 ? "there are no keys" : "there are too many queries";
  return shape.seqlen_kv > 0 && rows(shape) <= kMostRows;
}

RowCost PackedForwardKernels::cost(const Shape& shape) const {
  constexpr RowCost kPays{0.5, nullptr};
  // Decode kernels are as fast up to kDecodeRows; with few keys the combine kernel does not pay.
  constexpr int64_t kDecodeRows = 16, kManyKeys = 1024, kKeysToSplit = 2048;
  constexpr int64_t kTileQ = 64;  // queries that fill a tile of one head
  // Q tiles of the plain kernels for long sequences. Where one wave of them leaves more than a
  // quarter of the device idle, smaller tiles are faster, unless a causal mask makes most of the
  // tiles short. H200, 512 queries of 32 heads, 64k keys: 901 us plain, 746 us packed.
  constexpr int64_t kPlainTileQ = 192, kKeysOfQuery = 4;
  const int64_t group = problem_.q_heads_per_kv_head();
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const bool has_own_queries = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) && shape.batch > 0;
  const int64_t queries = has_own_queries ? shape.total_q / shape.batch : shape.seqlen_q;
  if (queries * group <= kDecodeRows) return {3.0, "so few rows suit the decode kernels"};
  if (shape.seqlen_kv < kManyKeys) return {3.0, "there are few keys"};
  if (queries <= kTileQ && group > 1) return kPays;
  const int64_t tiles = ceil_div(queries, 2 * kTileQ) * heads;
  if (4 * tiles <= 3 * multiprocessors_ && shape.seqlen_kv >= kKeysToSplit) return kPays;
  const bool one_wave = ceil_div(queries, kPlainTileQ) * heads <= multiprocessors_;
  if (one_wave && 4 * queries * heads <= 3 * kPlainTileQ * multiprocessors_ &&
      shape.seqlen_kv >= kKeysOfQuery * queries) {
    return kPays;
  }
  return {3.0, "queries fill tiles, and tiles the device, without packing"};
}

const NamedKernel& PackedForwardKernels::choose(const Shape& shape) const {
  for (const NamedKernel& named : kernels_) {
    if (rows(shape) <= named.kernel.entry->tile_q) return named;
  }
  return kernels_.back();
}

PackedTiling PackedForwardKernels::packed_tiling(const ReadyKernel<ForwardEntry>& kernel) const {
  return {log2_group_, kernel.entry->tile_q, kernel.entry->tile_kv, kernel.resident,
          multiprocessors_};
}

PackedHeads PackedForwardKernels::grid(const ReadyKernel<ForwardEntry>& kernel, const Shape& shape,
                                       L2Swizzle* swizzle) const {
  const PackedTiling tiling = packed_tiling(kernel);
  PackedHeads p{};
  p.log2_group = log2_group_;
  p.split = tiling.split_rule(problem_, shape);
  p.max_splits = max_split_count(p.split, {shape.seqlen_q, shape.seqlen_kv});
  p.by_splits = FastDivmod::of(p.max_splits);
  p.partial_queries = std::min(shape.seqlen_q, p.split.max_queries);
  const int64_t head_bytes = static_cast<int64_t>(shape.seqlen_kv) *
                             (problem_.dim_qk + problem_.dim_v) * dtype_size(problem_.dtype);
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_kv;
  // K and V that just fill L2 evict the kernels' code, which the next call then fetches from
  // memory, unless they are evicted first. H200, one sequence of 8k keys, 64 to 128 queries: 6 to
  // 10 % faster. Larger K and V, and those that many Q tiles read, load 1 to 5 % faster if evicted
  // last.
  constexpr int64_t kFewTiles = 8;
  p.evict_kv_first = heads * head_bytes <= 2 * l2_bytes_ && tiling.row_tiles(shape) <= kFewTiles;
  *swizzle = L2Swizzle::of(heads, tiling.row_tiles(shape) * p.max_splits,
                           l2_bytes_ / 2 / std::max<int64_t>(head_bytes, 1));
  return p;
}

int64_t PackedForwardKernels::workspace(const Shape& shape) const {
  const int64_t rows = packed_tiling(kernels_.back().kernel).partial_rows(problem_, shape);
  WorkspaceAllocator memory(nullptr);
  memory.take<TileCounter>(1);
  memory.take<float>(rows * (problem_.dim_v + 2));
  return memory.unaligned_bytes();
}

std::string PackedForwardKernels::describe(const Shape& shape,
                                           flashattn_plan_properties* properties) const {
  const NamedKernel& named = choose(shape);
  describe_kernel(named.kernel, named.kernel.entry->stages, named.name, "wgmma", properties);
  properties->splits = split_count(packed_tiling(named.kernel).split_rule(problem_, shape),
                                   {shape.seqlen_q, shape.seqlen_kv});
  return "; the query heads of a KV head share tiles";
}

int32_t PackedForwardKernels::launch(const ForwardArgs& args, void* workspace,
                                     cudaStream_t stream) const {
  const ReadyKernel<ForwardEntry>& kernel = choose(args.shape).kernel;
  WorkspaceAllocator memory(workspace);
  TileCounter* const counter = memory.take<TileCounter>(1);
  ForwardParams p{};
  p.packed = grid(kernel, args.shape, &p.swizzle);
  // The combine kernel reads these.
  cuda::ForwardParams common{};
  set_problem(problem_, args.shape, &common);
  common.split = p.packed.split;
  common.max_splits = p.packed.max_splits;
  common.partial_queries = p.packed.partial_queries;
  if (const int32_t status = set_arrays(args, counter + 1, &common)) return status;
  p.partial_o = common.partial_o;
  p.partial_sums = common.partial_sums;
  if (const int32_t status = check_grid(p.swizzle.count())) return status;
  if (const int32_t status = make_forward_params(problem_, args, kernel, l2_bytes_, {}, &p)) {
    return status;
  }
  p.problem = common.problem;  // with TREE the hull of its masks
  p.packed.tree = common.tree;
  const int32_t status = launch_forward(kernel, &p, counter, stream);
  if (status != FLASHATTN_OK || common.max_splits <= 1) return status;
  // The combine kernel reads lengths before it waits. A kernel that itself starts early, see
  // launch_forward(), does not order those reads behind the work that wrote them.
  const bool starts_early = combine_starts_early_ && (p.swizzle.count() < kernel.resident ||
                                                      !reads_lengths(problem_, args.inputs));
  return status_of(launch_combine(common, starts_early, stream), "launching the combine kernel");
}

}  // namespace flashattn::cuda::sm90
