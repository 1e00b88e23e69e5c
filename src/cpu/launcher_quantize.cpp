// The tasks of flashattn_quantize: the means of k, then blocks of tokens of q, k and v.
#include <algorithm>

#include "cpu/launcher.h"

namespace flashattn::cpu {

int32_t CpuLauncher::quantize(const QuantizeArgs& args, const Executor& on) const {
  const Shape& shape = args.shape;
  const int32_t heads = problem_.heads_kv, group = problem_.q_heads_per_kv_head();
  const int64_t head_count = int64_t{shape.batch} * heads;
  const auto threads = [&](int64_t tokens, int32_t dim) {
    return threads_for(threads_, kElementCost * static_cast<double>(head_count * tokens) * dim, on);
  };
  if (args.k_mean.data) {
    parallel_tasks(threads(shape.seqlen_kv, problem_.dim_qk), head_count, 1,
                   [&](int64_t task, int32_t) {
                     kernels_.k_mean(args, problem_, static_cast<int32_t>(task / heads),
                                     static_cast<int32_t>(task % heads));
                   });
  }
  const auto run = [&](const QuantizeJob& job, int32_t tokens) {
    if (!job.in.data) return;
    const int64_t head_tasks = ceil_div(tokens, job.task_tokens);
    parallel_tasks(threads(int64_t{tokens} * job.heads, job.dim), head_count * head_tasks, 1,
                   [&](int64_t task, int32_t) {
                     const int64_t head = task / head_tasks;
                     kernels_.quantize(job, static_cast<int32_t>(head / heads),
                                       static_cast<int32_t>(head % heads),
                                       static_cast<int32_t>(task % head_tasks) * job.task_tokens);
                   });
  };
  // Without blocks (descale_block 0) the first task of a head has all tokens.
  constexpr int32_t kTaskTokens = 256;
  const int32_t block = problem_.descale_block;
  const int32_t tokens = block == 0 || block > kTaskTokens ? block : kTaskTokens / block * block;
  const auto tokens_of = [&](int32_t seqlen) { return tokens == 0 ? std::max(seqlen, 1) : tokens; };
  const Inputs& in = args.inputs;
  run({&problem_, &args, in.q, args.q_out, args.descale_q, true, false, group, problem_.dim_qk,
       problem_.dtype, tokens_of(shape.seqlen_q)},
      shape.seqlen_q);
  run({&problem_, &args, in.k, args.k_out, args.descale_k, false, true, 1, problem_.dim_qk,
       problem_.dtype_kv, tokens_of(shape.seqlen_kv)},
      shape.seqlen_kv);
  run({&problem_, &args, in.v, args.v_out, args.descale_v, false, false, 1, problem_.dim_v,
       problem_.dtype_kv, tokens_of(shape.seqlen_kv)},
      shape.seqlen_kv);
  return FLASHATTN_OK;
}

}  // namespace flashattn::cpu
