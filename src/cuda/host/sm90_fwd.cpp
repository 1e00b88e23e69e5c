// Hopper forward row: choice of tile by the cost model, softcap polynomials, tensor maps, launch.
#include "cuda/host/sm90_fwd.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/score_mod.h"
#include "cuda/host/driver.h"
#include "cuda/host/tensor_map.h"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int32_t kLongKeys = 4096;    // keys from which split-KV pays
constexpr int32_t kShortQueries = 64;  // up to here the portable kernels pack heads and split keys

}  // namespace

ScoreModKind score_mod_of(const Problem& p) {
  // With o in fp32 the P of a row's only key must be exactly 1, which only run-time kernels ensure.
  if (has_block_mask_alone(p) && p.scale >= 0 && p.dtype_o != FLASHATTN_DTYPE_F32)
    return ScoreModKind::kBlockMask;
  if (needs_runtime_kernel(p)) return ScoreModKind::kRuntime;
  switch (modifications(p) & ~kModKeyBits) {
    case 0: return ScoreModKind::kPlain;
    case kModSoftcap: return ScoreModKind::kSoftcap;
    case kModAlibi: return ScoreModKind::kAlibi;
    case kModDropout: return ScoreModKind::kDropout;
    default: return ScoreModKind::kRuntime;
  }
}

namespace {

bool takes(const ForwardEntry& e, const Problem& p, ScoreModKind kind) {
  return e.dtype == p.dtype && e.score_mod == kind && e.dim_qk >= p.dim_qk && e.dim_v >= p.dim_v;
}

// Whether blocks of the block mask end within tiles, so that tiles are seldom hidden as a whole.
bool blocks_cut_tiles(const Problem& p, const ForwardEntry& e) {
  return p.block_q % e.tile_q != 0 || p.block_kv % e.tile_kv != 0;
}

constexpr char kLaunching[] = "launching the forward kernel";

// The order of Q tiles. resident: CTAs that run at once.
L2Swizzle swizzle(const Problem& problem, const Shape& shape, int32_t tile_q, int32_t resident,
                  int64_t l2_bytes) {
  const int64_t tiles = ceil_div(shape.seqlen_q, tile_q);
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem.heads_q;
  if (!problem.has_mask(FLASHATTN_MASK_CAUSAL)) return L2Swizzle::of(heads, tiles, 1);
  const int64_t head_bytes = static_cast<int64_t>(shape.seqlen_kv) *
                             (problem.dim_qk + problem.dim_v) * dtype_size(problem.dtype);
  // All CTAs begin a bundle of heads at about the same time and load its K and V. For short
  // sequences smaller bundles are faster (2 % at 512 tokens); for longer ones they cost up to 1.4
  // %.
  const int64_t bytes = l2_bytes / (head_bytes <= (1 << 20) ? 8 : 2);
  const int64_t fitting = bytes / std::max<int64_t>(head_bytes, 1) * problem.q_heads_per_kv_head();
  return L2Swizzle::of(heads, tiles, fitting, L2Swizzle::even_end(resident, tiles));
}

// E4M3: V has no map where the kernel loads V^T from the workspace.
int32_t make_maps(const Problem& problem, const ForwardArgs& args, const ForwardEntry& entry,
                  ForwardParams* p) {
  const Shape& shape = args.shape;
  const bool fp8 = problem.dtype == FLASHATTN_DTYPE_F8E4M3;
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  p->kv_box_rows = paged ? std::gcd(problem.page_size, entry.tile_kv) : entry.tile_kv;
  const int32_t columns = fp8 ? std::min(entry.dim_qk, 128) : 64;
  const int64_t q_rows = varlen_q ? shape.total_q : shape.seqlen_q;
  const int64_t q_batch = varlen_q ? 1 : shape.batch;
  const int64_t kv_rows = paged ? problem.page_size : varlen_kv ? shape.total_kv : shape.seqlen_kv;
  const int64_t kv_batch = paged ? args.inputs.pages : varlen_kv ? 1 : shape.batch;
  // Packed heads: a row of a box of Q is a query head.
  const bool packed = p->packed.max_splits > 0;
  const int32_t group = 1 << p->packed.log2_group;
  flashattn_tensor q = args.inputs.q;
  if (packed) std::swap(q.stride_seq, q.stride_head);
  const ArrayShape q_shape =
      packed
          ? ArrayShape{problem.dim_qk, problem.heads_q, q_rows, q_batch, group, columns, 64 / group}
          : ArrayShape{problem.dim_qk, q_rows, problem.heads_q, q_batch, 64, columns};
  const struct {
    const flashattn_tensor& tensor;
    const char* name;
    CUtensorMap* map;
    bool needed;
    int32_t dtype;
    ArrayShape shape;
  } table[] = {
      {q, "q", &p->q, true, problem.dtype, q_shape},
      {args.inputs.k,
       "k",
       &p->k,
       true,
       problem.dtype,
       {problem.dim_qk, kv_rows, problem.heads_kv, kv_batch, p->kv_box_rows, columns}},
      {args.inputs.v,
       "v",
       &p->v,
       !fp8 || entry.transposes_v,
       problem.dtype,
       {problem.dim_v, kv_rows, problem.heads_kv, kv_batch, p->kv_box_rows, columns}},
      {args.o,
       "o",
       &p->o,
       p->o_by_tma != 0,
       problem.dtype_o,
       {problem.dim_v, q_rows, problem.heads_q, q_batch, 64, 64}},
  };
  if (entry.score_mod == ScoreModKind::kDenseBias) {
    if (const int32_t status =
            make_bias_map(problem, args.inputs, shape, entry.tile_kv, &p->bias)) {
      return status;
    }
  }
  for (const auto& row : table) {
    if (!row.needed) continue;
    if (const int32_t status =
            make_tensor_map(row.tensor, row.dtype, row.shape, row.name, row.map)) {
      return status;
    }
  }
  return FLASHATTN_OK;
}

std::string kernel_name(const ForwardEntry& e) {
  return forward_name("sm90", e) + kScoreModNames[static_cast<int32_t>(e.score_mod)];
}

}  // namespace

