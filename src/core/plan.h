// A plan, and everything that can be done with one. All functions refuse by throwing Refused or, in
// the kernels, by a status with the error recorded.
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

// Whether nothing is to be done. With no query there are still gradients of keys to write: zeros.
inline bool is_idle(uint32_t op, const Shape& shape) {
  return shape.batch == 0 || (op == FLASHATTN_OP_FORWARD && shape.seqlen_q == 0);
}

// What a call must bring; flashattn_workspace_size says it.
int64_t needed_workspace(const Plan& plan, uint32_t op, const Shape& shape);

// shape NULL: the plan's maxima; refused when one that matters is not set.
int64_t workspace_size(const Plan* plan, uint32_t op, const Shape* shape);

// shape NULL: the plan's maxima; without them, what depends on them is 0.
void plan_info(const Plan* plan, uint32_t op, const Shape* shape,
               flashattn_plan_properties* properties);

int32_t run_forward(const Plan* plan, const flashattn_args& args, void* workspace,
                    int64_t workspace_bytes, void* stream);
int32_t run_backward(const Plan* plan, const flashattn_args& args, void* workspace,
                     int64_t workspace_bytes, void* stream);
int32_t run_merge(const Plan* plan, const flashattn_merge_args& args, void* stream);
int32_t run_dropout_mask(const Plan* plan, const flashattn_args& args, uint8_t* keep, void* stream);

// Refuse NULL; an op that is none or that the plan was not made for.
void check_plan(const Plan* plan);
void check_op(const Plan& plan, uint32_t op);

}  // namespace flashattn
