// The C functions that make and question plans.
#include "core/plan.h"

#include "api/guard.h"
#include "core/copy_in.h"

using namespace flashattn;

int32_t flashattn_desc_init(flashattn_desc* desc, uint32_t struct_size) {
  return guard("flashattn_desc_init", [&] {
    init_struct(desc, "desc", struct_size);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_check(const flashattn_desc* desc) {
  return guard("flashattn_check", [&] {
    make_plan(desc);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_plan_create(const flashattn_desc* desc, flashattn_plan** plan) {
  return guard("flashattn_plan_create", [&] {
    check_address(plan, "plan");
    *plan = make_plan(desc).release();
    return FLASHATTN_OK;
  });
}

void flashattn_plan_destroy(flashattn_plan* plan) { delete plan; }

int32_t flashattn_plan_info(const flashattn_plan* plan, uint32_t op, const flashattn_shape* shape,
                            flashattn_plan_properties* properties) {
  return guard("flashattn_plan_info", [&] {
    plan_info(plan, op, shape, properties);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_workspace_size(const flashattn_plan* plan, uint32_t op,
                                 const flashattn_shape* shape, int64_t* bytes) {
  return guard("flashattn_workspace_size", [&] {
    check_address(bytes, "bytes");
    *bytes = workspace_size(plan, op, shape);
    return FLASHATTN_OK;
  });
}
