/* A later library fills every member of this header's structures, and writes nothing behind
 * them. */
#include "../../unit/check.h"

enum {
  ROOM = 64
};

static int is_untouched(const unsigned char *bytes) {
  int same = 1;
  for (int n = 0; n < ROOM; ++n) same &= bytes[n] == 0xA5;
  return same;
}

int main(void) {
  struct {
    flashattn_device_properties info;
    unsigned char behind[ROOM];
  } device;
  memset(&device, 0xA5, sizeof device);
  device.info.struct_size = sizeof device.info;
  CHECK_OK(flashattn_device_info(FLASHATTN_DEVICE_CPU, 0, &device.info));
  CHECK(device.info.threads >= 1 && strlen(device.info.name) > 0 && is_untouched(device.behind));

  struct {
    flashattn_desc desc;
    unsigned char behind[ROOM];
  } seen;
  memset(&seen, 0xA5, sizeof seen);
  CHECK_OK(flashattn_desc_init(&seen.desc, sizeof seen.desc));
  seen.desc.dtype = FLASHATTN_DTYPE_F32;
  seen.desc.heads_q = 2;
  seen.desc.dim_qk = 16;
  flashattn_plan *plan = NULL;
  if (!CHECK_OK(flashattn_plan_create(&seen.desc, &plan, NULL))) return check_report();
  CHECK_OK(flashattn_plan_desc(plan, &seen.desc));
  CHECK(seen.desc.heads_kv == 2 && seen.desc.dim_v == 16 && is_untouched(seen.behind));

  struct {
    flashattn_plan_properties info;
    unsigned char behind[ROOM];
  } chosen;
  memset(&chosen, 0xA5, sizeof chosen);
  chosen.info.struct_size = sizeof chosen.info;
  flashattn_args args;
  CHECK_OK(flashattn_args_init(&args, sizeof args));
  args.batch = 1;
  args.seqlen_q = args.seqlen_kv = 10;
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &args, &chosen.info));
  CHECK(chosen.info.flops == 10 * 10 * 2 * 2 * (16 + 16) && strlen(chosen.info.why) > 0);
  CHECK(chosen.info.struct_size == sizeof chosen.info && is_untouched(chosen.behind));
  flashattn_plan_destroy(plan);
  return check_report();
}
