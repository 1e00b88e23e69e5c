// Hopper backward row: choice of kernel, stream-K, overlapped preprocessing, workspace, launches.
#include "cuda/host/sm90_bwd.h"

#include <algorithm>
#include <cinttypes>

#include "core/error.h"
#include "core/philox.h"
#include "core/score_mod.h"
#include "core/select.h"
#include "cuda/host/bwd_rows.h"
#include "cuda/host/preload.h"
#include "cuda/host/sm90_block_mask.h"
#include "cuda/host/softcap_fit.h"
#include "cuda/host/tensor_map.h"

namespace flashattn::cuda::sm90 {
namespace {

// A negative scale is no special case: the backward pass looks for no maximum.
ScoreModKind score_mod_of(const Problem& p) {
  if (has_block_mask_alone(p)) return ScoreModKind::kBlockMask;
  if (needs_runtime_kernel(p)) return ScoreModKind::kRuntime;
  switch (modifications(p) & ~(kModNegativeScale | kModKeyBits)) {
    case 0: return ScoreModKind::kPlain;
    case kModDropout: return ScoreModKind::kDropout;
    case kModAlibi:
      if (std::max(p.dim_qk, p.dim_v) <= kMaxAlibiDim) return ScoreModKind::kAlibi;
      return ScoreModKind::kSoftcapAlibi;
    case kModSoftcap:
    case kModSoftcap | kModAlibi: return ScoreModKind::kSoftcapAlibi;
    default: return ScoreModKind::kRuntime;
  }
}

// From this many queries per KV head the two-warpgroup kernel is faster without a mask: on an H200
// by 1 % at 8192 and 2 % at 16384. It loses 1 % at 4096, and 3 to 0 % under causal masks up to
// 32768.
constexpr int64_t kTwoWarpgroupQueries = 8192;

// The cost of a stream-K partial, in Q tiles.
constexpr int32_t kPartialCost = 4;
// Saving fewer Q tiles by stream-K is not measurable.
constexpr int32_t kLeastSaved = 12;

// One in this many multiprocessors preprocesses while the others begin; 8 or 12 of 132 are as good.
constexpr int32_t kMultiprocessorsPerTailCta = 13;
// The early start pays from this ratio of all heads to those that must be preprocessed first: on an
// H200 by 1 to 3 % up to 4096 queries, then less.
constexpr int32_t kEarlyHeads = 2;
// With stream-K the early start needs kStreamKHeads heads per kStreamKMultiprocessors
// multiprocessors, because CTAs that begin late upset its balance: 256 heads of 1024 queries gain
// 2 %, 128 of 2048 lose 0.5 %.
constexpr int32_t kStreamKHeads = 3, kStreamKMultiprocessors = 2;

const BackwardEntry* find(const Problem& p, ScoreModKind scores, Table<BackwardEntry> table) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const BackwardEntry* e) {
    return e->dtype == p.dtype && e->score_mod == scores && e->dim_qk >= p.dim_qk &&
           e->dim_v >= p.dim_v && takes_blocks(*e, p);
  });
  return found == table.end() ? nullptr : *found;
}

// The two-warpgroup kernel of the same head size, without a mask: see kTwoWarpgroupQueries.
const BackwardEntry* find_two_warpgroup(const Problem& p, ScoreModKind scores) {
  if (!sees_all(p.mask_rule())) return nullptr;
  const BackwardEntry* entry = find(p, scores, two_warpgroup_backward_table());
  return entry && entry->dim_qk == find(p, scores, backward_table())->dim_qk ? entry : nullptr;
}

}  // namespace

bool BackwardKernels::supports(const Problem& problem, const char** why_not) {
  const BackwardEntry* entry = find(problem, score_mod_of(problem), backward_table());
  if (problem.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT || !entry) {
    *why_not = "no Hopper backward kernel for this";
    return false;
  }
  // With block masks, biases and dim 64 the portable kernel is faster, on an H200 by 40 %.
  if (problem.has_mask(FLASHATTN_MASK_BLOCKS) && entry->score_mod == ScoreModKind::kRuntime &&
      entry->dim_qk == 64 && !forced_backend()) {
    *why_not = "the Hopper kernel is slower with block masks, biases and small heads";
    return false;
  }
  return true;
}

