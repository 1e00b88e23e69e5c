/* flashattn_append_kv: numbers that one works out by hand, lengths incremented in place, and what it
 * refuses, by field, without a byte written. */
#include <math.h>
#include <string.h>

#include "check.h"

enum {
  BATCH = 2,
  HEADS_Q = 4,
  HEADS = 2,
  NEW = 2,
  ROWS = 6,
  DIM = 4,
  TOKENS = BATCH * NEW * HEADS * DIM
};

static float q[BATCH * NEW * HEADS_Q * DIM], k[TOKENS], v[TOKENS];
static int32_t before[BATCH];
static struct outputs {
  float q[BATCH * NEW * HEADS_Q * DIM];
  float cache[2][BATCH * ROWS * HEADS * DIM];
  int32_t lens[BATCH];
} out;
static flashattn_plan *plan;

static flashattn_append_kv_args make_args(void) {
  flashattn_append_kv_args args;
  CHECK_OK(flashattn_append_kv_args_init(&args, sizeof args));
  CHECK(args.q.stride_seq == -1 && args.page_table.stride_batch == -1);
  CHECK(args.rotary_sin.stride_seq == -1 && args.descale_v.stride_head == -1);
  args.batch = BATCH;
  args.seqlen_q = NEW;
  args.seqlen_kv = ROWS;
  args.rotary_dim = 2;
  args.rotary_base = 10000.0f;
  before[0] = 0;
  before[1] = 3;
  args.lens_kv = before;
  args.lens_out = out.lens;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.q_out.data = out.q;
  args.k_cache.data = out.cache[0];
  args.v_cache.data = out.cache[1];
  return args;
}

static void test_numbers(void) {
  for (int n = 0; n < TOKENS; ++n) {
    k[n] = (float)(n % 4);
    v[n] = (float)n;
  }
  for (int n = 0; n < BATCH * NEW * HEADS_Q * DIM; ++n) q[n] = (float)(n % 4 == 0);
  memset(&out, 0xa5, sizeof out);
  const struct outputs untouched = out;
  flashattn_append_kv_args args = make_args();
  CHECK_OK(flashattn_append_kv(plan, &args, NULL));
  CHECK(out.lens[0] == 2 && out.lens[1] == 5 && before[1] == 3);
  for (int b = 0; b < BATCH; ++b) {
    const int row = HEADS * DIM, first = b * ROWS + before[b];
    for (int i = 0; i < NEW; ++i) {
      /* The only pair is (x[0], x[1]), by an angle of one radian a position. */
      const double angle = before[b] + i;
      const float *turned = out.cache[0] + (first + i) * row, *given = v + (b * NEW + i) * row;
      CHECK(fabs(turned[0] + sin(angle)) < 1e-6 && fabs(turned[1] - cos(angle)) < 1e-6);
      CHECK(turned[2] == 2 && turned[3] == 3);
      CHECK(memcmp(out.cache[1] + (first + i) * row, given, row * sizeof(float)) == 0);
      const float *query = out.q + (b * NEW + i) * HEADS_Q * DIM;
      CHECK(fabs(query[12] - cos(angle)) < 1e-6 && fabs(query[13] - sin(angle)) < 1e-6);
    }
    for (int n = 0; n < 2; ++n) {
      for (int j = 0; j < ROWS; ++j) {
        if (j >= before[b] && j < before[b] + NEW) continue;
        const int at = (b * ROWS + j) * row;
        CHECK(memcmp(out.cache[n] + at, untouched.cache[n] + at, row * sizeof(float)) == 0);
      }
    }
  }
}

