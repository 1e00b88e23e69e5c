/* Structures of older and newer headers: smaller, larger with a zero tail, larger with something in
 * the tail, zero, too small, garbage; and what desc_init and the out structures do. */
#include "fixture.h"

/* A structure with room behind it, as a newer header would have it. */
union room {
  flashattn_desc desc;
  flashattn_args forward;
  flashattn_args backward;
  flashattn_merge_args merge;
  flashattn_device_properties device;
  flashattn_plan_properties plan;
  unsigned char bytes[2048];
};

static struct fixture f;
static flashattn_plan *plan;

static int32_t call_desc(union room *r) { return flashattn_check(&r->desc, NULL); }
static int32_t call_forward(union room *r) {
  return flashattn_forward(plan, &r->forward, f.workspace, f.workspace_bytes, NULL);
}
static int32_t call_keep(union room *r) {
  return flashattn_dropout_mask(plan, &r->forward, f.out->keep, NULL);
}
static int32_t call_backward(union room *r) {
  return flashattn_backward(plan, &r->backward, f.workspace, f.workspace_bytes, NULL);
}
static int32_t call_merge(union room *r) { return flashattn_merge(plan, &r->merge, NULL); }
static int32_t call_device(union room *r) { return flashattn_device_info(0, 0, &r->device); }
static int32_t call_info(union room *r) {
  return flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &f.forward.shape, &r->plan);
}

struct version {
  const char *name;
  int32_t (*call)(union room *);
  const void *valid;
  uint32_t size;    /* of this header */
  uint32_t smaller; /* an older one that still has all that the call needs */
  uint32_t needed;  /* below this: refused */
};

static void test_version(const struct version *v) {
  const struct {
    uint32_t size;
    int tail; /* byte just past this header's structure */
    int32_t status;
  } rows[] = {
      {v->size, 0, FLASHATTN_OK},
      {v->size, 1, FLASHATTN_OK}, /* not part of the structure */
      {v->smaller, 0, FLASHATTN_OK},
      {v->size + 64, 0, FLASHATTN_OK},
      {v->size + 64, 1, FLASHATTN_ERROR_VERSION},
      {v->size + 1, 1, FLASHATTN_ERROR_VERSION},
      {0, 0, FLASHATTN_ERROR_VERSION},
      {3, 0, FLASHATTN_ERROR_VERSION},
      {v->needed - 1, 0, FLASHATTN_ERROR_VERSION},
      {0xffffffffu, 0, FLASHATTN_ERROR_VERSION},
      {4097, 0, FLASHATTN_ERROR_VERSION},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    union room room;
    memset(&room, 0, sizeof room);
    memcpy(&room, v->valid, v->size);
    memcpy(&room, &rows[i].size, sizeof rows[i].size);
    room.bytes[v->size] = (unsigned char)rows[i].tail;
    memset(f.out, 0xA5, sizeof *f.out);
    if (rows[i].status != FLASHATTN_OK) {
      const union room before = room;
      int32_t reason;
      const char *field;
      CHECK_STATUS(v->call(&room), rows[i].status);
      flashattn_last_error(&reason, &field);
      CHECK(reason == FLASHATTN_REASON_STRUCT_SIZE && strcmp(field, "struct_size") == 0);
      CHECK(outputs_untouched(&f) && memcmp(&room, &before, sizeof room) == 0);
    } else if (!CHECK_OK(v->call(&room))) {
      printf("  %s with struct_size %u\n", v->name, rows[i].size);
    }
  }
}

/* What lies behind a smaller structure is not read, nor written. */
static void test_smaller(void) {
  union room room;
  memset(&room, 0xFF, sizeof room);
  const uint32_t size = offsetof(flashattn_desc, dim_v);
  memcpy(&room, &f.desc, size);
  memcpy(&room, &size, sizeof size);
  room.desc.ops = FLASHATTN_OP_FORWARD;
  CHECK_OK(flashattn_check(&room.desc, NULL));

  memset(&room, 0xFF, sizeof room);
  room.device.struct_size = offsetof(flashattn_device_properties, isa);
  CHECK_OK(flashattn_device_info(FLASHATTN_DEVICE_CPU, 0, &room.device));
  CHECK(room.device.units >= 1 && strlen(room.device.name) > 0);
  for (size_t i = offsetof(flashattn_device_properties, isa); i < sizeof room; ++i) {
    if (!CHECK(room.bytes[i] == 0xFF)) break;
  }

  memset(&room, 0xFF, sizeof room);
  CHECK_OK(flashattn_desc_init(&room.desc, 40));
  CHECK(room.desc.struct_size == 40 && room.desc.dtype == 0 && room.bytes[39] == 0);
  CHECK(room.bytes[40] == 0xFF);
}

int main(void) {
  if (!fixture_open(&f)) return 1;
  fixture_reset(&f, PLAIN);
  f.desc.features = 0;
  if (!CHECK_OK(flashattn_plan_create(&f.desc, &plan, NULL))) return check_report();
  f.forward.lse = NULL;
  const flashattn_device_properties device = {.struct_size = sizeof device};
  const flashattn_plan_properties info = {.struct_size = sizeof info};
  const struct version versions[] = {
      {"desc", call_desc, &f.desc, sizeof f.desc, offsetof(flashattn_desc, threads),
       offsetof(flashattn_desc, dim_v)},
      {"forward_args", call_forward, &f.forward, sizeof f.forward,
       offsetof(flashattn_args, lse), offsetof(flashattn_args, lse)},
      {"forward_args of dropout_mask", call_keep, &f.forward, sizeof f.forward,
       offsetof(flashattn_args, inputs), offsetof(flashattn_args, inputs)},
      {"backward_args", call_backward, &f.backward, sizeof f.backward,
       offsetof(flashattn_args, dbias), offsetof(flashattn_args, dbias)},
      {"merge_args", call_merge, &f.merge, sizeof f.merge, offsetof(flashattn_merge_args, lse),
       offsetof(flashattn_merge_args, lse)},
      {"device_properties", call_device, &device, sizeof device, 4, 4},
      {"plan_properties", call_info, &info, sizeof info, offsetof(flashattn_plan_properties, flops),
       4},
  };
  for (size_t i = 0; i < sizeof versions / sizeof *versions; ++i) test_version(&versions[i]);
  test_smaller();
  flashattn_plan_destroy(plan);
  fixture_close(&f);
  return check_report();
}