bool BackwardKernels::supports_dense_bias(const Problem& problem, const char** why_not) {
  *why_not = "";  // the runtime kernels say why
  return problem.determinism != FLASHATTN_DETERMINISM_BATCH_INVARIANT &&
         has_dense_bias_alone(problem) &&
         find(problem, ScoreModKind::kDenseBias, backward_table()) != nullptr;
}

BackwardKernels::BackwardKernels(const Problem& problem, const Device& device)
    : BackwardKernels(problem, device, score_mod_of(problem)) {}

BackwardKernels::BackwardKernels(const Problem& problem, const Device& device, ScoreModKind kind)
    : problem_(problem),
      multiprocessors_(device.properties.multiprocessors),
      l2_bytes_(usable_l2_bytes(device.index)),
      main_(make(find(problem, kind, backward_table()))),
      two_warpgroup_(make(find_two_warpgroup(problem, kind))),
      dbias_(problem, device),
      hopper_dbias_(problem_, device, *main_.choice.entry),
      softcap_(softcap_with_derivative(problem)) {
  if (kind == ScoreModKind::kDenseBias && problem.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    throw_on(preload_clear_dbias(), "cudaFuncGetAttributes");
  }
}

BackwardKernels::Kernel BackwardKernels::make(const BackwardEntry* entry) const {
  if (!entry) return {};
  throw_on(preload(entry->postprocess), "cudaFuncGetAttributes");
  if (problem_.has_mask(FLASHATTN_MASK_BLOCKS))
    throw_on(preload_block_mask(), "cudaFuncGetAttributes");
  if (entry->overlaps_preprocess) {
    const BwdPreprocessKernel preprocess = bwd_preprocess_kernel(problem_.dtype, problem_.dim_v);
    make_ready(reinterpret_cast<const void*>(preprocess.kernel), preprocess.threads,
               preprocess.shared_bytes, multiprocessors_);
  }
  return {make_ready(*entry, multiprocessors_),
          std::string("sm90_backward_") + dtype_label(entry->dtype) + "_" +
              std::to_string(entry->dim_qk) + "_" + std::to_string(entry->dim_v) + "_q" +
              std::to_string(entry->tile_q) +
              kScoreModNames[static_cast<int32_t>(entry->score_mod)]};
}

const BackwardKernels::Kernel& BackwardKernels::choose(const Shape& shape) const {
  if (!two_warpgroup_.choice.entry) return main_;
  const int64_t queries =
      problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) && shape.batch > 0
          ? std::min<int64_t>(shape.seqlen_q, ceil_div(shape.total_q, shape.batch))
          : shape.seqlen_q;
  return queries * problem_.q_heads_per_kv_head() >= kTwoWarpgroupQueries ? two_warpgroup_ : main_;
}

bool BackwardKernels::supports(const Shape& shape, const char** why_not) const {
  if (shape.batch == 0 || shape.seqlen_q == 0 || shape.seqlen_kv == 0) {
    *why_not = "there are no queries or no keys";
    return false;
  }
  const bool fits = fits_q_coord(*main_.choice.entry, problem_, shape);
  if (!fits)
    *why_not = "too many queries for the Hopper kernel with biases, dropout or block masks";
  return fits;
}

bool BackwardKernels::accepts(const BackwardArgs& args) const {
  return main_.choice.entry->score_mod != ScoreModKind::kDenseBias ||
         accepts_bias(problem_, args.inputs);
}

int64_t BackwardKernels::first_heads(const L2Swizzle& swizzle) const {
  return int64_t{swizzle.heads_of(std::min(multiprocessors_, swizzle.count()))} *
         problem_.q_heads_per_kv_head();
}

