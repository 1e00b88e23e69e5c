/* Structures of older and newer headers: smaller, larger with a zero tail, larger with something in
 * the tail, zero, too small, garbage; what the init functions and the out structures do; errors in
 * memory of the caller's. */
#include "fixture.h"

/* A structure with room behind it, as a newer header would have it. */
union room {
  flashattn_desc desc;
  flashattn_args args;
  flashattn_merge_args merge;
  flashattn_device_properties device;
  flashattn_plan_properties plan;
  unsigned char bytes[2048];
};

/* Sizes in 0.2.0. */
enum {
  DESC = 160,
  ARGS = 704,
  MERGE = 112,
  DEVICE = 48,
  PLAN = 96
};

static struct fixture f;
static flashattn_plan *plan;

static int32_t call_desc(union room *r) { return flashattn_check(&r->desc, NULL); }
static int32_t call_forward(union room *r) {
  return flashattn_forward(plan, &r->args, f.workspace, f.workspace_bytes, NULL);
}
static int32_t call_keep(union room *r) {
  return flashattn_dropout_mask(plan, &r->args, f.out->keep, NULL);
}
static int32_t call_backward(union room *r) {
  return flashattn_backward(plan, &r->args, f.workspace, f.workspace_bytes, NULL);
}
static int32_t call_merge(union room *r) { return flashattn_merge(plan, &r->merge, NULL); }
static int32_t call_device(union room *r) { return flashattn_device_info(0, 0, &r->device); }
static int32_t call_info(union room *r) {
  return flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &f.forward, &r->plan);
}

struct version {
  const char *name;
  int32_t (*call)(union room *);
  const void *valid;
  uint32_t size;  /* of this header */
  uint32_t first; /* of 0.2.0: what is below is refused */
};

