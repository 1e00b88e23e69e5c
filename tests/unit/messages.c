/* Sentences that a newcomer meets: each names the value by what it is called, and what to do. */
#include "fixture.h"

struct sentence {
  size_t offset; /* of the int32_t member of the descriptor that is spoilt */
  int32_t value;
  const char *says[4]; /* each is part of the sentence */
};

#define SPOILT(member, value) offsetof(flashattn_desc, member), value

static const struct sentence sentences[] = {
    {SPOILT(device, 2),
     {"device = 2 is not a kind of device", "FLASHATTN_DEVICE_CPU = 0", "FLASHATTN_DEVICE_CUDA = 1",
      ""}},
    {SPOILT(dtype, FLASHATTN_DTYPE_DEFAULT),
     {"dtype = 0 (FLASHATTN_DTYPE_DEFAULT) is not a type of q, k and v", "required", "BF16 = 3",
      ""}},
    {SPOILT(dtype, FLASHATTN_DTYPE_U8),
     {"dtype = 5 (FLASHATTN_DTYPE_U8) is not a type of q, k and v", "FLASHATTN_DTYPE_F32 = 1",
      "F16 = 2", "BF16 = 3"}},
    {SPOILT(dtype, 7), {"dtype = 7 is not a type of q, k and v", "F8E4M3 = 4", "", ""}},
    {SPOILT(dtype_kv, FLASHATTN_DTYPE_U8),
     {"dtype_kv = 5 (FLASHATTN_DTYPE_U8) is not a type of k and v", "I8 = 6 for a cache", "", ""}},
    {SPOILT(dtype_bias, FLASHATTN_DTYPE_I8),
     {"dtype_bias = 6 (FLASHATTN_DTYPE_I8) is not a type of the dense bias", "U8 = 5", "", ""}},
    {SPOILT(dtype, FLASHATTN_DTYPE_F8E4M3),
     {"dtype_o is F8E4M3", "ops has BACKWARD", "set F32, F16 or BF16", ""}},
    {SPOILT(dtype_o, FLASHATTN_DTYPE_U8),
     {"dtype_o = 5 (FLASHATTN_DTYPE_U8) is not a type of o", "or 0 for the type of q", "", ""}},
    {SPOILT(dtype_o, FLASHATTN_DTYPE_F16),
     {"dtype_o = FLASHATTN_DTYPE_F16 does not go with dtype = FLASHATTN_DTYPE_F32; use "
      "FLASHATTN_DTYPE_F32",
      "", "", ""}},
    {SPOILT(dtype_bias, -1),
     {"dtype_bias = -1 is not a type of the dense bias", "U8 = 5 for a boolean mask", "", ""}},
    {SPOILT(determinism, 3),
     {"determinism = 3 is not a level", "RUN_TO_RUN = 1", "BATCH_INVARIANT = 2", ""}},
    {SPOILT(dim_qk, 1032),
     {"dim_qk = 1032 is above 1024", "heads of at most 1024 elements", "", ""}},
};

static void test_sentences(struct fixture *f) {
  for (size_t i = 0; i < sizeof sentences / sizeof *sentences; ++i) {
    const struct sentence *row = &sentences[i];
    fixture_reset(f, PLAIN);
    memcpy((char *)&f->desc + row->offset, &row->value, sizeof row->value);
    if (!CHECK(flashattn_check(&f->desc, NULL) != FLASHATTN_OK)) continue;
    const char *text = flashattn_last_error(NULL, NULL);
    for (int n = 0; n < 4; ++n) {
      if (!CHECK(strstr(text, row->says[n]))) printf("lacks \"%s\": %s\n", row->says[n], text);
    }
  }
}

static void test_dropout_that_rounds_away(struct fixture *f) {
  fixture_reset(f, PLAIN);
  f->desc.dropout = 7e-6f;
  CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(flashattn_last_error(NULL, NULL), "use 0 for none, or at least 1/65536"));
  f->desc.dropout = 1 / 65536.0f;
  CHECK_OK(flashattn_check(&f->desc, NULL));
  f->desc.dropout = 65535 / 65536.0f;
  CHECK_OK(flashattn_check(&f->desc, NULL));
}

static void test_plan_for_one_operation(struct fixture *f) {
  flashattn_plan *plan = NULL;
  int64_t bytes = 0;
  fixture_reset(f, PAGED);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  const uint32_t op = FLASHATTN_OP_BACKWARD;
  CHECK_STATUS(flashattn_workspace_size(plan, op, &f->forward, &bytes),
               FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(flashattn_last_error(NULL, NULL), "lacks FLASHATTN_OP_BACKWARD = 2; add it"));
  flashattn_plan_destroy(plan);
}

/* Who asks for a GPU that the build cannot serve is told how to make one that can. */
static void test_device_of_another_build(struct fixture *f) {
  fixture_reset(f, PLAIN);
  f->desc.device = FLASHATTN_DEVICE_CUDA;
  f->desc.threads = 0;
  int32_t reason = 0;
  if (flashattn_check(&f->desc, NULL) == FLASHATTN_OK) return; /* a GPU is here */
  const char *text = flashattn_last_error(&reason, NULL);
  if (reason == FLASHATTN_REASON_NO_CUDA_BUILD) {
    CHECK(strstr(text, "./run build --cuda"));
  } else {
    CHECK(reason == FLASHATTN_REASON_NO_DEVICE && strstr(text, "install a driver"));
  }
}

static void test_merge_of_another_type(struct fixture *f) {
  flashattn_plan *plan = NULL;
  fixture_reset(f, PLAIN);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  f->merge.dtype_part = FLASHATTN_DTYPE_BF16;
  CHECK_STATUS(flashattn_merge(plan, &f->merge, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(flashattn_last_error(NULL, NULL), "dtype_part = 3 (FLASHATTN_DTYPE_BF16)"));
  flashattn_plan_destroy(plan);
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 1;
  test_sentences(&f);
  test_dropout_that_rounds_away(&f);
  test_plan_for_one_operation(&f);
  test_device_of_another_build(&f);
  test_merge_of_another_type(&f);
  fixture_close(&f);
  return check_report();
}