bool BackwardKernels::starts_early(const BackwardEntry& entry, const BackwardArgs& args,
                                   const BackwardParams& p) const {
  if (!entry.overlaps_preprocess || problem_.dtype_o != problem_.dtype) return false;
  if (problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) || p.swizzle.count() == 0) return false;
  const int64_t heads = static_cast<int64_t>(args.shape.batch) * problem_.heads_q;
  if (heads < kEarlyHeads * first_heads(p.swizzle)) return false;
  const bool is_stream_k = p.common.arrived_count > hopper_dbias_.counters();
  if (is_stream_k && heads * kStreamKMultiprocessors < int64_t{multiprocessors_} * kStreamKHeads)
    return false;
  return heads * p.max_q_tiles * entry.tile_q <= INT32_MAX / 2 && copies_strides(args.o);
}

bool BackwardKernels::adds_dbias(const BackwardArgs& args) const {
  if (!can_add_dbias(*main_.choice.entry) || !args.dbias) return false;
  if (hopper_dbias_.accepts(args) && (ordered() || hopper_dbias_.beats_adding())) return false;
  // dbias of a sequence ends where the sequence does: nothing beside it may be cleared.
  if (problem_.layout != 0 || args.inputs.lens_q || args.inputs.lens_kv) return false;
  // With a sum over queries, too many tiles would add to it. Offsets in a tile have 32 bits.
  if (args.dbias_stride_row == 0 || args.dbias_stride_row > INT32_MAX / 64) return false;
  const bool sums = (args.dbias_stride_batch == 0 && args.shape.batch > 1) ||
                    (args.dbias_stride_head == 0 && problem_.heads_q > 1);
  return !sums || !ordered();
}

