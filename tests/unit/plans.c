/* Plans in number: 10^5 made and destroyed without growth; what plan_info and workspace_size say;
 * maximums; the log. */
#include <stdlib.h>
#include <unistd.h>

#include "fixture.h"

/* -1: not to be had. The sanitizers keep freed memory, so that theirs says nothing. */
static long resident_pages(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return -1;
#else
  long size = 0, resident = -1;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file) return -1;
  if (fscanf(file, "%ld %ld", &size, &resident) != 2) resident = -1;
  fclose(file);
  return resident;
#endif
}

static void test_many(struct fixture *f) {
  long before = -1;
  int failed = 0;
  fixture_reset(f, EVERYTHING);
  for (int n = 0; n < 100000; ++n) {
    flashattn_plan *plan = NULL;
    failed += flashattn_plan_create(&f->desc, &plan, NULL) != FLASHATTN_OK;
    flashattn_plan_destroy(plan);
    if (n == 1000) before = resident_pages();
  }
  CHECK(failed == 0);
  flashattn_plan_destroy(NULL);
  if (before < 0) {
    ++check_skipped;
    return;
  }
  CHECK(resident_pages() - before < 64);
}

static void test_info(struct fixture *f) {
  flashattn_plan *plan = NULL;
  flashattn_plan_properties info = {.struct_size = sizeof info};
  int64_t bytes = -1;
  fixture_reset(f, PLAIN);
  f->desc.mask = FLASHATTN_MASK_CAUSAL;
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &f->forward, &info));
  /* 5 queries see 3, 4, 5, 6, 7 keys. */
  const int64_t pairs = BATCH * HEADS_Q * 25;
  CHECK(info.flops == pairs * 2 * (DIM_QK + DIM_V));
  const int64_t queries = BATCH * SEQ_Q * HEADS_Q, keys = BATCH * SEQ_KV * HEADS_KV;
  CHECK(info.bytes == 4 * (queries * (DIM_QK + DIM_V + 1) + keys * (DIM_QK + DIM_V)));
  CHECK(strcmp(info.backend, "cpu") == 0 && strlen(info.kernel) > 0 && strlen(info.why) > 0);
  CHECK(strlen(info.isa) > 0 && info.tile_q > 0 && info.tile_kv > 0 && info.splits >= 1);
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &f->forward, &bytes));
  CHECK(bytes == info.workspace && bytes > 0);
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_BACKWARD, &f->forward, &info));
  CHECK(info.flops == pairs * 5 * (DIM_QK + DIM_V));
  CHECK(info.bytes == 4 * (queries * (2 * DIM_QK + 2 * DIM_V + 1) + keys * 2 * (DIM_QK + DIM_V)));

  /* No maximum: what depends on sizes is 0. */
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, NULL, &info));
  CHECK(info.flops == 0 && info.bytes == 0 && info.workspace == 0 && info.splits == 0);
  CHECK(strlen(info.kernel) > 0);

  /* Sizes past all numbers saturate instead of wrapping round. */
  flashattn_args huge = sizes_of(1 << 20, 1 << 20, 1 << 20);
  flashattn_plan_destroy(plan);
  f->desc.mask = 0;
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &huge, &info));
  const int64_t many = (int64_t)huge.batch * huge.seqlen_q;
  CHECK(info.flops == INT64_MAX);
  CHECK(info.bytes == 4 * many * (HEADS_Q * (DIM_QK + DIM_V + 1) + HEADS_KV * (DIM_QK + DIM_V)));
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &huge, &bytes));
  CHECK(bytes == info.workspace && bytes > 0);
  flashattn_plan_destroy(plan);

  /* Neither does the workspace, at the limits of all sizes: it is no smaller than that of half the
   * batch, and where that is refused, so is the whole. */
  f->desc.heads_q = f->desc.heads_kv = 2;
  f->desc.dim_qk = f->desc.dim_v = 1;
  f->desc.splits = 4096;
  f->desc.threads = INT32_MAX;
  int accepted = 0;
  for (int n = 0; n < 40; ++n) {
    f->desc.layout = n % 2 ? FLASHATTN_LAYOUT_VARLEN_Q : 0;
    f->desc.heads_q = f->desc.heads_kv = n % 4 > 1 ? INT32_MAX : 2;
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
    flashattn_args large = sizes_of(1 << (n % 20 + 11), n < 20 ? 1 << (n + 10) : 0, 1 << 20);
    for (uint32_t op = FLASHATTN_OP_FORWARD; op <= FLASHATTN_OP_BACKWARD; ++op) {
      const int32_t status = flashattn_workspace_size(plan, op, &large, &bytes);
      const int64_t rows = (int64_t)large.batch * large.seqlen_q;
      if (status == FLASHATTN_OK) {
        flashattn_args half = large;
        int64_t bytes_of_half = INT64_MAX;
        half.batch /= 2;
        ++accepted;
        CHECK_OK(flashattn_workspace_size(plan, op, &half, &bytes_of_half));
        const int idle = half.batch == 0 || (op == FLASHATTN_OP_FORWARD && half.seqlen_q == 0);
        CHECK(bytes >= bytes_of_half && (bytes_of_half > 0) != idle);
        if (op == FLASHATTN_OP_BACKWARD && !f->desc.layout) CHECK(bytes >= rows * 8);
      } else {
        CHECK(status == FLASHATTN_ERROR_INVALID_ARGUMENT);
      }
    }
    flashattn_plan_destroy(plan);
  }
  CHECK(accepted > 10);

  /* Packed sequences: 11 tokens are two of five and one of one. */
  fixture_reset(f, VARLEN);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  flashattn_args packed = sizes_of(9, 5, 5);
  packed.total_q = packed.total_kv = 11;
  CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, &packed, &info));
  CHECK(info.flops == (25 + 25 + 1) * HEADS_Q * 2 * (DIM_QK + DIM_V));
  flashattn_plan_destroy(plan);
}

