// Hopper forward rows for E4M3: V^T to the workspace, or V as it is; launch.
#include "cuda/host/sm90_fp8.h"

#include <algorithm>

#include "core/error.h"
#include "core/score_mod.h"
#include "cuda/host/sm90_fwd.h"

namespace flashattn::cuda::sm90 {
namespace {

ScoreModKind score_mod_of(const Problem& p) {
  if (p.descale_block != 0) {
    const bool in_halves = p.descale_block % (kFp8TileKv / 2) == 0;
    return modifications(p) == 0 && in_halves ? ScoreModKind::kBlockDescales
                                              : ScoreModKind::kRuntime;
  }
  switch (modifications(p)) {
    case 0: return ScoreModKind::kPlain;
    case kModSoftcap: return ScoreModKind::kSoftcap;
    case kModAlibi: return ScoreModKind::kAlibi;
    default: return ScoreModKind::kRuntime;
  }
}

// A wider V is computed so many columns at a time where modifications are chosen at run time.
constexpr int32_t kRuntimeColumns = 128;

// The kernel for the smallest head that fits; NULL: none fits. With dtype_o F32 and F8E4M3 it is
// the BF16 kernel: the epilogue converts.
const ForwardEntry* find(const Problem& p, bool transposes_v, ScoreModKind kind) {
  const int32_t dtype =
      p.dtype_o == FLASHATTN_DTYPE_F16 ? FLASHATTN_DTYPE_F16 : FLASHATTN_DTYPE_BF16;
  const ForwardEntry* best = nullptr;
  for (const ForwardEntry* e : fp8_forward_table()) {
    const bool splits_v = e->score_mod == ScoreModKind::kRuntime && e->dim_v == kRuntimeColumns;
    if (e->dtype == dtype && e->score_mod == kind && e->transposes_v == transposes_v &&
        e->dim_qk >= p.dim_qk && (e->dim_v >= p.dim_v || splits_v) &&
        (!best || e->dim_qk < best->dim_qk)) {
      best = e;
    }
  }
  return best;
}
const ForwardEntry* find(const Problem& p, bool transposes_v) {
  const ForwardEntry* const own = find(p, transposes_v, score_mod_of(p));
  return own ? own : find(p, transposes_v, ScoreModKind::kRuntime);
}

// The most Q tiles that may read a tile of V, if each of them is to transpose it. Measured on an
// H200, 16k tokens, heads times dim 2048: transposing V before costs 20 us; in the kernel 2 % at
// D = 64 and 12 % at 256. At D = 128, 12 instead of 24 gains 0 to 1.3 %.
int32_t most_reading_tiles(const ForwardEntry& entry) {
  return entry.dim_v > 128 ? 8 : entry.dim_v > 64 ? 12 : 24;
}

}  // namespace

bool takes_fp8(const Problem& problem) { return find(problem, false) || find(problem, true); }

template <bool kTransposesV>
bool Fp8ForwardKernels::supports_problem(const Problem& problem, const char** why_not) {
  *why_not = "";  // the other row does
  return find(problem, kTransposesV) != nullptr;
}
template bool Fp8ForwardKernels::supports_problem<false>(const Problem&, const char**);
template bool Fp8ForwardKernels::supports_problem<true>(const Problem&, const char**);

Fp8ForwardKernels::Fp8ForwardKernels(const Problem& problem, const Device& device,
                                     bool transposes_v)
    : problem_(problem),
      l2_bytes_(usable_l2_bytes(device.index)),
      kernel_(make_ready(*find(problem, transposes_v), device.properties.multiprocessors)),
      transpose_v_(transpose_v_kernel(kernel_.entry->dim_v, has_block_descales())),
      name_(std::string("sm90_forward_f8_") + std::to_string(kernel_.entry->dim_qk) + "_" +
            std::to_string(kernel_.entry->dim_v) + "_q" + std::to_string(kernel_.entry->tile_q) +
            "_kv" + std::to_string(kernel_.entry->tile_kv) +
            kScoreModNames[static_cast<int32_t>(kernel_.entry->score_mod)] +
            (transposes_v ? "_transposes_v" : "")),
      softcap_(softcap_of_fp8(problem)),
      stream_k_(problem, device) {
  make_ready(reinterpret_cast<const void*>(transpose_v_.kernel), transpose_v_.threads, 0,
             device.properties.multiprocessors);
  stream_k_.keep_within_limit(workspace(maxima_of(problem)));
}

const char* Fp8ForwardKernels::title() const {
  return kernel_.entry->transposes_v ? "Hopper kernels for E4M3 that transpose V"
                                     : "Hopper kernels for E4M3";
}

RowCost Fp8ForwardKernels::cost(const Shape& shape) const {
  const ForwardEntry& entry = *kernel_.entry;
  const Interval queries =
      visible_queries(problem_.mask_rule(), shape.seqlen_kv / 2, {shape.seqlen_q, shape.seqlen_kv});
  const int64_t readers = ceil_div(std::max(queries.end - queries.begin, 0), entry.tile_q) *
                          problem_.q_heads_per_kv_head();
  if (entry.transposes_v == (readers <= most_reading_tiles(entry))) return {1.0, nullptr};
  return {2.0, entry.transposes_v ? "many tiles of queries read each of V"
                                  : "few tiles of queries read each of V"};
}

Fp8ForwardKernels::Arrays Fp8ForwardKernels::arrays(const Shape& shape,
                                                    WorkspaceAllocator* memory) const {
  const ForwardEntry& entry = *kernel_.entry;
  const int64_t tiles = HeadTiles::of_keys(problem_, shape, kFp8TileKv).count() * problem_.heads_kv;
  const int64_t heads = int64_t{shape.batch} * problem_.heads_kv;
  Arrays all{};
  all.counter = memory->take<TileCounter>(1);
  all.v_transposed =
      memory->take<uint8_t>(entry.transposes_v ? 0 : tiles * kFp8TileKv * entry.dim_v);
  if (has_block_descales()) {
    all.half_descales = memory->take<HalfDescales>(2 * tiles);
    all.largest_descale_v = memory->take<float>(heads);
  }
  all.partial_o = memory->take<float>(stream_k_.partial_floats(entry, shape));
  return all;
}

int64_t Fp8ForwardKernels::workspace(const Shape& shape) const {
  WorkspaceAllocator memory(nullptr);
  arrays(shape, &memory);
  return memory.unaligned_bytes();
}

std::string Fp8ForwardKernels::describe(const Shape& shape,
                                        flashattn_plan_properties* properties) const {
  describe_kernel(kernel_, kernel_.entry->stages, name_, "wgmma", properties);
  std::string text =
      "; products of E4M3, P V added in fp32 every 1 to 4 tiles of keys; queries fill their tiles";
  if (problem_.dim_v > kernel_.entry->dim_v) {
    text += ", for " + std::to_string(kernel_.entry->dim_v) + " columns of V at a time";
  }
  if (kernel_.entry->dim_v == 64 && problem_.has_mask(FLASHATTN_MASK_CAUSAL)) {
    text += ", hardly faster than in 16 bits";
  }
  return text + stream_k_.describe(*kernel_.entry, shape);
}

int32_t Fp8ForwardKernels::transpose_v(const Problem& problem, const ForwardArgs& args,
                                       const Arrays& to, cudaStream_t stream) const {
  TransposeVParams p{};
  p.problem = problem;
  p.args = args;
  p.tiles = static_cast<int32_t>(ceil_div(args.shape.seqlen_kv, kFp8TileKv));
  p.to = to.v_transposed;
  p.half_descales = to.half_descales;
  p.largest_descale_v = to.largest_descale_v;
  const int64_t ctas = int64_t{p.tiles} * problem.heads_kv * args.shape.batch *
                       (kernel_.entry->dim_v / kTransposeVColumns);
  if (ctas == 0) return FLASHATTN_OK;
  if (const int32_t status = check_grid(ctas)) return status;
  return status_of(launch_kernel(transpose_v_.kernel, dim3(static_cast<unsigned>(ctas)),
                                 transpose_v_.threads, 0, p, stream),
                   "launching the transposition of v");
}

int32_t Fp8ForwardKernels::launch(const ForwardArgs& args, void* workspace,
                                  cudaStream_t stream) const {
  if (args.amax_o.data) {
    if (const int32_t status = clear_amax(problem_, args, stream)) return status;
  }
  Problem problem = problem_;
  ForwardArgs of_columns = args;
  for (int32_t first = 0; first < problem_.dim_v; first += kernel_.entry->dim_v) {
    problem.dim_v = std::min(kernel_.entry->dim_v, problem_.dim_v - first);
    const auto move = [first](const flashattn_tensor& x, int32_t size, flashattn_tensor* to) {
      to->data = static_cast<char*>(x.data) + int64_t{first} * size;
    };
    move(args.inputs.v, 1, &of_columns.inputs.v);
    move(args.o, dtype_size(problem_.dtype_o), &of_columns.o);
    if (const int32_t status = launch_columns(problem, of_columns, workspace, stream)) {
      return status;
    }
  }
  return FLASHATTN_OK;
}

int32_t Fp8ForwardKernels::launch_columns(const Problem& problem, const ForwardArgs& args,
                                          void* workspace, cudaStream_t stream) const {
  ForwardParams p{};
  if (const int32_t status = make_forward_params(problem, args, kernel_, l2_bytes_, softcap_, &p)) {
    return status;
  }
  p.softcap_log2 = problem.softcap * kLog2E;
  WorkspaceAllocator memory(workspace);
  const Arrays all = arrays(args.shape, &memory);
  if (!kernel_.entry->transposes_v) {
    p.v_transposed = all.v_transposed;
    p.half_descales = all.half_descales;
    p.largest_descale_v = all.largest_descale_v;
    if (const int32_t status = transpose_v(problem, args, all, stream)) return status;
  }
  return stream_k_.launch(kernel_, &p, all.counter, all.partial_o, stream);
}

}  // namespace flashattn::cuda::sm90
