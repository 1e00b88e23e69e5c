// Hopper forward row for a cache of E4M3: copies of K and V in 16 bits, then the row that computes
// with those.
#include "cuda/host/sm90_fp8_cache.h"

#include <algorithm>

#include "core/arrays.h"
#include "core/select.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/fp8_convert.h"

namespace flashattn::cuda::sm90 {
namespace {

// Larger copies leave the call to the decode kernels: keys are bounded by the longest sequence, so
// that many sequences would ask for more memory than most caches have.
constexpr int64_t kMostCopyBytes = int64_t{4} << 30;

// The copies lie as (batch, seqlen_kv, heads_kv, dim) also where the cache is paged.
Problem with_copies(const Problem& problem) {
  Problem p = problem;
  p.dtype_kv = p.dtype;
  p.descale_block = p.page_size = 0;
  p.layout &= ~static_cast<uint32_t>(FLASHATTN_LAYOUT_PAGED_KV);
  return p;
}

}  // namespace

bool Fp8CacheRow::supports_problem(const Problem& problem, const char** why_not) {
  const bool is_cache = problem.dtype_kv != problem.dtype;
  *why_not = is_cache ? "o has the other type of 16 bits than q" : "";
  return is_cache && (problem.dtype_o == problem.dtype || problem.dtype_o == FLASHATTN_DTYPE_F32);
}

Fp8CacheRow::Fp8CacheRow(const Problem& problem, const Device& device)
    : problem_(problem), in_16_bits_(with_copies(problem)), forced_(forced_backend() != nullptr) {
  throw_on(preload_convert(), "cudaFuncGetAttributes");
  rows_.make(forward_registry(), "sm90", "", in_16_bits_, device);
}

bool Fp8CacheRow::pays(int64_t queries) const {
  // On an H200 converting a key takes as long as the E4M3 kernels take for some 100 rows of its KV
  // head; a Hopper tile of 64 queries of a head as long as they take for 16.
  constexpr int64_t kConversionRows = 100, kTileQ = 64, kTileRows = 16;
  const int64_t group = problem_.q_heads_per_kv_head();
  return queries * group > kConversionRows + ceil_div(queries, kTileQ) * group * kTileRows;
}

bool Fp8CacheRow::supports(const Shape& shape, const char** why_not) const {
  const bool serves = forced_ || pays(shape.seqlen_q);
  *why_not = serves ? "copies of K and V in 16 bits would take more than 4 GiB"
                    : "copies of K and V in 16 bits do not pay for few queries";
  return serves && copies(shape, nullptr).bytes <= kMostCopyBytes;
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
  // Also of smaller shapes, whose copies may be small enough.
  if (!forced_ && !pays(shape.seqlen_q)) return 0;
  return std::min(copies(shape, nullptr).bytes, kMostCopyBytes) + rows_.workspace(shape);
}

std::string Fp8CacheRow::describe(const Shape& shape, flashattn_plan_properties* properties) const {
  return " on copies of K and V in " + std::string(dtype_label(problem_.dtype)) +
         " in the workspace: " + rows_.why(shape, properties);
}

int32_t Fp8CacheRow::launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const {
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
