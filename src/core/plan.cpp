#include "core/plan.h"

#include <algorithm>
#include <cinttypes>
#include <initializer_list>
#include <string>

#include "core/copy_in.h"
#include "core/cost.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"
#include "core/select.h"
#include "core/validate_args.h"
#include "core/validate_desc.h"

namespace flashattn {
namespace {

// The shape of a plan's maxima, and the first maximum that is needed and not set.
struct Maxima {
  Shape shape;
  const char* missing;  // NULL: complete
};

Maxima plan_maxima(const Problem& problem) {
  Maxima maxima = {maxima_of(problem), nullptr};
  const struct {
    const char* field;
    int64_t value;
    bool matters;
  } table[] = {
      {"max_batch", problem.max_batch, true},
      {"max_seqlen_q", problem.max_seqlen_q, true},
      {"max_seqlen_kv", problem.max_seqlen_kv, true},
      {"max_total_q", problem.max_total_q, problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)},
      {"max_total_kv", problem.max_total_kv, problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV)},
  };
  for (const auto& row : table) {
    if (row.matters && row.value == 0 && !maxima.missing) maxima.missing = row.field;
  }
  return maxima;
}

void check_workspace_limit(const Plan& plan) {
  if (plan.problem.workspace_limit == 0) return;
  const Maxima maxima = plan_maxima(plan.problem);
  if (maxima.missing) {
    reject(FLASHATTN_REASON_WORKSPACE_LIMIT, maxima.missing,
           "workspace_limit = %" PRId64
           " is set, but %s is not, so that no limit can be kept; set both, or leave "
           "workspace_limit at 0",
           plan.problem.workspace_limit, maxima.missing);
  }
  for (const uint32_t op : {FLASHATTN_OP_FORWARD, FLASHATTN_OP_BACKWARD}) {
    if (!plan.problem.has_op(op)) continue;
    const int64_t bytes = needed_workspace(plan, op, maxima.shape);
    if (bytes <= plan.problem.workspace_limit) continue;
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_WORKSPACE_LIMIT, "workspace_limit",
           "the plan's maxima need %" PRId64
           " bytes of workspace for %s, above workspace_limit = %" PRId64
           " (%s); raise the limit, lower the maxima, or split the batch",
           bytes, op == FLASHATTN_OP_FORWARD ? "forward" : "backward", plan.problem.workspace_limit,
           plan.device->properties.name);
  }
}

void describe(const Plan& plan, uint32_t op, const Maxima& maxima,
              flashattn_plan_properties* properties) {
  const Launcher& launcher = *plan.launcher;
  return maxima.missing ? launcher.describe_maxima(op, maxima.shape, properties)
                        : launcher.describe(op, maxima.shape, properties);
}

void log_choice(const Plan& plan) {
  if (!log_enabled(FLASHATTN_LOG_INFO)) return;
  for (const uint32_t op : {FLASHATTN_OP_FORWARD, FLASHATTN_OP_BACKWARD}) {
    if (!plan.problem.has_op(op)) continue;
    flashattn_plan_properties properties = {};
    describe(plan, op, plan_maxima(plan.problem), &properties);
    log(FLASHATTN_LOG_INFO, "%s: backend %s, kernel %s (%s), tile %d x %d: %s",
        op == FLASHATTN_OP_FORWARD ? "forward" : "backward", plan.backend->name, properties.kernel,
        properties.isa, properties.tile_q, properties.tile_kv, properties.why);
  }
}

}  // namespace

void check_plan(const Plan* plan) {
  if (plan) return;
  reject(FLASHATTN_REASON_NULL_POINTER, "plan",
         "plan is NULL; give a plan that flashattn_plan_create made");
}

void check_op(const Plan& plan, uint32_t op) {
  if (op != FLASHATTN_OP_FORWARD && op != FLASHATTN_OP_BACKWARD) {
    reject(FLASHATTN_REASON_VALUE, "op",
           "op = %" PRIu32
           " is not one operation; use FLASHATTN_OP_FORWARD = 1 or "
           "FLASHATTN_OP_BACKWARD = 2",
           op);
  }
  if (plan.problem.has_op(op)) return;
  reject(FLASHATTN_REASON_OP, "ops",
         "the plan was not made for %s: ops = %" PRIu32 " of its descriptor lacks %s = %" PRIu32
         "; add it and make the plan anew",
         op == FLASHATTN_OP_FORWARD ? "forward" : "backward", plan.problem.ops,
         op == FLASHATTN_OP_FORWARD ? "FLASHATTN_OP_FORWARD" : "FLASHATTN_OP_BACKWARD", op);
}

std::unique_ptr<Plan> make_plan(const flashattn_desc& desc) {
  const Problem problem = make_problem(desc);
  check_shape(problem, maxima_of(problem), "max_");
  const Device& device = find_device(problem.device, problem.device_index);
  std::string passed_over;
  // The launcher keeps to what a block mask leaves of the limit.
  Problem own = problem;
  if (own.workspace_limit > 0) {
    own.workspace_limit =
        std::max<int64_t>(own.workspace_limit - block_mask_bytes(problem, maxima_of(problem)), 1);
  }
  const Backend& backend = select_backend(problem, device, backends(), &passed_over);
  std::unique_ptr<Plan> plan(
      new Plan{problem, &device, &backend, backend.plan(own, device, passed_over)});
  check_workspace_limit(*plan);
  log_choice(*plan);
  return plan;
}

int64_t needed_workspace(const Plan& plan, uint32_t op, const Shape& shape) {
  return is_idle(op, shape)
             ? 0
             : plan.launcher->workspace(op, shape) + block_mask_bytes(plan.problem, shape);
}

int64_t workspace_size(const Plan* plan, uint32_t op, const Shape* shape) {
  check_plan(plan);
  check_op(*plan, op);
  if (shape) {
    check_shape(plan->problem, *shape);
    return needed_workspace(*plan, op, *shape);
  }
  const Maxima maxima = plan_maxima(plan->problem);
  if (maxima.missing) {
    reject(FLASHATTN_REASON_SIZE, maxima.missing,
           "args is NULL, but the descriptor does not set %s; give args, or set that field to the "
           "largest size of any call",
           maxima.missing);
  }
  return needed_workspace(*plan, op, maxima.shape);
}

void plan_info(const Plan* plan, uint32_t op, const Shape* shape,
               flashattn_plan_properties* properties) {
  check_plan(plan);
  check_op(*plan, op);
  if (shape) check_shape(plan->problem, *shape);
  const Maxima maxima = plan_maxima(plan->problem);
  const Shape& asked = shape ? *shape : maxima.shape;
  const bool known = shape || !maxima.missing;

  flashattn_plan_properties own = {};
  describe(*plan, op, known ? Maxima{asked, nullptr} : maxima, &own);
  own.backend = plan->backend->name;
  const Cost cost = known ? operation_cost(plan->problem, op, asked) : Cost{0, 0};
  own.flops = cost.flops;
  own.bytes = cost.bytes;
  own.workspace = known ? needed_workspace(*plan, op, asked) : 0;
  if (!known) own.splits = 0;
  *properties = own;
}

}  // namespace flashattn
