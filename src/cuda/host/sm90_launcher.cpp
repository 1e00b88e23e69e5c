#include "cuda/host/sm90_launcher.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/score_mod.h"
#include "core/select.h"
#include "cuda/host/driver.h"
#include "cuda/host/tensor_map.h"

namespace flashattn::cuda {
namespace {

constexpr int32_t kLongKeys = 4096;  // keys that are worth splitting
constexpr int32_t kShortQueries =
    64;  // the portable backend packs heads and splits keys up to here
constexpr int32_t kShortElements = 16384;  // of a head's keys: up to here small blocks start faster

sm90::ScoreModKind scores_of(const Problem& p) {
  using sm90::ScoreModKind;
  const bool capped = p.softcap != 0, sloped = p.has_bias(FLASHATTN_BIAS_ALIBI);
  const bool dropped = p.dropout_threshold() != 0;
  if (sm90::needs_runtime_kernel(p) || p.scale < 0 || capped + sloped + dropped > 1)
    return ScoreModKind::kRuntime;
  return capped    ? ScoreModKind::kSoftcap
         : sloped  ? ScoreModKind::kAlibi
         : dropped ? ScoreModKind::kDropout
                   : ScoreModKind::kPlain;
}

bool takes(const sm90::ForwardEntry& e, const Problem& p) {
  return e.dtype == p.dtype && e.score_mod == scores_of(p) && e.dim_qk >= p.dim_qk &&
         e.dim_v >= p.dim_v;
}

constexpr char kLaunching[] = "launching the forward kernel";

sm90::Softcap softcap_of(const Problem& p) {
  if (p.softcap == 0) return {};
  // tanh(x), where |x| < 1/4: x (1 + a x^2 + b x^4), minimax, relative error 6e-7.
  constexpr double kTerms[] = {1.0, -0.33324572, 0.12876415};
  const double inner = double{p.scale} / p.softcap, outer = p.scale * double{kLog2E};
  sm90::Softcap cap{};
  cap.input_scale = static_cast<float>(inner);
  double power = outer;
  bool finite = true;
  for (int n = 0; n < 3; ++n, power *= inner * inner) {
    cap.poly5[n] = static_cast<float>(power * kTerms[n]);
    finite &= std::isfinite(cap.poly5[n]);
  }
  if (!finite) return cap;
  // The square of a product must not overflow.
  const auto product = [inner](double x) { return std::min(x / std::abs(inner), 1e18); };
  cap.poly5_limit = static_cast<float>(product(0.25));
  // Up to |x| = end, x (1 - end^4 / 24) + x^3 (end^2 / 6 - 1/3) is nearest to tanh(x), and off by
  // end^5 / 120: of a score at most kError, which sums, too, must not notice.
  constexpr double kError = 0x1p-18;  // log2
  const double end =
      std::min(std::pow(120 * kError / (p.softcap * double{kLog2E}), 0.2), std::sqrt(0.05));
  cap.poly3_limit = static_cast<float>(product(end));
  cap.poly3[0] = static_cast<float>(outer * (1 - std::pow(end, 4) / 24));
  cap.poly3[1] = static_cast<float>(outer * inner * inner * (end * end / 6 - 1.0 / 3));
  return cap;
}

std::string kernel_name(const sm90::ForwardEntry& e) {
  return forward_name("sm90", e) + sm90::kScoreModNames[static_cast<int32_t>(e.score_mod)];
}

}  // namespace

namespace sm90 {

const char* const kScoreModNames[] = {"", "_capped", "_sloped", "_shaped", "_dropped", "_any"};

bool needs_runtime_kernel(const Problem& p) {
  return p.has_bias(FLASHATTN_BIAS_DENSE) || p.has_mask(FLASHATTN_MASK_BLOCKS) ||
         p.dropout_threshold() > UINT16_MAX;
}

}  // namespace sm90

Sm90Launcher::Sm90Launcher(const Problem& problem, const Device& device)
    : Sm80Launcher(problem, device, reasons()),
      softcap_(softcap_of(problem)),
      forced_(forced_backend() != nullptr) {
  const DeviceScope scope(device_);
  const sm90::ForwardTable table = sm90::forward_table();
  for (size_t n = 0; n < table.count; ++n) {
    const sm90::ForwardEntry& e = *table.entries[n];
    if (!takes(e, problem)) continue;
    // Several tiles of one size of head; not those of larger heads.
    if (!kernels_.empty() && (e.dim_qk != kernels_[0].kernel.entry->dim_qk ||
                              e.dim_v != kernels_[0].kernel.entry->dim_v)) {
      continue;
    }
    kernels_.push_back({prepare(e, multiprocessors_), kernel_name(e)});
  }
  if (problem.has_op(FLASHATTN_OP_BACKWARD) && sm90::BackwardLauncher::takes(problem)) {
    hopper_backward_.reset(new sm90::BackwardLauncher(problem, multiprocessors_, l2_bytes_));
  }
}

const PassedOver& Sm90Launcher::reasons() {
  static const PassedOver words = {
      {"there are no keys", "queries are too few for the tiles of the Hopper family",
       "sequences are short and all fit at once: its small blocks start faster than Hopper's",
       "tiles of the Hopper family are too few for the device, and keys many enough to split"},
      {"the Hopper family has no backward kernel for this",
       "the Hopper family's, with block masks and small heads, is slower",
       "there are no queries or no keys",
       "queries are too many for the Hopper family's, with biases, dropout or block masks"},
      "the Hopper family, or the portable one where queries are few or sequences short"};
  return words;
}

Sm90Launcher::PortableBackward Sm90Launcher::why_portable_backward(const Shape& shape) const {
  if (!hopper_backward_) {
    return sm90::BackwardLauncher::has_kernel(problem_) ? kSlower : kNoKernel;
  }
  return shape.batch == 0 || shape.seqlen_q == 0 || shape.seqlen_kv == 0 ? kEmpty : kManyTiles;
}

Sm90Launcher::Portable Sm90Launcher::why_portable(const Shape& shape) const {
  if (shape.seqlen_kv == 0) return kNoKeys;
  if (forced_) return kNotAtAll;
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  // Where small heads with keys of their own are many, half a tile of small blocks is enough.
  const sm90::ForwardEntry& small = *kernels_.back().kernel.entry;
  const bool fine = small.dim_v == 64 && small.tile_q == 64 &&
                    problem_.q_heads_per_kv_head() == 1 && 5 * heads >= 2 * multiprocessors_;
  if (shape.seqlen_q <= (fine ? kShortQueries / 2 : kShortQueries)) return kFewQueries;
  const int64_t tiles = ceil_div(shape.seqlen_q, kernels_.front().kernel.entry->tile_q) * heads;
  // What counts is how fast blocks start.
  const int64_t longest = std::max(shape.seqlen_q, shape.seqlen_kv);
  if (longest * problem_.dim_qk <= kShortElements && fits_at_once(shape)) return kShort;
  return 5 * tiles < 2 * multiprocessors_ && shape.seqlen_kv >= kLongKeys ? kFewTiles : kNotAtAll;
}

const Sm90Launcher::NamedKernel* Sm90Launcher::choose(const Shape& shape) const {
  if (why_portable(shape) != kNotAtAll) return nullptr;
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
    return packed ? packed_time(cost, rule, mean, longest, heads, multiprocessors_)
                  : forward_time(cost, rule, longest, heads, multiprocessors_);
  };
  const auto faster = [&](const auto& a, const auto& b) { return time(a) < time(b); };
  return &*std::min_element(kernels_.begin(), kernels_.end(), faster);
}

