// A plan and its operations. Functions refuse by throwing Refused; launchers return a status with
// the error recorded.
#pragma once

#include <memory>

#include "core/backend.h"

// Immutable once made.
struct flashattn_plan {
  flashattn::Problem problem;
  const flashattn::Device* device;
  const flashattn::Backend* backend;
  std::unique_ptr<flashattn::Launcher> launcher;
};

namespace flashattn {

using Plan = ::flashattn_plan;

std::unique_ptr<Plan> make_plan(const flashattn_desc& desc);

// Whether a call has nothing to do. Without queries, backward still writes zeros to dk and dv.
inline bool is_idle(uint32_t op, const Shape& shape) {
  return shape.batch == 0 || (op == FLASHATTN_OP_FORWARD && shape.seqlen_q == 0);
}

// The workspace that a call needs, as flashattn_workspace_size reports it.
int64_t needed_workspace(const Plan& plan, uint32_t op, const Shape& shape);

// shape NULL: the plan's maxima, which are refused if one that the size depends on is not set.
int64_t workspace_size(const Plan* plan, uint32_t op, const Shape* shape);

// shape NULL: the plan's maxima; without them the properties that depend on them are 0.
void plan_info(const Plan* plan, uint32_t op, const Shape* shape,
               flashattn_plan_properties* properties);

int32_t run_forward(const Plan* plan, const flashattn_args& args, void* workspace,
                    int64_t workspace_bytes, void* stream);
int32_t run_backward(const Plan* plan, const flashattn_args& args, void* workspace,
                     int64_t workspace_bytes, void* stream);
int32_t run_merge(const Plan* plan, const flashattn_merge_args& args, void* stream);
int32_t run_quantize(const Plan* plan, const flashattn_quantize_args& args, void* stream);
int32_t run_append_kv(const Plan* plan, const flashattn_append_kv_args& args, void* stream);
int32_t run_dropout_mask(const Plan* plan, const flashattn_args& args, uint8_t* keep, void* stream);

// Refuse a NULL plan, and an op that is unknown or that the plan was not created for.
void check_plan(const Plan* plan);
void check_op(const Plan& plan, uint32_t op);

}  // namespace flashattn