static void test_maximums(struct fixture *f) {
  flashattn_plan *plan = NULL;
  int64_t all = -1, bytes = -1, before = 0;
  int32_t reason;
  fixture_reset(f, PLAIN);
  f->desc.max_batch = 8;
  f->desc.max_seqlen_q = 300;
  f->desc.max_seqlen_kv = 500;
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
  for (uint32_t op = FLASHATTN_OP_FORWARD; op <= FLASHATTN_OP_BACKWARD; ++op) {
    CHECK_OK(flashattn_workspace_size(plan, op, NULL, &all));
    before = 0;
    for (int32_t s = 0; s <= 300; s += 20) {
      flashattn_args shape = sizes_of(8, s, s);
      CHECK_OK(flashattn_workspace_size(plan, op, &shape, &bytes));
      CHECK(bytes >= before && bytes <= all);
      before = bytes;
    }
  }
  flashattn_plan_destroy(plan);
  CHECK(all > 0);
  f->desc.workspace_limit = 1;
  CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_UNSUPPORTED);
  flashattn_last_error(&reason, NULL);
  CHECK(reason == FLASHATTN_REASON_WORKSPACE_LIMIT);
  f->desc.workspace_limit = INT64_MAX;
  CHECK_OK(flashattn_check(&f->desc, NULL));
}

/* A limit is a budget: what needs more is not chosen, and the reason says so. */
static void test_budget(struct fixture *f) {
  flashattn_plan_properties info = {.struct_size = sizeof info};
  flashattn_plan *plan = NULL;
  int64_t all = 0, less = 0;
  fixture_reset(f, PLAIN);
  f->desc.ops = FLASHATTN_OP_FORWARD;
  f->desc.dtype = FLASHATTN_DTYPE_BF16;
  f->desc.dim_qk = f->desc.dim_v = 64;
  f->desc.threads = 2;
  f->desc.max_batch = 2;
  f->desc.max_seqlen_q = f->desc.max_seqlen_kv = 1024;
  const int64_t limits[] = {0, INT64_MAX, 0, 0};
  int64_t limit = 0;
  for (int n = 0; n < 4; ++n) {
    f->desc.workspace_limit = n < 2 ? limits[n] : limit;
    /* With tile registers packed tiles are shared; other kernels have nothing to leave out. */
    const int shares = strstr(info.isa ? info.isa : "", "amx") != NULL;
    if (n == 2 && !shares) {
      CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_UNSUPPORTED);
      return;
    }
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL))) return;
    CHECK_OK(flashattn_plan_info(plan, FLASHATTN_OP_FORWARD, NULL, &info));
    const int told = strstr(info.why, "workspace_limit") != NULL;
    if (n == 0) all = info.workspace;
    if (n == 1) CHECK(info.workspace == all && !told); /* room for everything */
    if (n == 2) {
      CHECK(info.workspace < all && told);
      less = info.workspace;
    }
    if (n == 3) CHECK(info.workspace == less && told); /* just what it needs */
    limit = n < 2 ? all - 1 : less;
    flashattn_plan_destroy(plan);
  }
  f->desc.workspace_limit = less - 1;
  CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_UNSUPPORTED);
}