L2Swizzle Sm90Launcher::swizzle(const ReadyKernel<sm90::ForwardEntry>& kernel,
                                const Shape& shape) const {
  const int64_t tiles = ceil_div(shape.seqlen_q, kernel.entry->tile_q);
  const int64_t units = static_cast<int64_t>(shape.batch) * problem_.heads_q;
  if (!problem_.has_mask(FLASHATTN_MASK_CAUSAL)) return L2Swizzle::of(units, tiles, 1);
  const int64_t unit_bytes = static_cast<int64_t>(shape.seqlen_kv) *
                             (problem_.dim_qk + problem_.dim_v) * dtype_size(problem_.dtype);
  // All blocks begin a section at about the same time, and want new keys and values: of short
  // sequences fewer at once (2 % at 512 tokens); of longer ones it costs up to 1.4 %.
  const int64_t bytes = l2_bytes_ / (unit_bytes <= (1 << 20) ? 8 : 2);
  const int64_t fitting = bytes / std::max<int64_t>(unit_bytes, 1) * problem_.q_heads_per_kv_head();
  return L2Swizzle::of(units, tiles, fitting, L2Swizzle::even_end(kernel.resident, tiles));
}

int64_t Sm90Launcher::workspace(uint32_t op, const Shape& shape) const {
  const int64_t portable = Sm80Launcher::workspace(op, shape);
  if (op == FLASHATTN_OP_FORWARD) {
    return std::max(portable, WorkspaceCutter::bytes_for(sizeof(sm90::TileCounter)));
  }
  // Shapes without queries or keys are the portable backend's: never less than a smaller shape's.
  return hopper_backward_ ? std::max(portable, hopper_backward_->workspace(shape)) : portable;
}

void Sm90Launcher::describe(uint32_t op, const Shape& shape,
                            flashattn_plan_properties* properties) const {
  if (op == FLASHATTN_OP_BACKWARD) {
    return has_backward(shape) ? hopper_backward_->describe(shape, properties)
                               : describe_backward(why_portable_backward(shape), properties);
  }
  const NamedKernel* named = choose(shape);
  if (!named) return describe_forward(shape, why_portable(shape), properties);
  describe_kernel(named->kernel, named->kernel.entry->stages, named->name, "wgmma", properties);
  properties->why = "the Hopper family, for queries fill its tiles";
}