const char* const kScoreModNames[] = {"",         "_softcap",    "_alibi",      "_softcap_alibi",
                                      "_dropout", "_block_mask", "_dense_bias", "_block_descales",
                                      "_runtime"};

bool needs_runtime_kernel(const Problem& p) {
  // kModKeyBits: kernels for plain scores, with packed heads, take TREE.
  constexpr uint32_t kHaveKernels =
      kModSoftcap | kModAlibi | kModDropout | kModNegativeScale | kModKeyBits;
  return (modifications(p) & ~kHaveKernels) != 0 || p.dropout_threshold() > UINT16_MAX;
}

bool has_block_mask_alone(const Problem& p) {
  return (modifications(p) & ~kModNegativeScale) == kModBlockMask;
}

bool has_dense_bias_alone(const Problem& p) {
  return (modifications(p) & ~kModNegativeScale) == kModDenseBias &&
         (p.dtype_bias == p.dtype || p.dtype_bias == FLASHATTN_DTYPE_F32 ||
          p.dtype_bias == FLASHATTN_DTYPE_U8);
}

bool accepts_bias(const Problem& problem, const Inputs& in) {
  const flashattn_tensor bias = bias_tensor(in);
  return is_aligned(bias, problem.dtype_bias, 16) && copies_strides(bias);
}

bool ForwardKernels::supports_dense_bias(const Problem& p, const char** why_not) {
  *why_not = "";  // the runtime kernels say why
  const Table<ForwardEntry> table = forward_table();
  // With o in fp32 the P of a row's only key must be exactly 1, which only run-time kernels ensure.
  return has_dense_bias_alone(p) && p.dtype_kv == p.dtype && p.dtype_o != FLASHATTN_DTYPE_F32 &&
         std::any_of(table.begin(), table.end(),
                     [&](const ForwardEntry* e) { return takes(*e, p, ScoreModKind::kDenseBias); });
}

ForwardKernels::ForwardKernels(const Problem& problem, const Device& device)
    : ForwardKernels(problem, device, score_mod_of(problem)) {}