BackwardParams BackwardKernels::params(const BackwardEntry& entry, const BackwardArgs& args,
                                       char* base, int64_t* bytes) const {
  const Shape& shape = args.shape;
  BackwardParams p{};
  cuda::BackwardParams& common = p.common;
  common.problem = problem_;
  common.args = args;
  common.dropout_threshold = problem_.dropout_threshold();
  common.tile_q = entry.tile_q;
  common.tile_dim = entry.dim_qk;
  common.tile_kv = entry.tile_kv;
  common.dq_ctas = entry.cluster_size;
  common.ordered = ordered();
  common.q_heads_per_kv_head = problem_.q_heads_per_kv_head();
  p.max_q_tiles = static_cast<int32_t>(ceil_div(shape.seqlen_q, entry.tile_q));
  p.head_q_tiles = static_cast<int32_t>(common.head_tiles(entry.tile_q));
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  p.q_has_tail = varlen_q || args.inputs.lens_q != nullptr;
  p.kv_has_tail = varlen_kv || args.inputs.lens_kv != nullptr;
  const bool has_softcap = problem_.softcap != 0;
  p.keep_scale = dropout_keep_scale(common.dropout_threshold);
  p.softcap_inner = has_softcap ? problem_.scale / problem_.softcap : 0.0f;
  p.score_scale = (has_softcap ? problem_.softcap : problem_.scale) * kLog2E;
  p.softcap = softcap_;
  // Bytes of Q and dO of a KV head. Few heads at a time, so that Q, dO and dQ stay in L2.
  const int64_t head_bytes =
      std::max<int64_t>(static_cast<int64_t>(shape.seqlen_q) * problem_.q_heads_per_kv_head() *
                            (entry.dim_qk + entry.dim_v) * 2,
                        1);
  const int64_t kv_heads = common.kv_heads();
  // The heads that fit in a quarter of L2; under masks in an eighth: 1 to 3 % at 1k. In order,
  // where KV tiles of a head wait for each other, up to five heads may fill half of L2: up to 5 %.
  int64_t fitting = l2_bytes_ / (problem_.mask == 0 || ordered() ? 4 : 8) / head_bytes;
  if (ordered()) fitting = std::max(fitting, std::min<int64_t>(5, l2_bytes_ / 2 / head_bytes));
  const int64_t key_tiles = ceil_div(shape.seqlen_kv, entry.tile_kv);
  const int32_t clusters = multiprocessors_ / entry.cluster_size;
  p.swizzle = L2Swizzle::of(kv_heads, key_tiles, fitting, L2Swizzle::even_end(clusters, key_tiles));
  p.q_swizzle =
      p.swizzle.with_tiles(static_cast<int64_t>(p.max_q_tiles) * problem_.q_heads_per_kv_head());
  const int32_t items = p.swizzle.count();
  // No stream-K if KV tiles differ in length (short ones even out the end), in order (partials
  // would wait for each other: -10 %), or with GQA (Q, dO and dQ at work exceed L2: -7 %).
  const bool even = problem_.mask == 0 && !varlen_q && !varlen_kv && !ordered() &&
                    problem_.q_heads_per_kv_head() == 1 && entry.partial_bytes > 0;
  p.stream_k = even ? StreamK::of(items, p.max_q_tiles, clusters, kPartialCost, kLeastSaved)
                    : StreamK::unsplit(items);
  // Early keys first, as they take longest under a causal mask; in order, late keys first, because
  // early ones wait for them.
  p.first_key = ordered() ? (p.swizzle.tiles - 1) * entry.tile_kv : 0;
  p.key_step = ordered() ? -entry.tile_kv : entry.tile_kv;

  WorkspaceAllocator workspace(base);
  const int64_t rows = common.head_tiles(entry.tile_q) * problem_.heads_q * entry.tile_q;
  common.work_counter = workspace.take<int32_t>(1);
  common.dq_work_counter = workspace.take<int32_t>(1);
  common.lse2 = workspace.take<float>(rows);
  common.delta = workspace.take<float>(rows);
  common.softmax_base = workspace.take<float>(rows);
  common.large_lse = workspace.take<uint64_t>(1);
  common.wide_scores = entry.score_mod != ScoreModKind::kPlain &&
                       entry.score_mod != ScoreModKind::kDropout &&
                       entry.score_mod != ScoreModKind::kBlockMask;
  common.dq = workspace.take<float>(rows * entry.dim_qk);
  common.dq_states = workspace.take<int32_t>(rows / entry.tile_q * entry.cluster_size);
  if (ordered()) common.dq_first = workspace.take<int32_t>(rows / entry.tile_q);
  take_q_tile_lists(entry, multiprocessors_, &p, &workspace);
  if (even) {
    // At least as many as any smaller shape needs.
    const int64_t steps = ceil_div(static_cast<int64_t>(items) * p.max_q_tiles, kPartialCost);
    const int64_t most = std::min<int64_t>(clusters, steps) * entry.cluster_size;
    common.arrived_count = static_cast<int32_t>(most * entry.consumers);
    p.partials = workspace.take<float>(2 * most * entry.partial_bytes / 4);
  }
  common.arrived_count += hopper_dbias_.counters();
  if (common.arrived_count > 0) common.arrived = workspace.take<int32_t>(common.arrived_count);
  PreprocessProgress* const progress = workspace.take<PreprocessProgress>(1);
  const bool early = starts_early(entry, args, p);
  if (early) p.preprocess = progress;
  // In order, or with an early start, no work item may be reserved for a CTA that has not started.
  p.static_work_items = ordered() || early ? 0 : std::min(p.stream_k.work_items, clusters);
  common.dout = rounded_dout(problem_, args, &workspace);
  *bytes = workspace.unaligned_bytes();
  return p;
}

int64_t BackwardKernels::workspace(const Shape& shape) const {
  BackwardArgs args{};
  args.shape = shape;
  // The maximum over all kernels: no shape may need less than a smaller one.
  int64_t most = 0;
  for (const Kernel* kernel : {&main_, &two_warpgroup_}) {
    int64_t bytes = 0;
    if (kernel->choice.entry) params(*kernel->choice.entry, args, nullptr, &bytes);
    most = std::max(most, bytes);
  }
  return most;
}

