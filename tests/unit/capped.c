/* Softcapped calls in memory that nobody has written: under valgrind, which this is for, a decision
   by a number that no one computed is an error. */
#include "fixture.h"

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 2;
  for (int ops = FLASHATTN_OP_FORWARD; ops <= 3; ops += FLASHATTN_OP_BACKWARD) {
    flashattn_plan *plan = NULL;
    fixture_reset(&f, PLAIN);
    f.desc.ops = (uint32_t)ops;
    f.desc.softcap = 5;
    f.workspace = malloc((size_t)f.workspace_bytes);
    if (!CHECK_OK(flashattn_plan_create(&f.desc, &plan, NULL)) || !CHECK(f.workspace)) break;
    CHECK_OK(flashattn_forward(plan, &f.forward, f.workspace, f.workspace_bytes, NULL));
    free(f.workspace);
    f.workspace = malloc((size_t)f.workspace_bytes);
    if (ops & FLASHATTN_OP_BACKWARD) {
      CHECK_OK(flashattn_backward(plan, &f.backward, f.workspace, f.workspace_bytes, NULL));
    }
    free(f.workspace);
    flashattn_plan_destroy(plan);
  }
  fixture_close(&f);
  return check_report();
}
