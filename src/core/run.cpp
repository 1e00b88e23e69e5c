// Checks everything, then launches. Nothing here allocates.
#include <algorithm>
#include <cinttypes>
#include <iterator>

#include "core/error.h"
#include "core/plan.h"
#include "core/validate_args.h"

namespace flashattn {
namespace {

// Refuses a stream on the CPU and a thread pool on a GPU.
template <class Args>
Executor check_executor(const Plan& plan, const Args& args, void* stream) {
  const bool cpu = plan.device->kind == FLASHATTN_DEVICE_CPU;
  if (stream && cpu) {
    reject(FLASHATTN_REASON_STREAM, "stream",
           "stream = %p, but the plan is for the CPU, which has none; give NULL", stream);
  }
  if (args.parallel && !cpu) {
    reject(FLASHATTN_REASON_VALUE, "parallel",
           "parallel is set, but the plan is for a GPU, whose work no thread of the host runs; "
           "leave it NULL");
  }
  if (args.parallel_user && !args.parallel) {
    reject(
        FLASHATTN_REASON_NULL_POINTER, "parallel_user",
        "parallel_user is set, but parallel, which it would be handed to, is NULL; set parallel, "
        "too, or leave both NULL");
  }
  return {stream, {args.parallel, args.parallel_user}};
}

// Checks the workspace of one operation and adds it to the arrays that must not overlap.
void check_workspace(const Plan& plan, uint32_t op, const Shape& shape, const void* workspace,
                     int64_t given, ArrayList* arrays) {
  const int64_t needed = needed_workspace(plan, op, shape);
  if (given < 0) {
    reject(FLASHATTN_REASON_SIZE, "workspace_bytes",
           "workspace_bytes = %" PRId64 " is below 0; give the size of the workspace", given);
  }
  if (needed > 0 && (!workspace || given < needed)) {
    refuse(FLASHATTN_ERROR_WORKSPACE,
           workspace ? FLASHATTN_REASON_SIZE : FLASHATTN_REASON_NULL_POINTER,
           workspace ? "workspace_bytes" : "workspace",
           "workspace is %p with workspace_bytes = %" PRId64 ", but these sizes need %" PRId64
           " bytes; ask flashattn_workspace_size",
           workspace, given, needed);
  }
  if (needed > 0) arrays->add_bytes("workspace", workspace, needed);
}

// Makes the block mask of a plan with BLOCK_LISTS or BLOCK_LENS at the start of the workspace, and
// leaves the rest of it to the kernels.
int32_t make_block_mask(const Plan& plan, const Shape& shape, const BlockMaskArgs& args,
                        Inputs* inputs, void** workspace, const Executor& on) {
  if (!plan.problem.has_mask(kMaskOfBlocks)) return FLASHATTN_OK;
  BlockMaskRows mask = block_mask_rows(plan.problem, shape);
  BlockMaskAllocator memory(*workspace);
  uint8_t* const base = memory.take<uint8_t>(mask.bytes());
  *workspace = static_cast<char*>(*workspace) + memory.bytes();
  // Sequences and heads whose arrays repeat share a mask.
  const flashattn_tensor* const given[] = {&args.mask, &args.index, &args.begin, &args.end,
                                           &args.lens};
  const auto repeats = [&](int64_t flashattn_tensor::* stride) {
    return std::all_of(std::begin(given), std::end(given),
                       [=](const flashattn_tensor* x) { return !x->data || x->*stride == 0; });
  };
  if (repeats(&flashattn_tensor::stride_batch)) mask.batch = 1;
  if (repeats(&flashattn_tensor::stride_head)) mask.heads = 1;
  inputs->block_mask = mask.row(base, 0, 0, 0);
  inputs->block_mask_stride_batch = mask.batch > 1 ? mask.heads * mask.head_bytes() : 0;
  inputs->block_mask_stride_head = mask.heads > 1 ? mask.head_bytes() : 0;
  inputs->block_mask_stride_row = mask.stride_row;
  if (mask.bytes() == 0) return FLASHATTN_OK;
  return plan.launcher->make_block_mask(args, mask, base, on);
}

}  // namespace

int32_t run_forward(const Plan* plan, const flashattn_args& args, void* workspace,
                    int64_t workspace_bytes, void* stream) {
  check_plan(plan);
  check_op(*plan, FLASHATTN_OP_FORWARD);
  const Executor on = check_executor(*plan, args, stream);
  ArrayList arrays;
  ForwardArgs own =
      check_forward(plan->problem, plan->device->kind == FLASHATTN_DEVICE_CPU, args, &arrays);
  const BlockMaskArgs mask = check_block_mask(plan->problem, own.shape, own.inputs, args, &arrays);
  check_workspace(*plan, FLASHATTN_OP_FORWARD, own.shape, workspace, workspace_bytes, &arrays);
  arrays.check_overlaps();
  if (is_idle(FLASHATTN_OP_FORWARD, own.shape)) {
    return own.amax_o.data && own.shape.batch > 0 ? plan->launcher->clear_amax(own, on)
                                                  : FLASHATTN_OK;
  }
  if (const int32_t status = make_block_mask(*plan, own.shape, mask, &own.inputs, &workspace, on)) {
    return status;
  }
  return plan->launcher->forward(own, workspace, on);
}

int32_t run_backward(const Plan* plan, const flashattn_args& args, void* workspace,
                     int64_t workspace_bytes, void* stream) {
  check_plan(plan);
  check_op(*plan, FLASHATTN_OP_BACKWARD);
  const Executor on = check_executor(*plan, args, stream);
  ArrayList arrays;
  BackwardArgs own =
      check_backward(plan->problem, plan->device->kind == FLASHATTN_DEVICE_CPU, args, &arrays);
  const BlockMaskArgs mask = check_block_mask(plan->problem, own.shape, own.inputs, args, &arrays);
  check_workspace(*plan, FLASHATTN_OP_BACKWARD, own.shape, workspace, workspace_bytes, &arrays);
  arrays.check_overlaps();
  if (is_idle(FLASHATTN_OP_BACKWARD, own.shape)) return FLASHATTN_OK;
  if (const int32_t status = make_block_mask(*plan, own.shape, mask, &own.inputs, &workspace, on)) {
    return status;
  }
  return plan->launcher->backward(own, workspace, on);
}

int32_t run_merge(const Plan* plan, const flashattn_merge_args& args, void* stream) {
  check_plan(plan);
  const Executor on = check_executor(*plan, args, stream);
  const MergeArgs own = check_merge(plan->problem, args);
  const bool varlen = plan->problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool empty =
      varlen ? own.shape.total_q == 0 : own.shape.batch == 0 || own.shape.seqlen_q == 0;
  return empty ? FLASHATTN_OK : plan->launcher->merge(own, on);
}

int32_t run_quantize(const Plan* plan, const flashattn_quantize_args& args, void* stream) {
  check_plan(plan);
  const Executor on = check_executor(*plan, args, stream);
  const QuantizeArgs own =
      check_quantize(plan->problem, plan->device->kind == FLASHATTN_DEVICE_CPU, args);
  return own.shape.batch == 0 ? FLASHATTN_OK : plan->launcher->quantize(own, on);
}

int32_t run_append_kv(const Plan* plan, const flashattn_append_kv_args& args, void* stream) {
  check_plan(plan);
  const Executor on = check_executor(*plan, args, stream);
  const AppendArgs own =
      check_append_kv(plan->problem, plan->device->kind == FLASHATTN_DEVICE_CPU, args);
  return own.shape.batch == 0 ? FLASHATTN_OK : plan->launcher->append_kv(own, on);
}

int32_t run_dropout_mask(const Plan* plan, const flashattn_args& args, uint8_t* keep,
                         void* stream) {
  check_plan(plan);
  const Executor on = check_executor(*plan, args, stream);
  const ForwardArgs own = check_dropout_mask(plan->problem, args, keep);
  const Shape& shape = own.shape;
  if (shape.batch == 0 || shape.seqlen_q == 0 || shape.seqlen_kv == 0) return FLASHATTN_OK;
  return plan->launcher->dropout_mask(own, keep, on);
}

}  // namespace flashattn
