// Hopper forward row for a cache of E4M3: copies of K and V in 16 bits, then the row that computes
// with those.
#include "cuda/host/sm90_fp8_cache.h"

#include <algorithm>

#include "core/arrays.h"
#include "core/select.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/sm90_packed.h"
#include "cuda/host/sm90_fp8_convert.h"

namespace flashattn::cuda::sm90 {
namespace {

// The most memory that the copies take. Each sequence's copy has room for the longest sequence, so
// that copies of many sequences at once would take more memory than most caches.
constexpr int64_t kMostCopyBytes = int64_t{4} << 30;
constexpr int32_t kMostRounds = 64;  // with more, launch overhead would exceed the computation

// The copies lie as (batch, seqlen_kv, heads_kv, dim) also where the cache is paged.
Problem with_copies(const Problem& problem) {
  Problem p = problem;
  p.dtype_kv = p.dtype;
  p.descale_block = p.page_size = 0;
  p.layout &= ~static_cast<uint32_t>(FLASHATTN_LAYOUT_PAGED_KV);
  return p;
}

void advance(flashattn_tensor* tensor, int64_t first, int32_t element) {
  if (tensor->data) {
    tensor->data = static_cast<char*>(tensor->data) + first * tensor->stride_batch * element;
  }
}

template <class T>
void advance(const T** array, int64_t elements) {
  if (*array) *array += elements;
}

// The arguments for `count` of the call's sequences, from `first` on. K and V are not packed.
ForwardArgs sequences(const Problem& problem, ForwardArgs args, int64_t first, int32_t count) {
  Inputs& in = args.inputs;
  args.shape.batch = count;
  if (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)) {
    advance(&in.cu_seqlens_q, first);
  } else {
    advance(&in.q, first, dtype_size(problem.dtype));
    advance(&args.o, first, dtype_size(problem.dtype_o));
    if (args.lse) args.lse += first * problem.heads_q * args.shape.seqlen_q;
  }
  if (problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) {
    advance(&in.page_table, first * in.page_table_stride);
  } else {
    advance(&in.k, first, dtype_size(problem.dtype_kv));
    advance(&in.v, first, dtype_size(problem.dtype_kv));
  }
  advance(&in.descale_k, first, sizeof(float));
  advance(&in.descale_v, first, sizeof(float));
  for (const int32_t** lengths : {&in.lens_q, &in.lens_kv, &in.starts_kv}) advance(lengths, first);
  if (in.bias) {
    in.bias = static_cast<const char*>(in.bias) +
              first * in.bias_stride_batch * dtype_size(problem.dtype_bias);
  }
  advance(&in.alibi_slopes, first * in.alibi_stride_batch);
  advance(&in.block_mask, first * in.block_mask_stride_batch);
  advance(&args.tree_bits, first, sizeof(uint32_t));
  return args;
}

bool packs_heads(const Problem& problem) {
  const char* why_not = nullptr;
  return PackedForwardKernels::supports_problem(problem, &why_not);
}

}  // namespace

bool Fp8CacheRow::supports_problem(const Problem& problem, const char** why_not) {
  const bool is_cache = problem.dtype_kv != problem.dtype;
  *why_not = is_cache ? "o has the other type of 16 bits than q" : "";
  return is_cache && (problem.dtype_o == problem.dtype || problem.dtype_o == FLASHATTN_DTYPE_F32);
}

Fp8CacheRow::Fp8CacheRow(const Problem& problem, const Device& device)
    : problem_(problem),
      in_16_bits_(with_copies(problem)),
      forced_(forced_backend() != nullptr),
      packs_heads_(packs_heads(in_16_bits_)) {
  throw_on(preload_convert(), "cudaFuncGetAttributes");
  rows_.make(forward_registry(), "sm90", "", in_16_bits_, device);
  most_bytes_ = kMostCopyBytes;
  if (problem.workspace_limit > 0) {
    const int64_t left = problem.workspace_limit - rows_.workspace(maxima_of(problem));
    most_bytes_ = std::max<int64_t>(std::min(left, kMostCopyBytes), 0);
  }
}

int32_t Fp8CacheRow::sequences_at_once(const Shape& shape) const {
  if (copies(shape, nullptr).bytes <= most_bytes_) return shape.batch;
  // Where a sequence's packed keys begin, only the device knows; dropout depends on the index of a
  // sequence.
  if (problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV) || problem_.dropout_threshold() != 0)
    return 0;
  Shape some = shape;
  some.batch = 1;
  const int64_t one = copies(some, nullptr).bytes;
  some.batch = static_cast<int32_t>(std::min<int64_t>(most_bytes_ / one, shape.batch));
  while (some.batch > 0 && copies(some, nullptr).bytes > most_bytes_) --some.batch;  // alignment
  return int64_t{some.batch} * kMostRounds < shape.batch ? 0 : some.batch;
}