/* Three calls with the same arguments: a token more each time. */
static void test_increments(void) {
  flashattn_append_kv_args args = make_args();
  args.seqlen_q = 1;
  args.q.stride_batch = args.k.stride_batch = args.v.stride_batch = -1;
  args.q_out.data = q;
  args.lens_out = before;
  for (int n = 1; n <= 3; ++n) {
    CHECK_OK(flashattn_append_kv(plan, &args, NULL));
    CHECK(before[0] == n && before[1] == 3 + n);
  }
  CHECK_STATUS(flashattn_append_kv(plan, &args, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(before[0] == 3 && before[1] == 6);
}

static void refused(const flashattn_append_kv_args *args, void *stream, int32_t status,
                    int32_t wanted_reason, const char *wanted_field) {
  struct outputs held;
  memset(&out, 0xa5, sizeof out);
  memcpy(&held, &out, sizeof out);
  int32_t reason;
  const char *field;
  CHECK_STATUS(flashattn_append_kv(plan, args, stream), status);
  const char *text = flashattn_last_error(&reason, &field);
  if (!CHECK(reason == wanted_reason && strcmp(field, wanted_field) == 0)) {
    printf("  %d, %s; wanted %d, %s: %s\n", reason, field, wanted_reason, wanted_field, text);
  }
  CHECK(memcmp(&held, &out, sizeof out) == 0);
}

#define REFUSED(change, reason, field)                                                        \
  do {                                                                                        \
    flashattn_append_kv_args args = make_args();                                              \
    change;                                                                                   \
    refused(&args, NULL, FLASHATTN_ERROR_INVALID_ARGUMENT, FLASHATTN_REASON_##reason, field); \
  } while (0)

static void test_refusals(void) {
  static const float table[16];
  flashattn_tensor with = {(void *)(uintptr_t)table, -1, -1, -1};
  REFUSED(args.batch = -1, SIZE, "batch");
  REFUSED(args.total_q = 3, SIZE, "total_q");
  REFUSED(args.dtype = FLASHATTN_DTYPE_F16, DTYPE_MIX, "dtype");
  REFUSED(args.dtype = FLASHATTN_DTYPE_F8E4M3, DTYPE, "dtype");
  REFUSED(args.rotary = 2, VALUE, "rotary");
  REFUSED((args.rotary = 1, args.rotary_dim = 0), VALUE, "rotary");
  REFUSED(args.dtype_rotary = FLASHATTN_DTYPE_F16, DTYPE, "dtype_rotary");
  REFUSED(args.rotary_dim = 3, SIZE, "rotary_dim");
  REFUSED(args.rotary_dim = 6, SIZE, "rotary_dim");
  REFUSED(args.rotary_base = 0, VALUE, "rotary_base");
  REFUSED(args.rotary_base = INFINITY, VALUE, "rotary_base");
  REFUSED(args.rotary_dim = 0, NULL_POINTER, "q.data");
  REFUSED((args.rotary_dim = 0, args.q.data = NULL, args.q_out.data = NULL), VALUE, "rotary_base");
  REFUSED(args.rotary_sin = with, NULL_POINTER, "rotary_sin.data");
  REFUSED((args.rotary_cos = with, args.rotary_positions = 16), VALUE, "rotary_base");
  REFUSED((args.rotary_cos = with, args.rotary_base = 0), SIZE, "rotary_positions");
  REFUSED(args.rotary_positions = 16, SIZE, "rotary_positions");
  REFUSED((args.rotary_cos = with, args.rotary_base = 0, args.rotary_positions = 16), NULL_POINTER,
          "rotary_sin.data");
  REFUSED(
      (args.rotary_cos = args.rotary_sin = with, args.rotary_base = 0, args.rotary_positions = 4),
      LENGTHS, "lens_kv");
  REFUSED(args.dtype_rotary = FLASHATTN_DTYPE_U8, DTYPE, "dtype_rotary");
  REFUSED(args.lens_kv = NULL, NULL_POINTER, "lens_kv");
  REFUSED(before[1] = 5, LENGTHS, "lens_kv");
  REFUSED(before[1] = -1, LENGTHS, "lens_kv");
  REFUSED(args.cu_seqlens_q = before, NULL_POINTER, "cu_seqlens_q");
  REFUSED(args.page_table = with, NULL_POINTER, "page_table.data");
  REFUSED(args.pages = 1, VALUE, "pages");
  REFUSED(args.q_out.data = NULL, NULL_POINTER, "q_out.data");
  REFUSED(args.k.data = NULL, NULL_POINTER, "k_cache.data");
  REFUSED(args.v_cache.data = NULL, NULL_POINTER, "v_cache.data");
  REFUSED((args.k.data = args.v.data = args.k_cache.data = args.v_cache.data = NULL), NULL_POINTER,
          "lens_out");
  REFUSED(args.descale_k.data = v, NULL_POINTER, "descale_k.data");
  REFUSED(args.v_cache.data = out.cache[0], OVERLAP, "k_cache.data");
  REFUSED(args.lens_out = (int32_t *)(void *)out.cache[1], OVERLAP, "lens_out");
  REFUSED((args.q_out.data = q, args.q_out.stride_seq = 32), STRIDE, "q_out.stride_batch");
  REFUSED(args.v_cache.stride_head = 0, STRIDE, "v_cache.stride_head");
  REFUSED(args.k_cache.data = (char *)out.cache[0] + 2, MISALIGNED, "k_cache.data");
  REFUSED(args.parallel_user = q, NULL_POINTER, "parallel_user");
  flashattn_append_kv_args args = make_args();
  refused(&args, q, FLASHATTN_ERROR_INVALID_ARGUMENT, FLASHATTN_REASON_STREAM, "stream");
  args.struct_size = 8;
  refused(&args, NULL, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
  CHECK_STATUS(flashattn_append_kv(plan, NULL, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK_STATUS(flashattn_append_kv(NULL, &args, NULL), FLASHATTN_ERROR_VERSION);
}

/* A later header's structure is taken if what is new in it is zero. */
static void test_sizes(void) {
  struct {
    flashattn_append_kv_args args;
    int64_t later[16];
  } room = {make_args(), {0}};
  room.args.struct_size = sizeof room;
  CHECK_OK(flashattn_append_kv(plan, &room.args, NULL));
  room.later[15] = 1;
  refused(&room.args, NULL, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
}

int main(void) {
  flashattn_desc desc = {.struct_size = sizeof desc};
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS_Q;
  desc.heads_kv = HEADS;
  desc.dim_qk = DIM;
  CHECK_OK(flashattn_plan_create(&desc, &plan, NULL));
  test_numbers();
  test_increments();
  test_refusals();
  test_sizes();
  flashattn_plan_destroy(plan);
  return check_report();
}
