/* flashattn_quantize: what it refuses, by field, without a byte written; structures of other sizes;
 * the caller's thread pool and error; and numbers that one works out by hand. */
#include <string.h>

#include "check.h"

enum {
  BATCH = 2,
  HEADS = 3,
  SEQ = 4,
  DIM = 8,
  SIZE = BATCH * HEADS * SEQ * DIM
};

static float in[3][SIZE];
static struct outputs {
  uint8_t x[3][SIZE];
  float descale[3][BATCH * HEADS];
  float mean[BATCH * HEADS * DIM];
  float shift[BATCH * HEADS * SEQ];
} out;
static flashattn_plan *plan;

static flashattn_quantize_args make_args(void) {
  flashattn_quantize_args args;
  CHECK_OK(flashattn_quantize_args_init(&args, sizeof args));
  CHECK(args.q.stride_seq == -1 && args.descale_v.stride_batch == -1);
  CHECK(args.k_mean.stride_head == -1);
  args.batch = BATCH;
  args.seqlen_q = args.seqlen_kv = SEQ;
  args.dtype = FLASHATTN_DTYPE_F32;
  args.transform = FLASHATTN_TRANSFORM_SMOOTH_K;
  flashattn_tensor *const from[] = {&args.q, &args.k, &args.v};
  flashattn_tensor *const to[] = {&args.q_out, &args.k_out, &args.v_out};
  flashattn_tensor *const by[] = {&args.descale_q, &args.descale_k, &args.descale_v};
  for (int n = 0; n < 3; ++n) {
    from[n]->data = in[n];
    to[n]->data = out.x[n];
    by[n]->data = out.descale[n];
  }
  args.k_mean.data = out.mean;
  args.lse_shift = out.shift;
  return args;
}

static void test_numbers(void) {
  for (int n = 0; n < 3; ++n) {
    for (int i = 0; i < SIZE; ++i) in[n][i] = (float)(i % 7 - 3);
  }
  flashattn_quantize_args args = make_args();
  args.transform = 0;
  args.k_mean.data = NULL;
  args.lse_shift = NULL;
  CHECK_OK(flashattn_quantize(plan, &args, NULL));
  for (int n = 0; n < BATCH * HEADS; ++n) CHECK(out.descale[1][n] == 3 / 448.0f);
  /* 3, 2, 1 times 448 / 3: 448, 298.7 to 288, 149.3 to 144. */
  static const uint8_t codes[] = {0xfe, 0xf9, 0xf1, 0, 0x71, 0x79, 0x7e};
  for (int i = 0; i < SIZE; ++i) {
    if (!CHECK(out.x[2][i] == codes[i % 7])) break;
  }
}

static void refused(const flashattn_quantize_args *args, void *stream, int32_t status,
                    int32_t wanted_reason, const char *wanted_field) {
  struct outputs before;
  memset(&out, 0xa5, sizeof out);
  memcpy(&before, &out, sizeof out);
  int32_t reason;
  const char *field;
  CHECK_STATUS(flashattn_quantize(plan, args, stream), status);
  const char *text = flashattn_last_error(&reason, &field);
  if (!CHECK(reason == wanted_reason && strcmp(field, wanted_field) == 0)) {
    printf("  %d, %s; wanted %d, %s: %s\n", reason, field, wanted_reason, wanted_field, text);
  }
  CHECK(memcmp(&before, &out, sizeof out) == 0);
}

