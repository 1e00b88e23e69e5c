// The tasks of flashattn_append_kv: each appends some new tokens of a sequence.
#include "core/append_rows.h"
#include "cpu/launcher.h"

namespace flashattn::cpu {

int32_t CpuLauncher::append_kv(const AppendArgs& args, const Executor& on) const {
  const Shape& shape = args.shape;
  const auto of = [](const flashattn_tensor& x, int32_t heads, int32_t dim) {
    return x.data ? static_cast<double>(heads) * dim : 0;
  };
  const double elements = of(args.inputs.q, problem_.heads_q, problem_.dim_qk) +
                          of(args.inputs.k, problem_.heads_kv, problem_.dim_qk) +
                          of(args.inputs.v, problem_.heads_kv, problem_.dim_v);
  const double tokens = problem_.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)
                            ? static_cast<double>(shape.total_q)
                            : static_cast<double>(shape.batch) * shape.seqlen_q;
  // A task that makes descales has whole blocks.
  const int32_t block = args.update_descales ? problem_.descale_block : 1;
  const int64_t task_tokens = ceil_div(16, block) * block;
  const int64_t sequence_tasks = ceil_div(shape.seqlen_q, task_tokens) + (block > 1);
  parallel_tasks(threads_for(threads_, kElementCost * tokens * elements, on),
                 shape.batch * sequence_tasks, 1, [&](int64_t task, int32_t) {
                   const int32_t b = static_cast<int32_t>(task / sequence_tasks);
                   const int64_t before =
                       block > 1 ? append_rows(problem_, args, b).sequence.len.kv % task_tokens : 0;
                   const int64_t first = task % sequence_tasks * task_tokens - before;
                   kernels_.append(problem_, args, b,
                                   {clamp_index(first, INT32_MAX),
                                    clamp_index(first + task_tokens, INT32_MAX)});
                 });
  for (int32_t b = 0; args.lens_out && b < shape.batch; ++b) {
    args.lens_out[b] = append_rows(problem_, args, b).end;
  }
  return FLASHATTN_OK;
}

}  // namespace flashattn::cpu
