#include "cpu/launcher.h"

#include <algorithm>

#include "core/arrays.h"
#include "core/bump_allocator.h"
#include "core/error.h"
#include "core/os.h"
#include "cpu/device.h"
#include "cpu/forward_schedule.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {
namespace {

// The largest size in bytes of the packed KV tiles that Q blocks share.
constexpr int64_t kMaxSharedBytes = int64_t{128} << 20;

// "cpu_forward_bf16_avx2"; with a cache of another type "cpu_forward_bf16_f8_avx2".
std::string kernel_name(const char* op, const Problem& problem, const Kernels& kernels) {
  std::string name = std::string("cpu_") + op + "_" + dtype_label(problem.dtype) + "_";
  if (problem.dtype_kv != problem.dtype) name += std::string(dtype_label(problem.dtype_kv)) + "_";
  return name + kernels.isa;
}

// Seed and offset of dropout: the caller's, plus those in device memory.
struct DropoutSeed {
  uint64_t seed, offset;
};

DropoutSeed dropout_seed(const Inputs& in) {
  const uint64_t* device = in.rng_device;
  return {in.rng_seed + (device ? device[0] : 0), in.rng_offset + (device ? device[1] : 0)};
}

}  // namespace

struct CpuLauncher::ForwardWorkspace {
  SeqlenInfo* sequences;
  float *partial_o, *partial_m, *partial_l;
  SharedKvTiles shared;
  char* scratch;
  int64_t bytes;
};

struct CpuLauncher::BackwardWorkspace {
  SeqlenInfo* sequences;
  float *lse_log2, *softmax_base, *delta, *dq;
  int32_t* dq_semaphore;
  char* scratch;
  int64_t bytes;
};

CpuLauncher::CpuLauncher(const Problem& problem)
    : problem_(problem),
      kernels_(machine_kernels()),
      threads_(
          std::min(problem.threads > 0 ? problem.threads : os::usable_processors(), kMaxThreads)),
      forward_tiling_(kernels_.forward_tiling(problem)),
      backward_tiling_(kernels_.backward_tiling(problem)),
      split_(SplitRule::of(problem.splits, kSplitKeys,
                           problem.splits > 0 ? INT32_MAX : kSplitQueries,
                           forward_tiling_.tile_kv)),
      forward_scratch_(kernels_.forward_scratch(problem, forward_tiling_)),
      backward_scratch_(kernels_.backward_scratch(problem, backward_tiling_)),
      shared_tile_bytes_(kernels_.shared_tile_bytes(problem, forward_tiling_)),
      forward_name_(kernel_name("forward", problem, kernels_)),
      backward_name_(kernel_name("backward", problem, kernels_)),
      why_(std::string("the only backend for CPUs; ") + machine_kernels_reason() +
           (problem.has_8bit() ? "; 8-bit numbers are widened" : "")) {
  if (problem.workspace_limit == 0 || shared_tile_bytes_ == 0) return;
  if (workspace(FLASHATTN_OP_FORWARD, maxima_of(problem)) <= problem.workspace_limit) return;
  shared_tile_bytes_ = 0;
  why_ +=
      "; each thread packs keys and values for itself, for workspace_limit has no room for "
      "packed tiles that all share";
}

// The largest numbers of queries (q) and of splits (kv) that a split sequence of this shape can
// have.
static Lengths split_bound(const SplitRule& rule, const Shape& shape) {
  return {std::min(shape.seqlen_q, rule.max_queries),
          max_split_count(rule, {shape.seqlen_q, shape.seqlen_kv})};
}

CpuLauncher::ForwardWorkspace CpuLauncher::forward_workspace(const Shape& shape, char* base) const {
  ForwardWorkspace w{};
  BumpAllocator memory(base);
  w.sequences = memory.take<SeqlenInfo>(shape.batch);
  const Lengths split = split_bound(split_, shape);
  if (split.kv > 1) {
    const int64_t rows = static_cast<int64_t>(split.kv) * shape.batch * problem_.heads_q * split.q;
    w.partial_o = memory.take<float>(rows * problem_.dim_v);
    w.partial_m = memory.take<float>(rows);
    w.partial_l = memory.take<float>(rows);
  }
  // Tiles are shared only if a KV head has more than one Q block.
  if (shared_tile_bytes_ > 0 &&
      int64_t{shape.seqlen_q} * problem_.q_heads_per_kv_head() > min_block_rows(forward_tiling_)) {
    const int64_t tiles =
        problem_.heads_kv * HeadTiles::of_keys(problem_, shape, forward_tiling_.tile_kv).count();
    w.shared.tile_bytes = shared_tile_bytes_;
    w.shared.count = std::min(tiles, kMaxSharedBytes / shared_tile_bytes_);
    w.shared.states = memory.take<int32_t>(w.shared.count);
    w.shared.tiles = memory.take<char>(w.shared.count * shared_tile_bytes_);
  }
  w.scratch = memory.take<char>(forward_scratch_ * threads_);
  w.bytes = memory.unaligned_bytes();
  return w;
}