void Sm90Launcher::describe_maxima(uint32_t op, const Shape& maxima,
                                   flashattn_plan_properties* properties) const {
  Sm80Launcher::describe_maxima(op, maxima, properties);
  if (op == FLASHATTN_OP_BACKWARD && hopper_backward_) {
    properties->why = "the Hopper family or the portable one; the shape decides, ask with one";
  }
}

int32_t Sm90Launcher::make_maps(const ForwardArgs& args, const sm90::ForwardEntry& entry,
                                sm90::ForwardParams* p) const {
  const Shape& shape = args.shape;
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem_.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  p->kv_box_rows = paged ? std::gcd(problem_.page_size, entry.tile_kv) : entry.tile_kv;
  const int64_t q_rows = varlen_q ? shape.total_q : shape.seqlen_q;
  const int64_t q_batch = varlen_q ? 1 : shape.batch;
  const int64_t kv_rows = paged ? problem_.page_size : varlen_kv ? shape.total_kv : shape.seqlen_kv;
  const int64_t kv_batch = paged ? args.inputs.pages : varlen_kv ? 1 : shape.batch;
  const struct {
    const flashattn_tensor& tensor;
    const char* name;
    CUtensorMap* map;
    sm90::ArrayShape shape;
  } table[] = {
      {args.inputs.q, "q", &p->q, {problem_.dim_qk, q_rows, problem_.heads_q, q_batch, 64}},
      {args.inputs.k,
       "k",
       &p->k,
       {problem_.dim_qk, kv_rows, problem_.heads_kv, kv_batch, p->kv_box_rows}},
      {args.inputs.v,
       "v",
       &p->v,
       {problem_.dim_v, kv_rows, problem_.heads_kv, kv_batch, p->kv_box_rows}},
      {args.o, "o", &p->o, {problem_.dim_v, q_rows, problem_.heads_q, q_batch, 64}},
  };
  for (const auto& row : table) {
    if (row.map == &p->o && !p->o_by_tma) continue;
    if (const int32_t status =
            make_tensor_map(row.tensor, problem_.dtype, row.shape, row.name, row.map)) {
      return status;
    }
  }
  return FLASHATTN_OK;
}

int32_t Sm90Launcher::forward(const ForwardArgs& args, void* workspace, const Executor& on) const {
  const NamedKernel* named = choose(args.shape);
  if (!named) return Sm80Launcher::forward(args, workspace, on);
  if (const int32_t status = check_current(device_, *context_)) return status;
  if (const int32_t status = check_arrays(args)) return status;
  const sm90::ForwardEntry& entry = *named->kernel.entry;
  sm90::ForwardParams p{};
  p.problem = problem_;
  p.args = args;
  const int64_t all =
      ceil_div(args.shape.seqlen_q, entry.tile_q) * args.shape.batch * problem_.heads_q;
  if (all > INT32_MAX / 2) {
    return fail(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_SIZE, "batch",
                "batch = %d with %d heads and %d queries makes %" PRId64
                " tiles, above 2^30; split the batch",
                args.shape.batch, problem_.heads_q, args.shape.seqlen_q, all);
  }
  p.swizzle = swizzle(named->kernel, args.shape);
  const bool varlen_q = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  p.kv_has_tail = problem_.layout != 0 || args.inputs.lens_kv != nullptr;
  p.dropout_threshold = problem_.dropout_threshold();
  p.softcap = softcap_;
  p.o_by_tma = !varlen_q && !args.inputs.lens_q && problem_.dtype_o == problem_.dtype;
  if (const int32_t status = make_maps(args, entry, &p)) return status;
  const cudaStream_t queue = static_cast<cudaStream_t>(on.stream);
  const int64_t tiles = p.swizzle.count(), resident = named->kernel.resident;
  // Fewer are dealt out evenly while the device is empty, but not under the end of another kernel.
  if (tiles < resident) return launch(entry, tiles, p, queue, kLaunching);
  p.tile_counter = WorkspaceCutter(workspace).take<sm90::TileCounter>(1);
  p.stamp = new_stamp();
  return status_of(launch_pdl(entry.kernel, dim3(static_cast<unsigned>(resident)), entry.threads,
                              entry.shared_bytes, p, queue),
                   kLaunching);
}

int32_t Sm90Launcher::backward(const BackwardArgs& args, void* workspace,
                               const Executor& on) const {
  if (!has_backward(args.shape)) return Sm80Launcher::backward(args, workspace, on);
  if (const int32_t status = check_current(device_, *context_)) return status;
  return hopper_backward_->run(args, workspace, static_cast<cudaStream_t>(on.stream));
}

bool sm90_has_code(int32_t device) {
  return has_code(device, reinterpret_cast<const void*>(sm90::forward_table().entries[0]->kernel));
}

bool sm90_takes_dims(const Problem& problem) {
  const sm90::ForwardTable table = sm90::forward_table();
  return std::any_of(table.entries, table.entries + table.count,
                     [&](const sm90::ForwardEntry* e) { return takes(*e, problem); });
}

}  // namespace flashattn::cuda