#define REFUSED(change, reason, field)                                                        \
  do {                                                                                        \
    flashattn_quantize_args args = make_args();                                               \
    change;                                                                                   \
    refused(&args, NULL, FLASHATTN_ERROR_INVALID_ARGUMENT, FLASHATTN_REASON_##reason, field); \
  } while (0)

static void test_refusals(void) {
  REFUSED(args.dtype = 0, DTYPE, "dtype");
  REFUSED(args.dtype = FLASHATTN_DTYPE_F8E4M3, DTYPE, "dtype");
  REFUSED(args.transform = 4, VALUE, "transform");
  REFUSED(args.rotation_seed = 1, VALUE, "rotation_seed");
  REFUSED(args.batch = -1, SIZE, "batch");
  REFUSED(args.total_q = 3, SIZE, "total_q");
  REFUSED(args.cu_seqlens_q = (const int32_t *)(const void *)in, NULL_POINTER, "cu_seqlens_q");
  REFUSED(args.q_out.data = NULL, NULL_POINTER, "q_out.data");
  REFUSED(args.descale_k.data = NULL, NULL_POINTER, "descale_k.data");
  REFUSED(args.k_mean.data = NULL, NULL_POINTER, "k_mean.data");
  REFUSED(args.transform = 0, NULL_POINTER, "k_mean.data");
  REFUSED(args.v.data = NULL, NULL_POINTER, "v_out.data");
  REFUSED((args.v.data = NULL, args.v_out.data = NULL), NULL_POINTER, "descale_v.data");
  REFUSED(args.k_out.data = out.x[0], OVERLAP, "q_out.data");
  REFUSED(args.v_out.stride_head = 0, STRIDE, "v_out.stride_head");
  REFUSED(args.descale_v.data = (char *)out.descale[2] + 2, MISALIGNED, "descale_v.data");
  REFUSED(args.parallel_user = in, NULL_POINTER, "parallel_user");
  flashattn_quantize_args args = make_args();
  refused(&args, in, FLASHATTN_ERROR_INVALID_ARGUMENT, FLASHATTN_REASON_STREAM, "stream");
  args.struct_size = 8;
  refused(&args, NULL, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
  CHECK_STATUS(flashattn_quantize(plan, NULL, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK_STATUS(flashattn_quantize(NULL, &args, NULL), FLASHATTN_ERROR_VERSION);
}

/* A later header's structure is taken if what is new in it is zero. */
static void test_sizes(void) {
  struct {
    flashattn_quantize_args args;
    int64_t later[16];
  } room = {make_args(), {0}};
  room.args.struct_size = sizeof room;
  CHECK_OK(flashattn_quantize(plan, &room.args, NULL));
  room.later[15] = 1;
  refused(&room.args, NULL, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
}

static int tasks_run;

static void one_by_one(void *user, int32_t count, flashattn_task_fn task, void *context) {
  CHECK(user == &tasks_run);
  for (int32_t n = 0; n < count; ++n) task(context, n);
  tasks_run += count;
}

/* Work enough that threads are asked for. */
static void test_caller(void) {
  enum {
    LONG = 16384
  };
  static float wide[LONG * DIM * HEADS];
  static uint8_t narrow[LONG * DIM * HEADS];
  static float descale[HEADS];
  for (int i = 0; i < LONG * DIM * HEADS; ++i) wide[i] = (float)(i % 5);
  flashattn_error error = {.struct_size = sizeof error};
  flashattn_quantize_args args;
  CHECK_OK(flashattn_quantize_args_init(&args, sizeof args));
  args.batch = 1;
  args.seqlen_kv = LONG;
  args.dtype = FLASHATTN_DTYPE_F32;
  args.v.data = wide;
  args.v_out.data = narrow;
  args.descale_v.data = descale;
  args.parallel = one_by_one;
  args.parallel_user = &tasks_run;
  args.error = &error;
  CHECK_OK(flashattn_quantize(plan, &args, NULL));
  CHECK(tasks_run > 0 && descale[2] == 4 / 448.0f && narrow[4] == 0x7e && error.status == 0);
  args.dtype = 9;
  CHECK(flashattn_quantize(plan, &args, NULL) == error.status);
  CHECK(error.reason == FLASHATTN_REASON_DTYPE && strcmp(error.field, "dtype") == 0);
}

int main(void) {
  flashattn_desc desc = {.struct_size = sizeof desc};
  desc.dtype = FLASHATTN_DTYPE_F8E4M3;
  desc.heads_q = HEADS;
  desc.dim_qk = DIM;
  CHECK_OK(flashattn_plan_create(&desc, &plan, NULL));
  test_numbers();
  test_refusals();
  test_sizes();
  test_caller();
  flashattn_plan_destroy(plan);
  return check_report();
}