std::string BackwardKernels::describe(const Shape& shape,
                                      flashattn_plan_properties* properties) const {
  const Kernel& kernel = choose(shape);
  describe_kernel(kernel.choice, kernel.choice.entry->stages, kernel.name, "wgmma", properties);
  if (problem_.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    const bool adds =
        can_add_dbias(*kernel.choice.entry) && !ordered() && !hopper_dbias_.beats_adding();
    return adds ? "; the same kernel adds the gradient of the bias, unless lengths differ"
           : hopper_dbias_.counters() > 0
               ? "; a Hopper kernel sums the gradient of the bias in order, unless over queries"
               : "; a portable kernel computes the gradient of the bias";
  }
  BackwardArgs args{};
  args.shape = shape;
  int64_t bytes = 0;
  const BackwardParams p = params(*kernel.choice.entry, args, nullptr, &bytes);
  const bool early = starts_early(*kernel.choice.entry, args, p);
  return std::string(early ? ", started early" : "") +
         (ordered() ? "; CTAs add to dq in order, so that bits repeat"
                    : "; CTAs add to dq in any order");
}

BwdPreprocessParams BackwardKernels::preprocess_params(const BackwardParams& p) const {
  const Shape& shape = p.common.args.shape;
  BwdPreprocessParams preprocess{};
  preprocess.common = p.common;
  preprocess.max_q_tiles = p.max_q_tiles;
  preprocess.head_boxes =
      FastDivmod::of(static_cast<int32_t>(ceil_div(p.max_q_tiles * p.common.tile_q, kBoxRows)));
  preprocess.heads_q = FastDivmod::of(problem_.heads_q);
  preprocess.heads = shape.batch * problem_.heads_q;
  preprocess.first_heads = static_cast<int32_t>(first_heads(p.swizzle));
  preprocess.tail_ctas =
      std::clamp(multiprocessors_ / kMultiprocessorsPerTailCta, 1, kMaxPreprocessTailCtas);
  preprocess.progress = p.preprocess;
  preprocess.stamp = p.preprocess_stamp;
  return preprocess;
}

int32_t BackwardKernels::make_maps(const BackwardEntry& entry, BackwardParams* p,
                                   BwdPreprocessParams* preprocess) const {
  const BackwardArgs& args = p->common.args;
  const Shape& shape = args.shape;
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const int64_t q_rows = varlen_q ? shape.total_q : shape.seqlen_q;
  const int64_t q_batch = varlen_q ? 1 : shape.batch;
  const int64_t kv_rows = varlen_kv ? shape.total_kv : shape.seqlen_kv;
  const int64_t kv_batch = varlen_kv ? 1 : shape.batch;
  const int32_t tile_q = entry.tile_q, box_kv = entry.tile_kv / entry.cluster_size;
  const auto queries = [&](int32_t dim, int32_t rows) {
    return ArrayShape{dim, q_rows, problem_.heads_q, q_batch, rows};
  };
  const auto keys = [&](int32_t dim) {
    return ArrayShape{dim, kv_rows, problem_.heads_kv, kv_batch, box_kv};
  };
  const int32_t dim_qk = problem_.dim_qk, dim_v = problem_.dim_v;
  const struct {
    const flashattn_tensor& tensor;
    const char* name;
    CUtensorMap* map;
    ArrayShape shape;
  } table[] = {
      {args.inputs.q, "q", &p->q, queries(dim_qk, tile_q)},
      {p->common.dout, "dout", &p->dout, queries(dim_v, tile_q)},
      {args.inputs.k, "k", &p->k, keys(dim_qk)},
      {args.inputs.v, "v", &p->v, keys(dim_v)},
      {args.o, "o", &preprocess->o, queries(dim_v, kBoxRows)},
      {p->common.dout, "dout", &preprocess->dout, queries(dim_v, kBoxRows)},
  };
  if (entry.score_mod == ScoreModKind::kDenseBias) {
    constexpr int32_t kConsumerKeys = 64;
    if (const int32_t status =
            make_bias_map(problem_, args.inputs, shape, kConsumerKeys, &p->bias)) {
      return status;
    }
  }
  constexpr int kPreprocessMaps = 2;
  const auto* const end = std::end(table) - (p->preprocess ? 0 : kPreprocessMaps);
  for (const auto* row = table; row != end; ++row) {
    if (const int32_t status =
            make_tensor_map(row->tensor, problem_.dtype, row->shape, row->name, row->map)) {
      return status;
    }
  }
  return FLASHATTN_OK;
}