static void test_version(const struct version *v) {
  const struct {
    uint32_t size;
    int tail; /* byte just past this header's structure */
    int32_t status;
  } rows[] = {
      {v->size, 0, FLASHATTN_OK},
      {v->size, 1, FLASHATTN_OK}, /* not part of the structure */
      {v->first, 0, FLASHATTN_OK},
      {v->size + 64, 0, FLASHATTN_OK},
      {v->size + 64, 1, FLASHATTN_ERROR_VERSION},
      {v->size + 1, 1, FLASHATTN_ERROR_VERSION},
      {0, 0, FLASHATTN_ERROR_VERSION},
      {3, 0, FLASHATTN_ERROR_VERSION},
      {v->first - 1, 0, FLASHATTN_ERROR_VERSION},
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

/* What lies behind a structure is neither read nor written: with one of 0.2.0, whatever this version
 * has behind it. */
static void test_smaller(void) {
  union room room;
  memset(&room, 0xFF, sizeof room);
  memcpy(&room, &f.desc, DESC);
  room.desc.struct_size = DESC;
  CHECK_OK(flashattn_check(&room.desc, NULL));

  memset(&room, 0xFF, sizeof room);
  room.device.struct_size = DEVICE;
  CHECK_OK(flashattn_device_info(FLASHATTN_DEVICE_CPU, 0, &room.device));
  CHECK(room.device.threads >= 1 && strlen(room.device.name) > 0);
  for (size_t i = DEVICE; i < sizeof room; ++i) {
    if (!CHECK(room.bytes[i] == 0xFF)) break;
  }

  memset(&room, 0xFF, sizeof room);
  CHECK_OK(flashattn_desc_init(&room.desc, 40));
  CHECK(room.desc.struct_size == 40 && room.desc.dtype == 0 && room.bytes[39] == 0);
  CHECK(room.bytes[40] == 0xFF);

  /* Strides as far as the structure goes. */
  const uint32_t size = offsetof(flashattn_args, k) + 8;
  memset(&room, 0xA5, sizeof room);
  CHECK_OK(flashattn_args_init(&room.args, size));
  CHECK(room.args.struct_size == size && room.args.q.data == NULL);
  CHECK(room.args.q.stride_batch == -1 && room.args.q.stride_seq == -1);
  CHECK(room.args.k.data == NULL && room.bytes[size] == 0xA5);
}

/* The descriptor with its defaults, and what the caller does not have of it. */
static void test_plan_desc(void) {
  flashattn_desc desc = {.struct_size = sizeof desc};
  CHECK_OK(flashattn_plan_desc(plan, &desc));
  CHECK(desc.heads_kv == HEADS_KV && desc.dim_v == DIM_V && desc.dtype_o == FLASHATTN_DTYPE_F32);
  CHECK(desc.dtype_kv == FLASHATTN_DTYPE_F32 && desc.scale > 0.35f && desc.scale < 0.36f);
  CHECK(desc.struct_size == sizeof desc);
  CHECK_STATUS(flashattn_plan_desc(NULL, &desc), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK_STATUS(flashattn_plan_desc(plan, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
}

/* The caller's own error. */
static void test_error(void) {
  flashattn_error error = {.struct_size = sizeof error}, none = error;
  CHECK_OK(flashattn_check(&f.desc, &error));
  CHECK(memcmp(&error, &none, sizeof error) == 0);
  flashattn_desc desc = f.desc;
  desc.heads_q = -3;
  CHECK(flashattn_check(&desc, &error) == error.status);
  CHECK_STATUS(error.status, FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(error.reason == FLASHATTN_REASON_SIZE && strcmp(error.field, "heads_q") == 0);
  CHECK(strcmp(error.message, flashattn_last_error(NULL, NULL)) == 0);
  CHECK(strstr(error.message, "-3") != NULL);

  flashattn_args args = f.forward;
  args.error = &error;
  args.batch = -1;
  CHECK(flashattn_forward(plan, &args, f.workspace, f.workspace_bytes, NULL) == error.status);
  CHECK(error.reason == FLASHATTN_REASON_SIZE && strcmp(error.field, "batch") == 0);
  int64_t bytes = 0;
  error = none;
  CHECK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &args, &bytes) == error.status);
  CHECK(error.status != FLASHATTN_OK && strcmp(error.field, "batch") == 0);
  args.batch = BATCH;
  error.struct_size = 100;
  none = error;
  CHECK_STATUS(flashattn_forward(plan, &args, f.workspace, f.workspace_bytes, NULL),
               FLASHATTN_ERROR_VERSION);
  CHECK(memcmp(&error, &none, sizeof error) == 0);

  /* A later header's, larger: taken if what is new in it is zero, and that is not written. */
  struct {
    flashattn_error error;
    int64_t later[8];
  } room = {{.struct_size = sizeof room}, {0}}, untouched = room;
  CHECK_STATUS(flashattn_check(&desc, &room.error), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(strcmp(room.error.field, "heads_q") == 0 && room.later[0] == 0);
  untouched.later[7] = 1;
  room = untouched;
  CHECK_STATUS(flashattn_check(&desc, &room.error), FLASHATTN_ERROR_VERSION);
  CHECK(memcmp(&room, &untouched, sizeof room) == 0);
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
      {"desc", call_desc, &f.desc, sizeof f.desc, DESC},
      {"args", call_forward, &f.forward, sizeof f.forward, ARGS},
      {"args of dropout_mask", call_keep, &f.forward, sizeof f.forward, ARGS},
      {"args of backward", call_backward, &f.backward, sizeof f.backward, ARGS},
      {"merge_args", call_merge, &f.merge, sizeof f.merge, MERGE},
      {"device_properties", call_device, &device, sizeof device, DEVICE},
      {"plan_properties", call_info, &info, sizeof info, PLAN},
  };
  for (size_t i = 0; i < sizeof versions / sizeof *versions; ++i) test_version(&versions[i]);
  test_smaller();
  test_plan_desc();
  test_error();
  flashattn_plan_destroy(plan);
  fixture_close(&f);
  return check_report();
}