struct lines {
  int count[4];
  char last[512];
};

static void note(void *user, int32_t level, const char *message) {
  struct lines *lines = (struct lines *)user;
  ++lines->count[level];
  snprintf(lines->last, sizeof lines->last, "%s", message);
}

static void test_log(struct fixture *f) {
  struct lines lines;
  for (int32_t level = FLASHATTN_LOG_OFF; level <= FLASHATTN_LOG_DEBUG; ++level) {
    memset(&lines, 0, sizeof lines);
    CHECK_OK(flashattn_set_log(level, note, &lines));
    fixture_reset(f, PLAIN);
    flashattn_plan *plan = NULL;
    CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL));
    flashattn_plan_destroy(plan);
    CHECK((lines.count[FLASHATTN_LOG_INFO] > 0) == (level >= FLASHATTN_LOG_INFO));
    f->desc.dim_qk = 100000;
    CHECK_STATUS(flashattn_check(&f->desc, NULL), FLASHATTN_ERROR_UNSUPPORTED);
    CHECK((lines.count[FLASHATTN_LOG_DEBUG] > 0) == (level >= FLASHATTN_LOG_DEBUG));
    CHECK(lines.count[FLASHATTN_LOG_ERROR] == (level >= FLASHATTN_LOG_ERROR));
    if (level >= FLASHATTN_LOG_ERROR) {
      CHECK(strstr(lines.last, "flashattn_check") && strstr(lines.last, "100000"));
    }
  }
  memset(&lines, 0, sizeof lines);
  CHECK_OK(flashattn_set_log(FLASHATTN_LOG_DEBUG, NULL, NULL));
  CHECK_STATUS(flashattn_check(NULL, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(lines.count[FLASHATTN_LOG_ERROR] == 0);
}

static void test_library(void) {
  int32_t count = 0;
  flashattn_device_properties device = {.struct_size = sizeof device};
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", FLASHATTN_VERSION_MAJOR, FLASHATTN_VERSION_MINOR,
           FLASHATTN_VERSION_PATCH);
  CHECK(strcmp(flashattn_version_string(), version) == 0);
  CHECK(flashattn_version() ==
        10000 * FLASHATTN_VERSION_MAJOR + 100 * FLASHATTN_VERSION_MINOR + FLASHATTN_VERSION_PATCH);
  CHECK(strstr(flashattn_build_info(), version) != NULL);
  CHECK(flashattn_build_info() == flashattn_build_info());
  CHECK(strcmp(flashattn_status_name(FLASHATTN_OK), "FLASHATTN_OK") == 0);
  CHECK(strcmp(flashattn_status_name(7), "FLASHATTN_ERROR_INTERNAL") == 0);
  CHECK(strcmp(flashattn_status_name(-1), "unknown status") == 0);
  CHECK_OK(flashattn_device_count(FLASHATTN_DEVICE_CPU, &count));
  CHECK(count == 1);
  CHECK_STATUS(flashattn_device_count(7, &count), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK_OK(flashattn_device_info(FLASHATTN_DEVICE_CPU, 0, &device));
  CHECK(device.threads >= 1 && strlen(device.name) > 0 && strlen(device.isa) > 0);
  CHECK(device.struct_size == sizeof device && device.compute_capability == 0);
  CHECK(strlen(flashattn_last_error(NULL, NULL)) > 0);
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 1;
  CHECK(strcmp(flashattn_last_error(NULL, NULL), "") == 0);
  test_library();
  test_info(&f);
  test_maximums(&f);
  test_budget(&f);
  test_log(&f);
  test_many(&f);
  fixture_close(&f);
  return check_report();
}
