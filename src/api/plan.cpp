// The C functions that create and query plans.
#include "core/plan.h"

#include <optional>

#include "api/guard.h"
#include "core/copy_in.h"
#include "core/validate_args.h"

using namespace flashattn;

namespace {

// Returns the shape of the arguments; args may be NULL: no shape.
std::optional<Shape> sizes_of(const flashattn_args* args, ErrorOut& out) {
  if (!args) return {};
  const flashattn_args own = copy_in(args, "args");
  out.set(own.error);
  return shape_of(own);
}

}  // namespace

int32_t flashattn_desc_init(flashattn_desc* desc, uint32_t struct_size) {
  return guard("flashattn_desc_init", [&](ErrorOut&) {
    init_struct(desc, "desc", struct_size);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_check(const flashattn_desc* desc, flashattn_error* error) {
  return guard("flashattn_check", [&](ErrorOut& out) {
    const flashattn_desc own = copy_in(desc, "desc");
    out.set(error);
    make_plan(own);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_plan_create(const flashattn_desc* desc, flashattn_plan** plan,
                              flashattn_error* error) {
  return guard("flashattn_plan_create", [&](ErrorOut& out) {
    const flashattn_desc own = copy_in(desc, "desc");
    out.set(error);
    check_address(plan, "plan");
    *plan = make_plan(own).release();
    return FLASHATTN_OK;
  });
}

void flashattn_plan_destroy(flashattn_plan* plan) { delete plan; }

int32_t flashattn_plan_desc(const flashattn_plan* plan, flashattn_desc* desc) {
  return guard("flashattn_plan_desc", [&](ErrorOut&) {
    check_plan(plan);
    copy_in(desc, "desc");
    copy_out<flashattn_desc>(plan->problem, desc);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_plan_info(const flashattn_plan* plan, uint32_t op, const flashattn_args* args,
                            flashattn_plan_properties* properties) {
  return guard("flashattn_plan_info", [&](ErrorOut& out) {
    const std::optional<Shape> shape = sizes_of(args, out);
    flashattn_plan_properties own = copy_in(properties, "properties");
    plan_info(plan, op, shape ? &*shape : nullptr, &own);
    copy_out(own, properties);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_workspace_size(const flashattn_plan* plan, uint32_t op,
                                 const flashattn_args* args, int64_t* bytes) {
  return guard("flashattn_workspace_size", [&](ErrorOut& out) {
    const std::optional<Shape> shape = sizes_of(args, out);
    check_address(bytes, "bytes");
    *bytes = workspace_size(plan, op, shape ? &*shape : nullptr);
    return FLASHATTN_OK;
  });
}
