// The grid of the kernels of flashattn_append_kv: tokens and vecs of a CTA.
#include "cuda/host/append_kv.h"

#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/kernels/common/append_kv.h"

namespace flashattn::cuda {
namespace {

constexpr int kSmallThreads = 128;  // threads of a CTA where several share a token, to end sooner

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
  const bool updates =
      args.update_descales && shape.batch > 0 && shape.seqlen_q > 0 && (in.k.data || in.v.data);
  if (updates) {
    const int32_t heads = problem.heads_kv * (in.k.data && in.v.data ? 2 : 1);
    p.by_heads = FastDivmod::of(heads);
    const int64_t blocks = ceil_div(shape.seqlen_q, problem.descale_block) + 1;
    const int64_t ctas = ceil_div(blocks * heads, kAppendBlockThreads / 32);
    const dim3 grid(static_cast<unsigned>(shape.batch),
                    static_cast<unsigned>(std::min<int64_t>(ctas, 65535)));
    const cudaError_t error =
        launch_kernel(kernels.append_blocks, grid, kAppendBlockThreads, 0, p, stream);
    if (error != cudaSuccess) return error;
    p.operands[1].from = p.operands[2].from = {};  // what follows moves q alone
  }
  for (int n = 0; n < 3; ++n) {
    AppendOperand& x = p.operands[n];
    x.first_vec = p.vecs;
    if (x.from.data) p.vecs += (n > 0 ? problem.heads_kv : problem.heads_q) * x.by_vecs.divisor;
  }
  const bool in_place = args.lens_out && args.lens_out == in.lens_kv;
  const auto advance_lens = [&] {
    return launch_kernel(kernels.advance_lens,
                         dim3(static_cast<unsigned>(ceil_div(shape.batch, 128))), 128, 0, p,
                         stream);
  };
  if (p.vecs == 0 || shape.seqlen_q == 0) {
    return args.lens_out && (updates || !in_place) ? advance_lens() : cudaSuccess;
  }
  p.pairs = p.operands[0].from.data || p.operands[1].from.data ? args.rotary_dim / 2 : 0;
  p.by_pairs = FastDivmod::of(std::max(p.pairs, 1));
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
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) {
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
  p.writes_lens = args.lens_out && !(in_place && ctas > 1);
  const dim3 grid(static_cast<unsigned>(shape.batch), static_cast<unsigned>(ctas), split);
  const cudaError_t error = launch_pdl(kernels.append, grid, threads, 0, p, stream);
  if (error != cudaSuccess || !in_place || p.writes_lens) return error;
  return advance_lens();
}

}  // namespace flashattn::cuda
