// Portable forward row: choice of tile and of split-KV, grid, workspace, launches.
#include "cuda/host/sm80_fwd.h"

#include <algorithm>
#include <cinttypes>
#include <map>
#include <mutex>
#include <utility>

#include "core/arrays.h"
#include "core/error.h"
#include "core/score_mod.h"
#include "cuda/host/sm80_bwd.h"
#include "cuda/host/driver.h"
#include "cuda/host/schedule/split_kv.h"
#include "cuda/host/combine.h"

namespace flashattn::cuda::sm80 {
namespace {

constexpr int32_t kShortElements = 16384;  // elements of Q or K of a head: small CTAs win up to it
// With few queries, from this many keys in all and per query on, loads of K and V are the bound:
// calls run on decode kernels.
constexpr int32_t kDecodeKeys = 512, kDecodeKeysPerQuery = 8;
// From this many E4M3 keys on, splits have enough tiles for the deep pipeline; not measured.
constexpr int32_t kDeepF8Keys = 4096;
constexpr int64_t kDecodeRowTiles = 2;  // the most row tiles of a KV head that load K and V each

// fp32 runs on the kernels for modified scores, which multiply as 3xTF32, also with a backward
// pass, whose P must come from the same scores as lse, and with a sink, which may exceed all of P:
// 3xFP16 would lose P's digits.
bool wants_modified(const Problem& p) {
  return modifications(p) != 0 || !has_plain_kernels(p) ||
         (p.dtype == FLASHATTN_DTYPE_F32 &&
          (p.has_feature(FLASHATTN_FEATURE_SINK) || p.has_op(FLASHATTN_OP_BACKWARD)));
}

// TREE and PAGES are masks of decode kernels; other kernels for plain scores lack them. Decode
// kernels for modified scores also take plain scores.
const ForwardEntry* find(const Problem& p, Size size, int32_t shared_memory) {
  Problem without_bits = p;
  without_bits.mask &= ~kKeyBitMasks;
  const bool modified = wants_modified(p), decode_modified = wants_modified(without_bits);
  return find(forward_table(), shared_memory, [&](const ForwardEntry& e) {
    const bool computes = e.decodes ? e.modified || !decode_modified : e.modified == modified;
    return computes && e.dtype == p.dtype_kv && e.size == size && e.dim_qk >= p.dim_qk &&
           e.dim_v >= p.dim_v;
  });
}

// Whether every tile lies in one block of the block mask. Larger tiles visit much that is hidden.
bool fits_blocks(const Problem& p, const ForwardEntry& e) {
  return !p.has_mask(FLASHATTN_MASK_BLOCKS) ||
         (p.block_q % e.tile_q == 0 && p.block_kv % e.tile_kv == 0);
}

std::string kernel_name(const ForwardEntry& e) {
  return forward_name("sm80", e) + (e.decodes ? "_decode" : "") + (e.modified ? "_modified" : "");
}

// The entry with shared memory enough that a CTA has a multiprocessor to itself. shared_memory:
// what the device offers a CTA.
ForwardEntry alone(ForwardEntry entry, int32_t shared_memory) {
  entry.shared_bytes = std::max(entry.shared_bytes, (shared_memory / 2048 + 1) * 1024);
  return entry;
}

// Sets up the kernel that merges in clusters. Asks the driver once per device and kernel how many
// clusters run at once. Throws Refused.
ClusterLimits ready_clusters(const Device& device, const ForwardEntry& entry) {
  static std::mutex mutex;
  static std::map<std::pair<int32_t, const ForwardEntry*>, ClusterLimits> known;
  const ForwardEntry merging = alone(entry.merging(), device.properties.shared_memory);
  const void* const kernel = reinterpret_cast<const void*>(merging.kernel);
  cudaFuncAttributes attributes{};
  throw_on(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  // Code compiled from older PTX cannot run in clusters.
  if (attributes.ptxVersion < 90 || merging.shared_bytes > device.properties.shared_memory)
    return {};
  make_ready(merging, device.properties.multiprocessors);
  throw_on(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
           "cudaFuncSetAttribute");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device.index, &entry});
  if (found != known.end()) return found->second;
  ClusterLimits limits{};
  for (int32_t log2 = 1; log2 <= kMaxLog2Cluster; ++log2) {
    limits.at_once[log2] =
        active_clusters(kernel, 1 << log2, merging.threads, merging.shared_bytes);
  }
  return known[{device.index, &entry}] = limits;
}

}  // namespace

int32_t shared_bytes(const Problem& problem, int32_t shared_memory) {
  const ForwardEntry* entry = find(problem, Size::kMedium, shared_memory);
  if (!entry || !problem.has_op(FLASHATTN_OP_BACKWARD)) return entry ? entry->shared_bytes : 0;
  const int32_t backward = BackwardKernels::shared_bytes(problem, shared_memory);
  return backward == 0 ? 0 : std::max(entry->shared_bytes, backward);
}