CpuLauncher::BackwardWorkspace CpuLauncher::backward_workspace(const Shape& shape,
                                                               char* base) const {
  BackwardWorkspace w{};
  BumpAllocator memory(base);
  w.sequences = memory.take<SeqlenInfo>(shape.batch);
  const int32_t tile_q = backward_tiling_.tile_q;
  const int64_t tiles = problem_.heads_q * HeadTiles::of_queries(problem_, shape, tile_q).count();
  w.lse_log2 = memory.take<float>(tiles * tile_q);
  w.softmax_base = memory.take<float>(tiles * tile_q);
  w.delta = memory.take<float>(tiles * tile_q);
  w.dq = memory.take<float>(tiles * tile_q * kernels_.dq_columns(problem_));
  w.dq_semaphore = memory.take<int32_t>(tiles);
  w.scratch = memory.take<char>(backward_scratch_ * threads_);
  w.bytes = memory.unaligned_bytes();
  return w;
}

int64_t CpuLauncher::workspace(uint32_t op, const Shape& shape) const {
  return op == FLASHATTN_OP_FORWARD ? forward_workspace(shape, nullptr).bytes
                                    : backward_workspace(shape, nullptr).bytes;
}

void CpuLauncher::describe(uint32_t op, const Shape& shape,
                           flashattn_plan_properties* properties) const {
  const bool forward = op == FLASHATTN_OP_FORWARD;
  const Tiling& tiling = forward ? forward_tiling_ : backward_tiling_;
  properties->tile_q = tiling.tile_q;
  properties->tile_kv =
      forward ? tiling.tile_kv : backward_tile_kv(tiling, problem_, shape.seqlen_kv);
  properties->stages = 1;
  properties->threads = threads_;
  properties->scratch = static_cast<int32_t>(forward ? forward_scratch_ : backward_scratch_);
  properties->splits = forward ? split_count(split_, {shape.seqlen_q, shape.seqlen_kv}) : 1;
  properties->kernel = forward ? forward_name_.c_str() : backward_name_.c_str();
  properties->isa = kernels_.isa;
  properties->why = why_.c_str();
}

Threads threads_for(int32_t threads, double multiply_adds, const Executor& on) {
  return {multiply_adds < 250e3 ? 1 : threads, multiply_adds >= 1e6,
          on.parallel.run ? &on.parallel : nullptr};
}

// The most multiply-adds of a forward pass.
static double forward_work(const Problem& problem, const Shape& shape) {
  return static_cast<double>(shape.batch) * problem.heads_q * shape.seqlen_q * shape.seqlen_kv *
         (problem.dim_qk + problem.dim_v);
}

int32_t CpuLauncher::clear_amax(const ForwardArgs& args, const Executor&) const {
  for (int32_t b = 0; args.amax_o.data && b < args.shape.batch; ++b) {
    for (int32_t h = 0; h < problem_.heads_q; ++h) *head_entry(args.amax_o, b, h) = 0;
  }
  return FLASHATTN_OK;
}

