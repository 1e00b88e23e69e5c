/* Every field with bad values: status, reason, field, a sentence, and not one byte written. */
#include "bad_input_rows.h"

static void *target_of(struct fixture *f, enum target target) {
  switch (target) {
    case DESC:
      return &f->desc;
    case BACKWARD:
      return &f->backward;
    case MERGE:
      return &f->merge;
    case CONTENTS:
      return f->in;
    default:
      return &f->forward;
  }
}

static void spoil(struct fixture *f, const struct row *row) {
  char *at = (char *)target_of(f, row->target) + row->offset;
  const int32_t i32 = (int32_t)(row->kind == I32 ? row->value : 0);
  const int64_t i64 = (int64_t)(row->kind == I64 ? row->value : 0);
  const float f32 = (float)row->value;
  char *pointer;
  switch (row->kind) {
    case I32:
      memcpy(at, &i32, sizeof i32);
      break;
    case I64:
      memcpy(at, &i64, sizeof i64);
      break;
    case F32:
      memcpy(at, &f32, sizeof f32);
      break;
    case ADDRESS:
      memcpy(&pointer, at, sizeof pointer);
      if (isnan(row->value)) {
        pointer = NULL;
      } else if (isinf(row->value)) {
        pointer = (char *)f->in;
      } else {
        pointer += (int)row->value;
      }
      memcpy(at, &pointer, sizeof pointer);
      break;
  }
}

static int32_t call(struct fixture *f, const flashattn_plan *plan, enum target target) {
  switch (target) {
    case BACKWARD:
      return flashattn_backward(plan, &f->backward, f->workspace, f->workspace_bytes, f->stream);
    case MERGE:
      return flashattn_merge(plan, &f->merge, f->stream);
    case KEEP:
      return flashattn_dropout_mask(plan, &f->forward, f->out->keep, f->stream);
    default:
      return flashattn_forward(plan, &f->forward, f->workspace, f->workspace_bytes, f->stream);
  }
}

static void check_refusal(const struct fixture *f, const char *name, int32_t status, int32_t wanted,
                          int32_t wanted_reason, const char *wanted_field) {
  int32_t reason;
  const char *field;
  const char *text = flashattn_last_error(&reason, &field);
  const int ok = status == wanted && reason == wanted_reason && strcmp(field, wanted_field) == 0 &&
                 strlen(text) > 20 && outputs_untouched(f);
  if (!ok) {
    printf("%s: %s, reason %d, field %s; wanted %s, %d, %s; outputs %s; %s\n", name,
           flashattn_status_name(status), reason, field, flashattn_status_name(wanted),
           wanted_reason, wanted_field, outputs_untouched(f) ? "untouched" : "WRITTEN", text);
  }
  CHECK(ok);
}

static void test_rows(struct fixture *f) {
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    const struct row *row = &rows[i];
    char name[64];
    snprintf(name, sizeof name, "row %d (%s)", (int)i, row->field);
    fixture_reset(f, row->variant);
    flashattn_plan *plan = NULL;
    if (row->target == DESC) {
      flashattn_plan *const untouched = (flashattn_plan *)f;
      spoil(f, row);
      plan = untouched;
      CHECK(flashattn_check(&f->desc, NULL) == row->status);
      const int32_t status = flashattn_plan_create(&f->desc, &plan, NULL);
      check_refusal(f, name, status, row->status, row->reason, row->field);
      if (status == FLASHATTN_OK) {
        flashattn_plan_destroy(plan);
      } else {
        CHECK(plan == untouched);
      }
      continue;
    }
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) continue;
    spoil(f, row);
    check_refusal(f, name, call(f, plan, row->target), row->status, row->reason, row->field);
    flashattn_plan_destroy(plan);
  }
}

/* The calls that are spoilt above succeed as they stand. */
static void test_baseline(struct fixture *f) {
  const enum variant variants[] = {PLAIN, EVERYTHING, VARLEN, PAGED, STARTS};
  for (int i = 0; i < 5; ++i) {
    fixture_reset(f, variants[i]);
    flashattn_plan *plan = NULL;
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) continue;
    CHECK_OK(flashattn_check(&f->desc, NULL));
    CHECK_OK(call(f, plan, FORWARD));
    if (f->desc.ops & FLASHATTN_OP_BACKWARD) CHECK_OK(call(f, plan, BACKWARD));
    CHECK_OK(call(f, plan, MERGE));
    CHECK_OK(call(f, plan, KEEP));
    flashattn_plan_destroy(plan);
  }
}