ForwardKernels::ForwardKernels(const Problem& problem, const Device& device, ScoreModKind kind)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      l2_bytes_(usable_l2_bytes(device.index)),
      softcap_(softcap_of(problem)),
      stream_k_(problem, device) {
  for (const ForwardEntry* e : forward_table()) {
    if (!takes(*e, problem, kind)) continue;
    // All tiles for the smallest head size that fits; no larger head size.
    if (!kernels_.empty() && (e->dim_qk != kernels_[0].kernel.entry->dim_qk ||
                              e->dim_v != kernels_[0].kernel.entry->dim_v)) {
      continue;
    }
    kernels_.push_back({make_ready(*e, multiprocessors_), kernel_name(*e)});
  }
  // The last kernel has the smallest tiles; it always stays.
  if (kind == ScoreModKind::kBlockMask && !kernels_.empty()) {
    const auto last = kernels_.end() - 1;
    kernels_.erase(std::remove_if(kernels_.begin(), last,
                                  [&problem](const NamedKernel& k) {
                                    return blocks_cut_tiles(problem, *k.kernel.entry);
                                  }),
                   last);
  }
  stream_k_.keep_within_limit(workspace(maxima_of(problem)));
}

bool ForwardKernels::supports(const Shape& shape, const char** why_not) const {
  if (shape.seqlen_kv > 0) return true;
  *why_not = "there are no keys";
  return false;
}

bool ForwardKernels::accepts(const ForwardArgs& args) const {
  return kernels_[0].kernel.entry->score_mod != ScoreModKind::kDenseBias ||
         accepts_bias(problem_, args.inputs);
}

RowCost ForwardKernels::cost(const Shape& shape) const {
  constexpr double kUsual = 0.6, kMostlyIdle = 2.0;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  // With many small heads and no GQA, half a tile of queries is enough for small CTAs.
  const ForwardEntry& small = *kernels_.back().kernel.entry;
  const bool fine = small.dim_v == 64 && small.tile_q == 64 &&
                    problem_.q_heads_per_kv_head() == 1 && 5 * heads >= 2 * multiprocessors_;
  if (shape.seqlen_q <= (fine ? kShortQueries / 2 : kShortQueries) && !beats_packed_heads(shape)) {
    return {kMostlyIdle, "too few queries for Hopper tiles"};
  }
  const int64_t tiles = ceil_div(shape.seqlen_q, kernels_.front().kernel.entry->tile_q) * heads;
  if (5 * tiles < 2 * multiprocessors_ && shape.seqlen_kv >= kLongKeys) {
    return {kMostlyIdle, "too few Hopper tiles for the device, and keys enough to split"};
  }
  return {kUsual, nullptr};
}

bool ForwardKernels::beats_packed_heads(const Shape& shape) const {
  constexpr int32_t kPackedRows = 64, kManyKeys = 2048;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const int32_t group = problem_.q_heads_per_kv_head();
  const int64_t rows = static_cast<int64_t>(shape.seqlen_q) * group;
  if (4 * heads < 3 * multiprocessors_ || shape.seqlen_kv < kManyKeys) return false;
  // Measured on an H200: a Hopper tile takes a third of the time of 64 packed rows, of heads above
  // 128 three quarters.
  const int64_t packed = ceil_div(rows, kPackedRows);
  const bool is_large = std::max(problem_.dim_qk, problem_.dim_v) > 128;
  return 2 * rows > kPackedRows && (is_large ? 3 * group < 4 * packed : group < 3 * packed);
}

const NamedKernel& ForwardKernels::choose(const Shape& shape) const {
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  const MaskRule rule = problem_.mask_rule();
  const Lengths longest{shape.seqlen_q, shape.seqlen_kv};
  const bool packed = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) &&
                      problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV) && shape.batch > 0;
  const auto mean_of = [&shape](int64_t total, int32_t most) {
    return static_cast<int32_t>(std::min<int64_t>(total / shape.batch, most));
  };
  const Lengths mean =
      packed ? Lengths{mean_of(shape.total_q, longest.q), mean_of(shape.total_kv, longest.kv)}
             : longest;
  const auto time = [&](const NamedKernel& named) {
    const TileCost& cost = named.kernel.entry->cost;
    const StreamK items = stream_k_.work_items(*named.kernel.entry, shape);
    if (items.tiles_split() > 0) return stream_k_time(cost, items, longest, multiprocessors_);
    return packed ? packed_time(cost, rule, mean, longest, heads, multiprocessors_)
                  : forward_time(cost, rule, longest, heads, multiprocessors_);
  };
  const auto faster = [&](const auto& a, const auto& b) { return time(a) < time(b); };
  return *std::min_element(kernels_.begin(), kernels_.end(), faster);
}