int32_t CpuLauncher::forward(const ForwardArgs& args, void* workspace, const Executor& on) const {
  const Shape& shape = args.shape;
  const ForwardWorkspace w = forward_workspace(shape, static_cast<char*>(workspace));
  const DropoutSeed random = dropout_seed(args.inputs);
  resolve_seqlens(problem_, shape, args.inputs, w.sequences);
  ForwardJob both{};
  both.problem = &problem_;
  both.args = &args;
  both.sequences = w.sequences;
  both.tiling = forward_tiling_;
  both.split_rule = split_;
  both.kv_heads = both.splits = 1;
  both.partial_queries = split_bound(split_, shape).q;
  both.partial_o = w.partial_o;
  both.partial_m = w.partial_m;
  both.partial_l = w.partial_l;
  both.rng_seed = random.seed;
  both.rng_offset = random.offset;
  const Threads threads = threads_for(threads_, forward_work(problem_, shape), on);
  both.threads = threads.max;
  ForwardJob packing = both, direct = both;
  direct.direct = true;
  for (int32_t b = 0; b < shape.batch; ++b) {
    const Lengths len = both.sequences[b].len;
    ForwardJob& job = is_direct(problem_, len) ? direct : packing;
    job.seqlen_q = std::max(job.seqlen_q, len.q);
    job.splits = std::max(job.splits, split_count(split_, len));
  }
  clear_amax(args, on);
  for (ForwardJob* job : {&packing, &direct}) {
    if (job->seqlen_q > 0) choose_q_blocks(shared_tile_bytes_ > 0, job);
  }
  if (packing.tasks() > packing.key_ranges() && w.shared.count > 0) {
    packing.shared = w.shared;
    std::fill_n(w.shared.states, w.shared.count, kTileEmpty);
  }
  for (int32_t n = 0; n < threads.max; ++n) {
    char* scratch = w.scratch + n * forward_scratch_;
    *BumpAllocator(scratch).take<KeptKvTile>(1) = {};
  }
  // The tasks of sequences that pack take longer and begin first.
  const int64_t packed = packing.tasks(), count = packed + direct.tasks();
  parallel_tasks(threads, count, (packed > 0 ? packing : direct).tasks_per_q_block(),
                 [&](int64_t task, int32_t thread) {
                   char* scratch = w.scratch + thread * forward_scratch_;
                   if (task < packed) return kernels_.forward(packing, task, scratch);
                   kernels_.forward(direct, task - packed, scratch);
                 });
  both.splits = std::max(packing.splits, direct.splits);
  if (both.splits > 1) merge_splits(both, on);
  return FLASHATTN_OK;
}

void CpuLauncher::merge_splits(const ForwardJob& job, const Executor& on) const {
  const ForwardArgs& args = *job.args;
  const int64_t rows = static_cast<int64_t>(args.shape.batch) * problem_.heads_q;
  const int32_t size = dtype_size(problem_.dtype_o);
  const double elements =
      static_cast<double>(rows * job.partial_queries) * job.splits * problem_.dim_v;
  parallel_tasks(threads_for(threads_, elements, on), rows, 1, [&](int64_t task, int32_t) {
    const int32_t b = static_cast<int32_t>(task / problem_.heads_q);
    const int32_t h = static_cast<int32_t>(task % problem_.heads_q);
    const SeqlenInfo sequence = job.sequences[b];
    const int32_t splits = split_count(split_, sequence.len);
    if (splits <= 1) return;
    const int64_t stride = job.partial_row(1, 0, 0, 0);
    const MergeJob merge{splits,
                         problem_.dim_v,
                         FLASHATTN_DTYPE_F32,
                         problem_.dtype_o,
                         nullptr,
                         nullptr,
                         stride * problem_.dim_v,
                         stride,
                         0,
                         0};
    const RowLayout layout = row_layout(problem_, args.shape);
    const ScoreUnit unit = score_mod(problem_, args.inputs, b, h, sequence.len).unit();
    for (int32_t i = 0; i < sequence.len.q; ++i) {
      const int64_t token = sequence.offset_q + i, row = job.partial_row(0, b, h, i);
      char* o =
          static_cast<char*>(args.o.data) +
          (b * args.o.stride_batch + h * args.o.stride_head + token * args.o.stride_seq) * size;
      const float lse = kernels_.merge_row(
          merge, {b, h, token, 0, job.partial_o + row * problem_.dim_v, job.partial_m + row,
                  job.partial_l + row, unit, sink_of(problem_, args.inputs, h), o,
                  args.scale_o.data ? *head_entry(args.scale_o, b, h) : 1.0f,
                  args.amax_o.data ? head_entry(args.amax_o, b, h) : nullptr});
      if (args.lse) args.lse[b * layout.batch_stride + h * layout.head_stride + token] = lse;
    }
  });
}