/* What no single member can say. */
static void test_calls(struct fixture *f) {
  flashattn_plan *plan = NULL;
  int64_t bytes = 0;
  const int32_t invalid = FLASHATTN_ERROR_INVALID_ARGUMENT;
  fixture_reset(f, PLAIN);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;

  check_refusal(f, "plan NULL", call(f, NULL, FORWARD), invalid, FLASHATTN_REASON_NULL_POINTER,
                "plan");
  check_refusal(f, "args NULL", flashattn_forward(plan, NULL, NULL, 0, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "args NULL", flashattn_backward(plan, NULL, NULL, 0, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "args NULL", flashattn_merge(plan, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "keep NULL", flashattn_dropout_mask(plan, &f->forward, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "keep");
  check_refusal(f, "desc NULL", flashattn_check(NULL, NULL), invalid, FLASHATTN_REASON_NULL_POINTER,
                "desc");
  check_refusal(f, "plan out NULL", flashattn_plan_create(&f->desc, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "plan");
  check_refusal(f, "bytes NULL", flashattn_workspace_size(plan, 1, &f->forward, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "bytes");
  check_refusal(f, "op", flashattn_workspace_size(plan, 3, &f->forward, &bytes), invalid,
                FLASHATTN_REASON_VALUE, "op");
  check_refusal(f, "args NULL", flashattn_workspace_size(plan, 1, NULL, &bytes), invalid,
                FLASHATTN_REASON_SIZE, "max_batch");
  check_refusal(f, "properties NULL", flashattn_plan_info(plan, 1, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "properties");
  check_refusal(f, "log level", flashattn_set_log(4, NULL, NULL), invalid, FLASHATTN_REASON_VALUE,
                "level");
  check_refusal(f, "desc_init", flashattn_desc_init(&f->desc, 3), invalid,
                FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
  check_refusal(f, "desc_init", flashattn_desc_init(NULL, 3), invalid,
                FLASHATTN_REASON_NULL_POINTER, "desc");
  check_refusal(f, "count", flashattn_device_count(0, NULL), invalid, FLASHATTN_REASON_NULL_POINTER,
                "count");
  flashattn_device_properties device = {.struct_size = sizeof device};
  check_refusal(f, "device", flashattn_device_info(9, 0, &device), invalid, FLASHATTN_REASON_VALUE,
                "device");
  check_refusal(f, "device_index", flashattn_device_info(0, 1, &device),
                FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, "index");

  f->stream = f;
  const enum target targets[] = {FORWARD, BACKWARD, MERGE, KEEP};
  for (int i = 0; i < 4; ++i) {
    check_refusal(f, "stream", call(f, plan, targets[i]), invalid, FLASHATTN_REASON_STREAM,
                  "stream");
  }
  f->stream = NULL;
  f->part_lse[1] = NULL;
  check_refusal(f, "part_lse[1]", call(f, plan, MERGE), invalid, FLASHATTN_REASON_NULL_POINTER,
                "part_lse");
  f->part_lse[1] = f->part_lse[0];
  f->part_o[1].stride_seq = -2;
  check_refusal(f, "part_o[1]", call(f, plan, MERGE), invalid, FLASHATTN_REASON_STRIDE,
                "part_o.stride_seq");

  for (int op = 0; op < 2; ++op) {
    const enum target target = op == 0 ? FORWARD : BACKWARD;
    if (!CHECK_OK(flashattn_workspace_size(
            plan, op == 0 ? FLASHATTN_OP_FORWARD : FLASHATTN_OP_BACKWARD, &f->forward, &bytes))) {
      continue;
    }
    CHECK(bytes > 0);
    f->workspace_bytes = bytes - 1;
    check_refusal(f, "workspace", call(f, plan, target), FLASHATTN_ERROR_WORKSPACE,
                  FLASHATTN_REASON_SIZE, "workspace_bytes");
    f->workspace = NULL;
    f->workspace_bytes = bytes;
    check_refusal(f, "workspace", call(f, plan, target), FLASHATTN_ERROR_WORKSPACE,
                  FLASHATTN_REASON_NULL_POINTER, "workspace");
    f->workspace = f->out->workspace;
  }
  flashattn_plan_destroy(plan);

  fixture_reset(f, PAGED);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  check_refusal(f, "op", call(f, plan, BACKWARD), invalid, FLASHATTN_REASON_OP, "ops");
  flashattn_plan_destroy(plan);

  fixture_reset(f, PLAIN);
  f->desc.max_batch = 1;
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  check_refusal(f, "maximum", call(f, plan, FORWARD), invalid, FLASHATTN_REASON_SIZE, "batch");
  flashattn_plan_destroy(plan);

  fixture_reset(f, PLAIN);
  f->desc.device = FLASHATTN_DEVICE_CUDA;
  f->desc.threads = 0;
  int32_t count = -1;
  CHECK_OK(flashattn_device_count(FLASHATTN_DEVICE_CUDA, &count));
  if (count == 0) CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_UNSUPPORTED);
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 1;
  test_baseline(&f);
  test_rows(&f);
  test_calls(&f);
  fixture_close(&f);
  return check_report();
}