int64_t ForwardKernels::workspace(const Shape& shape) const {
  int64_t partials = 0;
  for (const NamedKernel& named : kernels_) {
    partials = std::max(partials, stream_k_.partial_floats(*named.kernel.entry, shape));
  }
  WorkspaceAllocator memory(nullptr);
  memory.take<TileCounter>(1);
  memory.take<float>(partials);
  return memory.unaligned_bytes();
}

std::string ForwardKernels::describe(const Shape& shape,
                                     flashattn_plan_properties* properties) const {
  const NamedKernel& named = choose(shape);
  describe_kernel(named.kernel, named.kernel.entry->stages, named.name, "wgmma", properties);
  return named.kernel.entry->score_mod == ScoreModKind::kDenseBias
             ? "; for calls whose bias lies at multiples of 16 bytes, row by row"
             : std::string("; queries fill their tiles") +
                   stream_k_.describe(*named.kernel.entry, shape);
}

int32_t ForwardKernels::launch(const ForwardArgs& args, void* workspace,
                               cudaStream_t stream) const {
  const NamedKernel& named = choose(args.shape);
  ForwardParams p{};
  if (const int32_t status =
          make_forward_params(problem_, args, named.kernel, l2_bytes_, softcap_, &p)) {
    return status;
  }
  WorkspaceAllocator memory(workspace);
  TileCounter* const counter = memory.take<TileCounter>(1);
  const int64_t partials = stream_k_.partial_floats(*named.kernel.entry, args.shape);
  return stream_k_.launch(named.kernel, &p, counter, memory.take<float>(partials), stream);
}

int32_t make_forward_params(const Problem& problem, const ForwardArgs& args,
                            const ReadyKernel<ForwardEntry>& kernel, int64_t l2_bytes,
                            const SoftcapPolynomials& softcap, ForwardParams* p) {
  const ForwardEntry& entry = *kernel.entry;
  const int64_t all =
      ceil_div(args.shape.seqlen_q, entry.tile_q) * args.shape.batch * problem.heads_q;
  if (all > kNoWork) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "batch",
                "batch = %d with %d heads and %d queries makes %" PRId64
                " tiles, above %d; split the batch",
                args.shape.batch, problem.heads_q, args.shape.seqlen_q, all, kNoWork);
  }
  p->problem = problem;
  p->args = args;
  const bool packed = p->packed.max_splits > 0;
  if (!packed) {
    p->swizzle = swizzle(problem, args.shape, entry.tile_q, kernel.resident, l2_bytes);
    p->stream_k = StreamK::unsplit(p->swizzle.count());
  }
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  p->kv_has_tail = problem.layout != 0 || args.inputs.lens_kv != nullptr;
  p->dropout_threshold = problem.dropout_threshold();
  p->softcap = softcap;
  p->o_by_tma = !packed && !varlen_q && !args.inputs.lens_q && problem.dtype_o == entry.dtype;
  return make_maps(problem, args, entry, p);
}

int32_t launch_forward(const ReadyKernel<ForwardEntry>& kernel, ForwardParams* p,
                       TileCounter* counter, cudaStream_t stream) {
  const ForwardEntry& entry = *kernel.entry;
  const int64_t tiles = entry.uses_stream_k ? p->stream_k.work_items : p->swizzle.count();
  const int64_t resident = kernel.resident;
  // A grid of less than a wave is spread evenly over an idle device, but not over the end of
  // another kernel: no early launch, unless a CTA fills a multiprocessor, as with packed heads.
  // Packed heads plan their tiles before they wait for the kernel before: its lengths are not
  // known.
  if (tiles < resident) {
    const bool early = p->packed.max_splits > 0 && !reads_lengths(p->problem, p->args.inputs);
    return cuda::launch(entry, tiles, *p, stream, kLaunching, 1, early);
  }
  p->tile_counter = counter;
  p->stamp = new_stamp();
  return status_of(launch_pdl(entry.kernel, dim3(static_cast<unsigned>(resident)), entry.threads,
                              entry.shared_bytes, *p, stream),
                   kLaunching);
}

bool has_code(int32_t device) {
  static CodeCheck check;
  return check.has_code(device, reinterpret_cast<const void*>(forward_table().entries[0]->kernel));
}

bool takes_dims(const Problem& problem) {
  const Table<ForwardEntry> table = forward_table();
  return std::any_of(table.begin(), table.end(), [&](const ForwardEntry* e) {
    return takes(*e, problem, score_mod_of(problem));
  });
}

}  // namespace flashattn::cuda::sm90