int32_t BackwardKernels::launch_preprocess(const BackwardEntry& entry, const BackwardParams& p,
                                           const BwdPreprocessParams& preprocess,
                                           cudaStream_t stream) const {
  cudaError_t error = launch_block_mask(p, stream);
  if (error == cudaSuccess && p.preprocess) {
    const BwdPreprocessKernel k = bwd_preprocess_kernel(problem_.dtype, problem_.dim_v);
    // In clusters, so that the multiprocessors that tail CTAs leave free are pairs, too.
    error = launch_pdl(k.kernel, dim3(static_cast<unsigned>(p.preprocess_ctas)), k.threads,
                       k.shared_bytes, preprocess, stream, entry.cluster_size);
  } else if (error == cudaSuccess) {
    error = launch_bwd_preprocess(p.common, multiprocessors_, stream);
  }
  return status_of(error, "launching the preprocessing of the backward pass");
}

int32_t BackwardKernels::launch(const BackwardArgs& args, void* workspace,
                                cudaStream_t stream) const {
  const BackwardEntry& entry = *choose(args.shape).choice.entry;
  int64_t bytes = 0;
  BackwardParams p = params(entry, args, static_cast<char*>(workspace), &bytes);
  p.common.large_lse_stamp = new_stamp();
  const int64_t query_tiles =
      static_cast<int64_t>(args.shape.batch) * problem_.heads_q * p.max_q_tiles;
  const int64_t workspace_tiles = p.common.head_tiles(entry.tile_q) * problem_.heads_q;
  const int64_t key_tiles = ceil_div(args.shape.seqlen_kv, entry.tile_kv) * p.common.kv_heads();
  if (const int64_t most = std::max({key_tiles, query_tiles, workspace_tiles});
      most > INT32_MAX / 2) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "batch",
                "batch = %d with %d heads, %d queries and %d keys makes %" PRId64
                " tiles, above 2^30; split the batch",
                args.shape.batch, problem_.heads_q, args.shape.seqlen_q, args.shape.seqlen_kv,
                most);
  }
  BwdPreprocessParams preprocess{};
  if (p.preprocess) {
    p.preprocess_stamp = new_stamp();
    p.preprocess_ctas = multiprocessors_ / entry.cluster_size * entry.cluster_size;
    p.common.stamp = &p.preprocess->stamp;
    preprocess = preprocess_params(p);
  }
  if (const int32_t status = make_maps(entry, &p, &preprocess)) return status;
  p.adds_dbias = adds_dbias(args);
  if (p.adds_dbias) {
    if (const int32_t status = status_of(launch_clear_dbias(p.common, multiprocessors_, stream),
                                         "clearing the gradient of the bias")) {
      return status;
    }
  }
  if (const int32_t status = launch_preprocess(entry, p, preprocess, stream)) return status;
  // Each kernel launches early, under the end of the previous one.
  const int64_t clusters =
      std::min<int64_t>(p.stream_k.work_items, multiprocessors_ / entry.cluster_size);
  const dim3 grid(static_cast<unsigned>(clusters * entry.cluster_size));
  if (const int32_t status =
          status_of(launch_pdl(entry.kernel, grid, entry.threads, entry.shared_bytes, p, stream,
                               entry.cluster_size),
                    "launching the backward kernel")) {
    return status;
  }
  const int64_t postprocess_ctas =
      int64_t{multiprocessors_} * (kPostprocessThreadsPerSm / entry.postprocess_threads);
  const dim3 postprocess_grid(static_cast<unsigned>(std::min(query_tiles, postprocess_ctas)));
  if (const int32_t status = status_of(launch_pdl(entry.postprocess, postprocess_grid,
                                                  entry.postprocess_threads, 0, p.common, stream),
                                       "launching the conversion of dq")) {
    return status;
  }
  const bool sums_dbias = !p.adds_dbias && hopper_dbias_.accepts(args);
  if (sums_dbias) {
    if (const int32_t status = hopper_dbias_.launch(p, stream)) return status;
  }
  if (p.adds_dbias || sums_dbias) p.common.args.dbias = nullptr;  // dbias_ need not make it
  return dbias_.launch_with_dsink(p.common, stream);
}

}  // namespace flashattn::cuda::sm90