bool has_code(int32_t device) {
  static CodeCheck check;
  return check.has_code(device, reinterpret_cast<const void*>(forward_table().entries[0]->kernel));
}

ForwardKernels::ForwardKernels(const Problem& problem, const Device& device)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      shared_memory_(device.properties.shared_memory),
      l2_bytes_(usable_l2_bytes(device.index)),
      combine_starts_early_(false) {
  throw_on(combine_waits(&combine_starts_early_), "cudaFuncGetAttributes");
  const int32_t shared_memory = device.properties.shared_memory;
  const bool is_tf32 = problem.dtype == FLASHATTN_DTYPE_F32 && wants_modified(problem);
  const std::string common = is_tf32 && modifications(problem) == 0
                                 ? "; fp32 as tf32, slower, which a sink, the backward pass "
                                   "and heads above 256 need"
                             : problem.has_f8_cache() ? "; E4M3 converted to fp16 as it is read"
                                                      : "";
  const auto make = [&](const ForwardEntry& entry, const std::string& why) {
    return Kernel{make_ready(entry, multiprocessors_), kernel_name(entry), common + why};
  };
  const ForwardEntry& medium = *find(problem, Size::kMedium, shared_memory);
  medium_ = make(medium, "; " + std::to_string(medium.tile_q) + " rows a CTA");
  // Tiles of another size round differently, and the choice would depend on the batch.
  const bool invariant = problem.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT;
  const auto make_or = [&](const Kernel& other, Size size, const char* why) {
    const ForwardEntry* entry = find(problem, size, shared_memory);
    const bool use = entry && entry->dim_qk == medium_.kernel.entry->dim_qk &&
                     entry->shared_bytes <= shared_memory && !invariant &&
                     fits_blocks(problem, *entry);
    return use ? make(*entry, why) : other;
  };
  large_ = make_or(medium_, Size::kLarge, "; 128 rows a CTA: many queries");
  const char* const shared_keys = "; decode: 16 rows a CTA, whose warps share the keys";
  small_ = make_or(medium_, Size::kSmall,
                   problem.has_f8_cache() ? shared_keys : "; small CTAs: few queries");
  tiny_ = make_or(small_, Size::kTiny, "; the smallest CTAs: more than one wave");
  shallow_ = make_or(small_, Size::kShallowPipeline, shared_keys);
  deep_ =
      make_or(shallow_, Size::kDeepPipeline,
              "; decode: 16 rows a CTA, whose warps share the keys; a deep pipeline, as CTAs are "
              "few");
  const char* const why = "; decode: all rows of a KV head in a CTA, whose warps share the keys";
  rows32_ = make_or(small_, Size::kDecode32, why);
  const bool is_wide = rows32_.kernel.entry->tile_q >= medium.tile_q;
  rows64_ = make_or(is_wide ? rows32_ : medium_, Size::kDecode64, why);
  if (deep_.kernel.entry->merging_kernel) {
    cluster_limits_ = ready_clusters(device, *deep_.kernel.entry);
  }
}

const ForwardKernels::Kernel& ForwardKernels::choose(const Shape& shape) const {
  const ForwardEntry &medium = *medium_.kernel.entry, &large = *large_.kernel.entry;
  const int64_t rows = static_cast<int64_t>(shape.seqlen_q) * problem_.q_heads_per_kv_head();
  // Enough bytes of K and V must be in flight, some 64 KB per multiprocessor on an H200, and the
  // last wave must be short. Small tiles keep few bytes in flight, but shorten the last wave: by up
  // to a fifth of the time (96 sequences of 4,096 keys on an H200).
  const int64_t kv_heads = static_cast<int64_t>(shape.batch) * problem_.heads_kv;
  if (rows <= shallow_.kernel.entry->tile_q && kv_heads <= shallow_.kernel.resident) {
    const bool is_long = !problem_.has_f8_cache() || shape.seqlen_kv >= kDeepF8Keys;
    return kv_heads <= multiprocessors_ && !is_uneven(shape) && is_long ? deep_ : shallow_;
  }
  if (rows <= rows32_.kernel.entry->tile_q) {
    if (kv_heads <= rows32_.kernel.resident && pays_to_decode(rows32_, shape)) return rows32_;
  } else if (pays_to_decode(rows64_, shape)) {
    return rows64_;
  }
  if (rows <= small_.kernel.entry->tile_q) {
    return kv_heads > small_.kernel.resident ? tiny_ : small_;
  }
  if (problem_.has_f8_cache()) return rows <= rows32_.kernel.entry->tile_q ? rows32_ : rows64_;
  // Large tiles need rows enough to fill them (a causal mask hides half of a single tile) and CTAs
  // enough for all multiprocessors.
  const int64_t ctas = ceil_div(shape.seqlen_q, large.tile_q) * shape.batch * problem_.heads_q;
  const int32_t least = problem_.has_mask(FLASHATTN_MASK_CAUSAL) ? large.tile_q : medium.tile_q;
  return shape.seqlen_q > least && ctas >= multiprocessors_ ? large_ : medium_;
}

