#include "core/plan.h"

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

// The shape of the promised maxima, and the first promise that is missing for it.
struct Promised {
  flashattn_shape shape;
  const char* missing;  // NULL: complete
};

Promised promised_shape(const Problem& problem) {
  Promised promised = {};
  promised.shape.batch = problem.max_batch;
  promised.shape.seqlen_q = problem.max_seqlen_q;
  promised.shape.seqlen_kv = problem.max_seqlen_kv;
  promised.shape.total_q = problem.max_total_q;
  promised.shape.total_kv = problem.max_total_kv;
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
    if (row.matters && row.value == 0 && !promised.missing) promised.missing = row.field;
  }
  return promised;
}

void check_workspace_limit(const Plan& plan) {
  if (plan.problem.workspace_limit == 0) return;
  const Promised promised = promised_shape(plan.problem);
  if (promised.missing) {
    reject(FLASHATTN_REASON_WORKSPACE_LIMIT, promised.missing,
           "workspace_limit = %" PRId64
           " is set, but %s is not promised, so that no limit can be "
           "kept; promise it, or leave workspace_limit at 0",
           plan.problem.workspace_limit, promised.missing);
  }
  for (const uint32_t op : {FLASHATTN_OP_FORWARD, FLASHATTN_OP_BACKWARD}) {
    if (!plan.problem.has_op(op)) continue;
    const int64_t bytes = plan.launcher->workspace(op, promised.shape);
    if (bytes <= plan.problem.workspace_limit) continue;
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_WORKSPACE_LIMIT, "workspace_limit",
           "the promised maxima need %" PRId64
           " bytes of workspace for %s, above workspace_limit "
           "= %" PRId64 " (%s); raise the limit, promise less, or split the batch",
           bytes, op == FLASHATTN_OP_FORWARD ? "forward" : "backward", plan.problem.workspace_limit,
           plan.device->properties.name);
  }
}

void describe(const Plan& plan, uint32_t op, const Promised& promised,
              flashattn_plan_properties* properties) {
  const Launcher& launcher = *plan.launcher;
  return promised.missing ? launcher.describe_promised(op, promised.shape, properties)
                          : launcher.describe(op, promised.shape, properties);
}

void log_choice(const Plan& plan) {
  if (!log_enabled(FLASHATTN_LOG_INFO)) return;
  for (const uint32_t op : {FLASHATTN_OP_FORWARD, FLASHATTN_OP_BACKWARD}) {
    if (!plan.problem.has_op(op)) continue;
    flashattn_plan_properties properties = {};
    describe(plan, op, promised_shape(plan.problem), &properties);
    log(FLASHATTN_LOG_INFO, "%s: family %s, kernel %s (%s), tile %d x %d: %s",
        op == FLASHATTN_OP_FORWARD ? "forward" : "backward", plan.family->name, properties.kernel,
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

std::unique_ptr<Plan> make_plan(const flashattn_desc* desc) {
  const Problem problem = make_problem(desc);
  check_shape(problem, promised_shape(problem).shape, "max_");
  const Device& device = find_device(problem.device, problem.device_index);
  std::string passed_over;
  const Family& family = select_family(problem, device, families(), &passed_over);
  std::unique_ptr<Plan> plan(
      new Plan{problem, &device, &family, family.plan(problem, device, passed_over)});
  check_workspace_limit(*plan);
  log_choice(*plan);
  return plan;
}

int64_t needed_workspace(const Plan& plan, uint32_t op, const flashattn_shape& shape) {
  return is_idle(op, shape) ? 0 : plan.launcher->workspace(op, shape);
}

int64_t workspace_size(const Plan* plan, uint32_t op, const flashattn_shape* shape) {
  check_plan(plan);
  check_op(*plan, op);
  if (shape) {
    check_shape(plan->problem, *shape);
    return needed_workspace(*plan, op, *shape);
  }
  const Promised promised = promised_shape(plan->problem);
  if (promised.missing) {
    reject(FLASHATTN_REASON_SIZE, promised.missing,
           "shape is NULL, but the descriptor did not promise %s; give a shape, or set that field "
           "to the largest size of any call",
           promised.missing);
  }
  return needed_workspace(*plan, op, promised.shape);
}

void plan_info(const Plan* plan, uint32_t op, const flashattn_shape* shape,
               flashattn_plan_properties* properties) {
  check_plan(plan);
  check_op(*plan, op);
  if (shape) check_shape(plan->problem, *shape);
  const Promised promised = promised_shape(plan->problem);
  const flashattn_shape& asked = shape ? *shape : promised.shape;
  const bool known = shape || !promised.missing;

  flashattn_plan_properties own = copy_in(properties, "properties", sizeof(uint32_t));
  own = {};
  describe(*plan, op, known ? Promised{asked, nullptr} : promised, &own);
  own.family = plan->family->name;
  const Cost cost = known ? operation_cost(plan->problem, op, asked) : Cost{0, 0};
  own.flops = cost.flops;
  own.bytes = cost.bytes;
  own.workspace = known ? needed_workspace(*plan, op, asked) : 0;
  if (!known) own.splits = 0;
  copy_out(own, properties);
}

}  // namespace flashattn