bool Fp8CacheRow::pays(int64_t queries) const {
  // Measured on an H200: converting a key takes as long as the E4M3 kernels take for some 100 rows
  // of its KV head. Where heads are not packed, a Hopper tile of 64 queries of a head takes as long
  // as 16 such rows.
  constexpr int64_t kConversionRows = 100, kTileQ = 64, kTileRows = 16;
  const int64_t group = problem_.q_heads_per_kv_head();
  const int64_t tiles = packs_heads_ ? 0 : ceil_div(queries, kTileQ) * group;
  return queries * group > kConversionRows + tiles * kTileRows;
}

bool Fp8CacheRow::supports(const Shape& shape, const char** why_not) const {
  const bool serves = forced_ || pays(shape.seqlen_q);
  *why_not = serves ? "copies of K and V in 16 bits would take more than 4 GiB or workspace_limit"
                    : "copies of K and V in 16 bits do not pay for few queries";
  return serves && (sequences_at_once(shape) > 0 || shape.batch == 0);
}

RowCost Fp8CacheRow::cost(const Shape& shape) const {
  const bool packed = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) && shape.batch > 0;
  if (packed && !pays(shape.total_q / shape.batch)) {
    return {2.0, "copies of K and V in 16 bits do not pay for few queries a sequence"};
  }
  return {0.5, nullptr};
}

Fp8CacheRow::Copies Fp8CacheRow::copies(const Shape& shape, void* base) const {
  WorkspaceAllocator memory(base);
  const Rows rows = key_rows(in_16_bits_, shape, 0);
  const auto take = [&](int32_t dim) {
    void* const data = memory.take<uint16_t>(rows.batch * rows.tokens * problem_.heads_kv * dim);
    return resolve_strides({data, -1, -1, -1}, rows, problem_.heads_kv, dim);
  };
  Copies made{};
  made.k = take(problem_.dim_qk);
  made.v = take(problem_.dim_v);
  made.bytes = memory.unaligned_bytes();
  return made;
}

int64_t Fp8CacheRow::workspace(const Shape& shape) const {
  // If not all copies fit in most_bytes_, sequences are computed in rounds, or only smaller shapes
  // run on this row.
  if (!forced_ && !pays(shape.seqlen_q)) return 0;
  return std::min(copies(shape, nullptr).bytes, most_bytes_) + rows_.workspace(shape);
}

std::string Fp8CacheRow::describe(const Shape& shape, flashattn_plan_properties* properties) const {
  Shape some = shape;
  some.batch = sequences_at_once(shape);
  const std::string rounds =
      some.batch < shape.batch ? ", of " + std::to_string(some.batch) + " sequences at a time" : "";
  return " on copies of K and V in " + std::string(dtype_label(problem_.dtype)) +
         " in the workspace" + rounds + ": " + rows_.why(some, properties);
}

int32_t Fp8CacheRow::launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const {
  const int32_t batch = args.shape.batch, step = sequences_at_once(args.shape);
  if (step == batch) return launch_sequences(args, workspace, stream);
  for (int64_t first = 0; first < batch; first += step) {
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(step, batch - first));
    const int32_t status =
        launch_sequences(sequences(problem_, args, first, count), workspace, stream);
    if (status != FLASHATTN_OK) return status;
  }
  return FLASHATTN_OK;
}

int32_t Fp8CacheRow::launch_sequences(const ForwardArgs& args, void* workspace,
                                      cudaStream_t stream) const {
  const Copies made = copies(args.shape, workspace);
  const Inputs& in = args.inputs;
  ConvertParams p{};
  p.problem = problem_;
  p.shape = args.shape;
  p.inputs = in;
  p.visible_only = true;
  p.operands[1] = {in.k, made.k, in.descale_k, problem_.dtype_kv, problem_.dtype};
  p.operands[2] = {in.v, made.v, in.descale_v, problem_.dtype_kv, problem_.dtype};
  if (const int32_t status =
          status_of(launch_convert(p, stream), "launching the conversion of K and V")) {
    return status;
  }
  ForwardArgs inner = args;
  inner.inputs.k = made.k;
  inner.inputs.v = made.v;
  inner.inputs.descale_k = inner.inputs.descale_v = {};
  inner.inputs.page_table = nullptr;
  inner.inputs.page_table_stride = inner.inputs.pages = 0;
  char* const rest = static_cast<char*>(workspace) + made.bytes;
  return rows_.choose(args.shape, &inner).launch(inner, rest, stream);
}

}  // namespace flashattn::cuda::sm90
