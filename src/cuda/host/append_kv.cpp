// The grid of the kernels of flashattn_append_kv: tokens and vecs of a CTA.
#include "cuda/host/append_kv.h"

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/kernels/common/append_kv.h"

namespace flashattn::cuda {
namespace {

constexpr int kSmallThreads = 128;  // threads of a CTA where several share a token, to end sooner

struct Launch {
  dim3 grid;
  int32_t threads;
};

// Sets tokens and vecs of a CTA of the kernel that moves rows.
Launch launch_of_rows(AppendParams& p, bool in_place, int32_t multiprocessors) {
  const Shape& shape = p.args.shape;
  const int32_t most_tokens = kAppendMaxAngles / std::max(p.pairs, 1);
  // A CTA has as many threads as a token has vecs, or one for each vec of several tokens.
  p.slots = std::max(std::min({kAppendMaxThreads / 2 / p.vecs, shape.seqlen_q, most_tokens}), 1);
  int64_t ctas = ceil_div(shape.seqlen_q, p.slots);
  // Where there are tokens enough, each thread moves a vec of several, one after the other.
  constexpr int32_t kMaxRounds = 8, kCtasPerMultiprocessor = 16;
  const int64_t rounds = ctas * shape.batch / (kCtasPerMultiprocessor * multiprocessors);
  p.tokens_per_cta =
      std::min(p.slots * clamp_index(std::max<int64_t>(rounds, 1), kMaxRounds), most_tokens);
  ctas = ceil_div(shape.seqlen_q, p.tokens_per_cta);
  if (p.problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) {
    // Most sequences may be shorter than the longest: limits CTAs without a token.
    const int64_t mean = ceil_div(ceil_div(shape.total_q, shape.batch), p.tokens_per_cta);
    ctas = std::min(ctas, std::max(4 * mean, ceil_div(16 * int64_t{multiprocessors}, shape.batch)));
  }
  if (in_place && ctas <= 2) ctas = 1;  // sooner done than a second launch
  // The grid's limit. Also, the index of a token one step past the last must not overflow.
  ctas = std::max<int64_t>(std::min<int64_t>(ctas, 65535 / p.tokens_per_cta), 1);
  int64_t shares = ceil_div(p.vecs * p.slots, kAppendMaxThreads);  // shares of vecs, a thread a vec
  unsigned split = 1;                                              // CTAs that divide the shares
  if (p.slots == 1 && !(in_place && ctas == 1)) {
    const int64_t spare = 2 * int64_t{multiprocessors} / (shape.batch * ctas);
    split = static_cast<unsigned>(
        std::max<int64_t>(std::min(ceil_div(p.vecs, kSmallThreads), spare), 1));
    shares = std::max<int64_t>(shares, split);
  }
  const auto threads = static_cast<int32_t>(ceil_div(ceil_div(p.vecs * p.slots, shares), 32) * 32);
  p.by_vecs = FastDivmod::of(p.vecs < threads ? p.vecs : threads);
  return {dim3(static_cast<unsigned>(shape.batch), static_cast<unsigned>(ctas), split), threads};
}

// Sets groups of heads of the kernel that makes descales.
Launch launch_of_blocks(AppendParams& p, bool in_place, int32_t multiprocessors) {
  const Shape& shape = p.args.shape;
  const bool has_k = p.operands[1].from.data, has_v = p.operands[2].from.data;
  const int64_t heads_kv = int64_t{p.problem.heads_kv} * (has_k + has_v);
  const int64_t heads_q = p.operands[0].from.data ? p.problem.heads_q : 0;
  const int64_t warps = std::min<int64_t>(heads_kv, kAppendBlockMaxThreads / 32);
  p.groups_kv = static_cast<int32_t>(ceil_div(heads_kv, warps));
  p.groups = p.groups_kv + static_cast<int32_t>(ceil_div(heads_q, warps));
  const int64_t blocks = ceil_div(shape.seqlen_q, p.problem.descale_block) + 1;
  constexpr int64_t kCtasPerMultiprocessor = 8;
  const int64_t spare =
      std::max<int64_t>(kCtasPerMultiprocessor * multiprocessors / shape.batch, 1);
  const bool alone = in_place && blocks <= 2;  // sooner done than a second launch
  const int64_t ctas = alone ? 1 : std::min({blocks, spare, int64_t{65535}});
  const int64_t split = alone ? 1 : std::min<int64_t>(p.groups, ceil_div(spare, ctas));
  return {dim3(static_cast<unsigned>(shape.batch), static_cast<unsigned>(ctas),
               static_cast<unsigned>(split)),
          static_cast<int32_t>(warps * 32)};
}

}  // namespace

cudaError_t preload_append_kernels(const Problem& problem) {
  cudaError_t error = cudaSuccess;
  for (const int32_t dtype : {FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16}) {
    if (problem.dtype != FLASHATTN_DTYPE_F8E4M3 && problem.dtype != dtype) continue;
    for (const bool vectors : {false, true}) {
      const AppendKernels of = append_kernels(dtype, vectors);
      if (error == cudaSuccess) error = preload(of.append, of.advance_lens);
      if (error == cudaSuccess && problem.has_f8_cache() && problem.descale_block > 0) {
        error = preload(of.append_blocks);
      }
    }
  }
  return error;
}

cudaError_t launch_append_kv(const Problem& problem, const AppendArgs& args, bool vectors,
                             int32_t multiprocessors, cudaStream_t stream) {
  const Shape& shape = args.shape;
  const Inputs& in = args.inputs;
  const int32_t size = vectors ? kAppendVector : 1;
  const AppendKernels kernels = append_kernels(args.dtype, vectors);
  AppendParams p{};
  p.problem = problem;
  p.args = args;
  const auto operand = [&](const flashattn_tensor& from, const flashattn_tensor& to,
                           const flashattn_tensor& descale, int32_t dim, int32_t rotary_dim) {
    const bool halves = args.rotary == FLASHATTN_ROTARY_HALVES;
    const int32_t split = !vectors           ? (halves ? rotary_dim / 2 : 0)
                          : rotary_dim > 0   ? rotary_dim / 2
                          : dim % (2 * size) ? 0
                                             : dim / 2;
    const int32_t vecs = static_cast<int32_t>(ceil_div(dim, 2 * size));
    return AppendOperand{from, to, descale, FastDivmod::of(vecs), 0, dim, rotary_dim / 2, split};
  };
  p.operands[0] = operand(in.q, args.q_out, {}, problem.dim_qk, args.rotary_dim);
  p.operands[1] = operand(in.k, args.k_cache, in.descale_k, problem.dim_qk, args.rotary_dim);
  p.operands[2] = operand(in.v, args.v_cache, in.descale_v, problem.dim_v, 0);
  p.by_page = FastDivmod::of(std::max(problem.page_size, 1));
  p.by_block = FastDivmod::of(std::max(problem.descale_block, 1));
  p.pairs = in.q.data || in.k.data ? args.rotary_dim / 2 : 0;
  p.by_pairs = FastDivmod::of(std::max(p.pairs, 1));
  const bool has_tokens = shape.batch > 0 && shape.seqlen_q > 0;
  const bool makes_descales = args.update_descales && has_tokens && (in.k.data || in.v.data);
  for (int n = 0; n < 3; ++n) {
    AppendOperand& x = p.operands[n];
    x.first_vec = p.vecs;
    if (x.from.data) {
      p.vecs += (n > 0 ? problem.heads_kv : problem.heads_q) * x.by_vecs.divisor;
    }
  }
  // lens_out may be lens_kv: then the kernel writes it where one CTA alone reads it, or else a
  // kernel of its own does.
  const bool in_place = args.lens_out && args.lens_out == in.lens_kv;
  cudaError_t error = cudaSuccess;
  if (p.vecs > 0 && has_tokens) {
    const Launch launch = makes_descales ? launch_of_blocks(p, in_place, multiprocessors)
                                         : launch_of_rows(p, in_place, multiprocessors);
    p.writes_lens = args.lens_out && (!in_place || launch.grid.y * launch.grid.z == 1);
    error = launch_pdl(makes_descales ? kernels.append_blocks : kernels.append, launch.grid,
                       launch.threads, 0, p, stream);
  }
  if (error != cudaSuccess || !args.lens_out || p.writes_lens || (in_place && !has_tokens)) {
    return error;
  }
  return launch_pdl(kernels.advance_lens, dim3(static_cast<unsigned>(ceil_div(shape.batch, 128))),
                    128, 0, p, stream);
}

}  // namespace flashattn::cuda