bool ForwardKernels::pays_to_decode(const Kernel& choice, const Shape& shape) const {
  const ReadyKernel<ForwardEntry>& kernel = choice.kernel;
  if (!kernel.entry->decodes || shape.batch == 0) return false;
  if (shape.seqlen_kv < std::max(kDecodeKeys, kDecodeKeysPerQuery * shape.seqlen_q)) return false;
  const ForwardParams p = grid(kernel, shape);
  if (int64_t{p.head_tiles} * p.q_tiles > kDecodeRowTiles) return false;
  if (problem_.splits > 1) return true;
  // Other kernels have more CTAs a multiprocessor, and waste less of a last wave.
  const int64_t ctas = p.ctas(), waves = ceil_div(ctas, kernel.resident);
  return waves == 1 || 10 * ctas >= 9 * waves * kernel.resident;
}

bool ForwardKernels::is_uneven(const Shape& shape) const {
  return may_be_uneven(problem_, shape, multiprocessors_);
}

ForwardParams ForwardKernels::grid(const ReadyKernel<ForwardEntry>& choice,
                                   const Shape& shape) const {
  ForwardParams p{};
  set_problem(problem_, shape, &p);
  p.dropout_threshold = problem_.dropout_threshold();
  p.cta_queries = std::max(std::min(shape.seqlen_q, choice.entry->tile_q), 1);
  // Block masks may differ by head, and dropout's tiles start at multiples of 16 queries: then
  // heads do not share a CTA.
  bool one_head = problem_.has_mask(FLASHATTN_MASK_BLOCKS) || p.dropout_threshold != 0;
  // The path of the softcap and the factors of fp32 are chosen for all rows of a CTA, so with
  // BATCH_INVARIANT the heads of a CTA must not depend on the longest sequence.
  one_head |= problem_.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT &&
              (problem_.softcap != 0 || problem_.dtype == FLASHATTN_DTYPE_F32);
  p.cta_heads =
      one_head ? 1 : std::min(problem_.q_heads_per_kv_head(), choice.entry->tile_q / p.cta_queries);
  p.head_tiles = static_cast<int32_t>(ceil_div(problem_.q_heads_per_kv_head(), p.cta_heads));
  p.q_tiles = static_cast<int32_t>(ceil_div(shape.seqlen_q, p.cta_queries));
  p.max_splits = 1;
  const bool is_decode = choice.entry->decodes;
  // For decode kernels one CTA per multiprocessor keeps enough bytes in flight. E4M3 takes two:
  // four or eight warps convert it more slowly than it arrives.
  const int64_t one_wave = problem_.has_f8_cache()
                               ? std::min<int64_t>(2 * multiprocessors_, choice.resident)
                               : multiprocessors_;
  const int64_t row_tiles = std::max<int64_t>(p.ctas(), 1);
  const SplitGrid waves{row_tiles, is_decode ? one_wave : choice.resident, choice.resident,
                        is_decode && is_uneven(shape)};
  const int32_t step = is_decode ? std::max(kSplitStep, choice.entry->tile_kv) : kSplitStep;
  // A number of splits that the caller or BATCH_INVARIANT sets need not be a cluster's.
  if (choice.entry == deep_.kernel.entry && !waves.uneven && problem_.splits == 0 &&
      problem_.determinism != FLASHATTN_DETERMINISM_BATCH_INVARIANT) {
    p.log2_cluster =
        log2_cluster_ctas(row_tiles, p.cta_heads * p.cta_queries, shape.seqlen_kv,
                          problem_.dim_qk + problem_.dim_v, step, one_wave, cluster_limits_);
  }
  const int64_t splits = p.log2_cluster > 0
                             ? int64_t{1} << p.log2_cluster
                             : one_wave_splits(problem_, shape, waves, multiprocessors_);
  p.split = split_rule(problem_, shape, splits, step, waves.uneven);
  p.partial_queries = std::min(shape.seqlen_q, p.split.max_queries);
  p.max_splits = max_split_count(p.split, {shape.seqlen_q, shape.seqlen_kv});
  const int64_t head_bytes = static_cast<int64_t>(shape.seqlen_kv) *
                             (problem_.dim_qk + problem_.dim_v) * dtype_size(problem_.dtype_kv);
  const int64_t tiles = static_cast<int64_t>(p.q_tiles) * p.max_splits;
  const int32_t ctas = problem_.has_mask(FLASHATTN_MASK_CAUSAL) ? choice.resident : 0;
  const int64_t fitting = l2_bytes_ / 2 / std::max<int64_t>(head_bytes, 1);
  // The CTAs of a cluster are consecutive, so that every L2 group is one head.
  p.swizzle = p.log2_cluster > 0
                  ? L2Swizzle::of(p.work_heads(), tiles, 1)
                  : L2Swizzle::of(p.work_heads(), tiles, fitting, L2Swizzle::even_end(ctas, tiles));
  p.by_splits = FastDivmod::of(p.max_splits);
  p.by_head_tiles = FastDivmod::of(p.head_tiles);
  p.by_heads_kv = FastDivmod::of(problem_.heads_kv);
  p.q_heads_per_kv_head = problem_.q_heads_per_kv_head();
  return p;
}

