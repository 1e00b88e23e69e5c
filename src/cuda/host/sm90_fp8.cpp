// Hopper forward row for E4M3: V^T to the workspace, tensor maps, launch.
#include "cuda/host/sm90_fp8.h"

#include <algorithm>
#include <cinttypes>
#include <numeric>

#include "core/error.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/tensor_map.h"

namespace flashattn::cuda::sm90 {
namespace {

ScoreModKind score_mod_of(const Problem& p) {
  const bool plain = !is_modified(p) && p.dropout_threshold() == 0 && p.descale_block == 0;
  return plain ? ScoreModKind::kPlain : ScoreModKind::kRuntime;
}

// The smallest head that fits; NULL: none does. dtype_o F32 is a matter of the epilogue.
const ForwardEntry* find(const Problem& p) {
  const int32_t dtype =
      p.dtype_o == FLASHATTN_DTYPE_F16 ? FLASHATTN_DTYPE_F16 : FLASHATTN_DTYPE_BF16;
  const ForwardTable table = fp8_forward_table();
  const ForwardEntry* best = nullptr;
  for (size_t n = 0; n < table.count; ++n) {
    const ForwardEntry* e = table.entries[n];
    if (e->dtype == dtype && e->score_mod == score_mod_of(p) && e->dim_qk >= p.dim_qk &&
        e->dim_v >= p.dim_v && (!best || e->dim_qk < best->dim_qk)) {
      best = e;
    }
  }
  return best;
}

}  // namespace

bool takes_fp8(const Problem& problem) { return find(problem) != nullptr; }

Fp8ForwardKernels::Fp8ForwardKernels(const Problem& problem, const Device& device)
    : problem_(problem),
      l2_bytes_(usable_l2_bytes(device.index)),
      kernel_(prepare(*find(problem), device.properties.multiprocessors)),
      transpose_v_(transpose_v_kernel(kernel_.entry->dim_v)),
      name_(std::string("sm90_forward_f8_") + std::to_string(kernel_.entry->dim_qk) + "_" +
            std::to_string(kernel_.entry->dim_v) + "_q" + std::to_string(kernel_.entry->tile_q) +
            "_kv" + std::to_string(kernel_.entry->tile_kv) +
            kScoreModNames[static_cast<int32_t>(kernel_.entry->score_mod)]),
      softcap_(softcap_of(problem)) {
  make_ready(reinterpret_cast<const void*>(transpose_v_.kernel), transpose_v_.threads, 0,
             device.properties.multiprocessors);
}

int64_t Fp8ForwardKernels::v_bytes(const Shape& shape) const {
  const HeadTiles tiles = HeadTiles::of_keys(problem_, shape, kFp8TileKv);
  return tiles.count() * problem_.heads_kv * kFp8TileKv * kernel_.entry->dim_v;
}

int64_t Fp8ForwardKernels::workspace(const Shape& shape) const {
  WorkspaceCutter cutter(nullptr);
  cutter.take<TileCounter>(1);
  cutter.take<uint8_t>(v_bytes(shape));
  return cutter.bytes();
}

std::string Fp8ForwardKernels::describe(const Shape&, flashattn_plan_properties* properties) const {
  describe_kernel(kernel_, kernel_.entry->stages, name_, "wgmma", properties);
  return "; products of E4M3, P V added in fp32 every 1 to 4 tiles of keys";
}

int32_t Fp8ForwardKernels::transpose_v(const ForwardArgs& args, uint8_t* to,
                                       cudaStream_t stream) const {
  TransposeVParams p{};
  p.problem = problem_;
  p.args = args;
  p.tiles = static_cast<int32_t>(ceil_div(args.shape.seqlen_kv, kFp8TileKv));
  p.to = to;
  const int64_t ctas = int64_t{p.tiles} * problem_.heads_kv * args.shape.batch;
  if (ctas == 0) return FLASHATTN_OK;
  if (const int32_t status = check_grid(ctas)) return status;
  return status_of(launch_kernel(transpose_v_.kernel, dim3(static_cast<unsigned>(ctas)),
                                 transpose_v_.threads, 0, p, stream),
                   "launching the transposition of v");
}

int32_t Fp8ForwardKernels::make_maps(const ForwardArgs& args, ForwardParams* p) const {
  const Shape& shape = args.shape;
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem_.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  p->kv_box_rows = paged ? std::gcd(problem_.page_size, kFp8TileKv) : kFp8TileKv;
  const int32_t columns = std::min(kernel_.entry->dim_qk, 128);
  const int64_t q_rows = varlen_q ? shape.total_q : shape.seqlen_q;
  const int64_t q_batch = varlen_q ? 1 : shape.batch;
  const int64_t kv_rows = paged ? problem_.page_size : varlen_kv ? shape.total_kv : shape.seqlen_kv;
  const int64_t kv_batch = paged ? args.inputs.pages : varlen_kv ? 1 : shape.batch;
  const ArrayShape q{problem_.dim_qk, q_rows, problem_.heads_q, q_batch, 64, columns};
  const ArrayShape k{problem_.dim_qk, kv_rows,        problem_.heads_kv,
                     kv_batch,        p->kv_box_rows, columns};
  if (const int32_t status = make_tensor_map(args.inputs.q, problem_.dtype, q, "q", &p->q)) {
    return status;
  }
  if (const int32_t status = make_tensor_map(args.inputs.k, problem_.dtype, k, "k", &p->k)) {
    return status;
  }
  if (!p->o_by_tma) return FLASHATTN_OK;
  const ArrayShape o{problem_.dim_v, q_rows, problem_.heads_q, q_batch, 64};
  return make_tensor_map(args.o, problem_.dtype_o, o, "o", &p->o);
}

int32_t Fp8ForwardKernels::launch(const ForwardArgs& args, void* workspace,
                                  cudaStream_t stream) const {
  if (args.amax_o.data) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "amax_o",
                "amax_o is given, but the GPU kernels of this version do not compute it; leave it "
                "NULL, or use device = CPU");
  }
  const ForwardEntry& entry = *kernel_.entry;
  const int64_t heads = int64_t{args.shape.batch} * problem_.heads_q;
  const int64_t q_tiles = ceil_div(args.shape.seqlen_q, entry.tile_q);
  if (q_tiles * heads > INT32_MAX / 2) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "batch",
                "batch = %d with %d heads and %d queries makes %" PRId64
                " tiles, above 2^30; split the batch",
                args.shape.batch, problem_.heads_q, args.shape.seqlen_q, q_tiles * heads);
  }
  WorkspaceCutter cutter(workspace);
  TileCounter* const counter = cutter.take<TileCounter>(1);
  uint8_t* const v_transposed = cutter.take<uint8_t>(v_bytes(args.shape));
  if (const int32_t status = transpose_v(args, v_transposed, stream)) return status;
  ForwardParams p{};
  p.problem = problem_;
  p.args = args;
  p.swizzle = forward_swizzle(problem_, args.shape, entry.tile_q, kernel_.resident, l2_bytes_);
  p.dropout_threshold = problem_.dropout_threshold();
  p.softcap = softcap_;
  p.v_transposed = v_transposed;
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  p.o_by_tma = !varlen_q && !args.inputs.lens_q && problem_.dtype_o != FLASHATTN_DTYPE_F32;
  if (const int32_t status = make_maps(args, &p)) return status;
  const int64_t tiles = p.swizzle.count(), resident = kernel_.resident;
  constexpr char kLaunching[] = "launching the forward kernel";
  if (tiles < resident) return cuda::launch(entry, tiles, p, stream, kLaunching);
  p.tile_counter = counter;
  p.stamp = new_stamp();
  return status_of(launch_pdl(entry.kernel, dim3(static_cast<unsigned>(resident)), entry.threads,
                              entry.shared_bytes, p, stream),
                   kLaunching);
}

}  // namespace flashattn::cuda::sm90