int32_t CpuLauncher::backward(const BackwardArgs& args, void* workspace, const Executor& on) const {
  const Shape& shape = args.shape;
  const BackwardWorkspace w = backward_workspace(shape, static_cast<char*>(workspace));
  const DropoutSeed random = dropout_seed(args.inputs);
  const auto tiles = [](int32_t length, int32_t tile) {
    return static_cast<int32_t>(ceil_div(length, tile));
  };
  BackwardJob job{};
  job.problem = &problem_;
  job.args = &args;
  job.sequences = w.sequences;
  job.tiling = backward_tiling_;
  job.q_tiles = tiles(shape.seqlen_q, backward_tiling_.tile_q);
  job.kv_tiles = backward_kv_tiles(backward_tiling_, problem_, shape.seqlen_kv);
  const Threads threads = threads_for(threads_, 2.5 * forward_work(problem_, shape), on);
  job.threads = threads.max;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_kv;
  if (heads * job.kv_tiles > INT32_MAX) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "batch",
                "batch = %d with heads_kv = %d and %d tiles of keys a head makes 2^31 tiles or "
                "more; split the batch",
                shape.batch, problem_.heads_kv, job.kv_tiles);
  }
  resolve_seqlens(problem_, shape, args.inputs, w.sequences);
  // As many heads at a time as there are threads, at the end too.
  job.order = L2Swizzle::of(heads, job.kv_tiles, job.threads, job.threads);
  job.rng_seed = random.seed;
  job.rng_offset = random.offset;
  // Elements of dbias may also have no score: that pass writes 0 to them.
  const Lengths first = job.sequences[0].len;
  const bool whole = shape.batch == 1 && first.q == shape.seqlen_q && first.kv == shape.seqlen_kv;
  const bool each_row =
      shape.seqlen_q == 1 && !args.inputs.lens_q && !problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  job.dbias_is_reduced = (args.dbias_stride_batch == 0 && !whole) ||
                         (args.dbias_stride_head == 0 && problem_.heads_q > 1) ||
                         (args.dbias_stride_row == 0 && !each_row);
  job.lse_log2 = w.lse_log2;
  job.softmax_base = w.softmax_base;
  job.delta = w.delta;
  job.dq = w.dq;
  job.dq_semaphore = w.dq_semaphore;
  const auto run = [&](int64_t count, void (*kernel)(const BackwardJob&, int64_t, char*)) {
    parallel_tasks(threads, count, 1, [&](int64_t task, int32_t thread) {
      kernel(job, task, w.scratch + thread * backward_scratch_);
    });
  };
  const int64_t batch = shape.batch;
  run(batch * problem_.heads_q * job.q_tiles, kernels_.backward_prepare);
  run(job.order.count(), kernels_.backward);
  if (args.dbias && job.dbias_is_reduced) {
    run((args.dbias_stride_batch ? batch : 1) * (args.dbias_stride_head ? problem_.heads_q : 1) *
            job.kv_tiles,
        kernels_.backward_dbias);
  }
  if (args.dsink) run(problem_.heads_q, kernels_.backward_dsink);
  return FLASHATTN_OK;
}

int32_t CpuLauncher::merge(const MergeArgs& args, const Executor& on) const {
  const bool varlen = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const int64_t tokens = varlen ? args.shape.total_q : args.shape.seqlen_q;
  const int32_t batch = varlen ? 1 : args.shape.batch;
  const int32_t size = dtype_size(problem_.dtype_o);
  const MergeJob job{args.parts,
                     problem_.dim_v,
                     args.dtype_part,
                     problem_.dtype_o,
                     args.part_o,
                     args.part_lse,
                     0,
                     0,
                     problem_.heads_q,
                     tokens};
  const int64_t rows = static_cast<int64_t>(batch) * problem_.heads_q;
  const double elements = static_cast<double>(rows * tokens) * args.parts * problem_.dim_v;
  parallel_tasks(
      threads_for(threads_, kElementCost * elements, on), rows, 1, [&](int64_t task, int32_t) {
        const int32_t b = static_cast<int32_t>(task / problem_.heads_q);
        const int32_t h = static_cast<int32_t>(task % problem_.heads_q);
        for (int64_t i = 0; i < tokens; ++i) {
          const int64_t row = task * tokens + i;
          char* o =
              static_cast<char*>(args.o.data) +
              (b * args.o.stride_batch + h * args.o.stride_head + i * args.o.stride_seq) * size;
          const float lse = kernels_.merge_row(
              job, {b, h, i, row, nullptr, nullptr, nullptr, {kLog2E, 1.0}, -__builtin_inff(), o});
          if (args.lse) args.lse[row] = lse;
        }
      });
  return FLASHATTN_OK;
}

int32_t CpuLauncher::dropout_mask(const ForwardArgs& args, uint8_t* keep,
                                  const Executor& on) const {
  const DropoutSeed random = dropout_seed(args.inputs);
  const int64_t keys = args.shape.seqlen_kv, queries = args.shape.seqlen_q;
  const int64_t heads = static_cast<int64_t>(args.shape.batch) * problem_.heads_q;
  const double numbers = static_cast<double>(heads) * queries * keys;
  parallel_tasks(
      threads_for(threads_, kElementCost * numbers, on), heads, 1, [&](int64_t head, int32_t) {
        for (int64_t i = 0; i < queries; ++i) {
          kernels_.dropout_row(random.seed, random.offset, problem_.dropout_threshold(),
                               static_cast<uint32_t>(head), static_cast<int32_t>(i),
                               static_cast<int32_t>(keys), keep + (head * queries + i) * keys);
        }
      });
  return FLASHATTN_OK;
}

}  // namespace flashattn::cpu