RowCost ForwardKernels::cost(const Shape& shape) const {
  // Short sequences: the start-up time of a CTA decides.
  const int64_t longest = std::max(shape.seqlen_q, shape.seqlen_kv);
  if (longest * problem_.dim_qk > kShortElements) return {1.0, nullptr};
  const ReadyKernel<ForwardEntry>& kernel = choose(shape).kernel;
  if (grid(kernel, shape).ctas() > kernel.resident) return {1.0, nullptr};
  return {0.4, "short sequences that all run at once: small CTAs start faster"};
}

int64_t ForwardKernels::workspace(const Shape& shape) const {
  const ForwardParams p = grid(choose(shape).kernel, shape);
  int64_t limit = 0;
  for (const Kernel* choice :
       {&deep_, &shallow_, &rows32_, &rows64_, &tiny_, &small_, &medium_, &large_}) {
    const ForwardEntry& entry = *choice->kernel.entry;
    const int64_t waves = entry.decodes && has_own_lengths(problem_) ? kUnevenWaves : 1;
    limit = std::max<int64_t>(limit, waves * choice->kernel.resident * entry.tile_q);
  }
  const int64_t row = (problem_.dim_v + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t rows = partial_rows(problem_, shape, p.split, limit);
  return rows == 0 ? 0 : workspace_of<char>(rows * row);
}

ForwardEntry ForwardKernels::merging(const ForwardEntry& entry, const ForwardParams& p,
                                     const Shape& shape) const {
  // CTAs of a cluster that starts early may share a multiprocessor while others are idle. Where
  // they have little to do, that costs less than it saves to start while the kernel before ends.
  constexpr int32_t kFewKeys = 128;
  const bool is_long = split_keys(p.split, {shape.seqlen_q, shape.seqlen_kv}) > kFewKeys;
  return combine_starts_early_ && is_long ? alone(entry.merging(), shared_memory_)
                                          : entry.merging();
}

std::string ForwardKernels::describe(const Shape& shape,
                                     flashattn_plan_properties* properties) const {
  const Kernel& choice = choose(shape);
  describe_kernel(choice.kernel, choice.kernel.entry->stages, choice.name, "mma.sync", properties);
  const ForwardParams p = grid(choice.kernel, shape);
  // Split lengths are multiples of split.step, so the longest sequence may have fewer splits than
  // were asked for.
  properties->splits = split_count(p.split, {shape.seqlen_q, shape.seqlen_kv});
  if (p.log2_cluster == 0) return choice.why;
  properties->shared_memory = merging(*choice.kernel.entry, p, shape).shared_bytes;
  return choice.why + "; a cluster of " + std::to_string(1 << p.log2_cluster) +
         " CTAs shares a KV head's keys and merges its splits";
}

int32_t ForwardKernels::launch(const ForwardArgs& args, void* workspace,
                               cudaStream_t stream) const {
  if (args.amax_o.data) {
    return fail(
        FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "amax_o",
        "amax_o is given, but the GPU kernels for dtype_kv = F8E4M3 do not compute it; leave "
        "it NULL, or use device = CPU");
  }
  const ReadyKernel<ForwardEntry>& choice = choose(args.shape).kernel;
  ForwardParams p = grid(choice, args.shape);
  if (const int32_t status = set_arrays(args, workspace, &p)) return status;
  const bool merges = p.log2_cluster > 0;
  const ForwardEntry entry = merges ? merging(*choice.entry, p, args.shape) : *choice.entry;
  // The combine kernel reads lengths before it waits: a kernel that starts early itself does not
  // order that behind the work that wrote them.
  const bool early =
      entry.decodes && combine_starts_early_ && (merges || !reads_lengths(problem_, args.inputs));
  const int32_t status = cuda::launch(entry, p.ctas(), p, stream, "launching the forward kernel",
                                      1 << p.log2_cluster, early);
  if (status != FLASHATTN_OK || p.max_splits <= 1 || merges) return status;
  return status_of(launch_combine(p, combine_starts_early_, stream),
                   "launching the combine kernel");
}

}  // namespace flashattn::cuda::sm80
