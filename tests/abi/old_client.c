/* A program that was compiled for libflashattn 0.1, whose structures this version does not take: it
 * is refused with a message that says so, and nothing of its memory is written. */
#include "flashattn.h" /* v0.1 */

#include "../unit/check.h"

static void check_refused(int32_t status) {
  int32_t reason = 0;
  const char *field = NULL, *message = flashattn_last_error(&reason, &field);
  CHECK_STATUS(status, FLASHATTN_ERROR_VERSION);
  CHECK(reason == FLASHATTN_REASON_STRUCT_SIZE && strcmp(field, "struct_size") == 0);
  CHECK(strstr(message, "0.1") && strstr(message, "compile the program"));
}

int main(void) {
  flashattn_desc desc;
  CHECK_OK(flashattn_desc_init(&desc, sizeof desc));
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = 2;
  desc.dim_qk = 8;
  flashattn_plan *const untouched = (flashattn_plan *)&desc;
  flashattn_plan *plan = untouched;
  check_refused(flashattn_check(&desc));
  check_refused(flashattn_plan_create(&desc, &plan));
  CHECK(plan == untouched);

  flashattn_device_properties device, before;
  memset(&device, 0, sizeof device);
  device.struct_size = sizeof device;
  before = device;
  check_refused(flashattn_device_info(FLASHATTN_DEVICE_CPU, 0, &device));
  CHECK(memcmp(&device, &before, sizeof device) == 0);
  CHECK(flashattn_version() >= 200);
  return check_report();
}
