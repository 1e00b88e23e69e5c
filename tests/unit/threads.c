/* Many threads: errors of their own, one plan shared, the log set meanwhile; and a forked child. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum {
  THREADS = 8,
  ROUNDS = 30,
  BATCH = 2,
  HEADS = 3,
  SEQ = 97, /* enough that threads of the caller's are asked */
  DIM = 16
};
enum {
  ELEMENTS = BATCH * SEQ * HEADS * DIM,
  ROWS = BATCH * HEADS * SEQ
};

static float q[ELEMENTS], k[ELEMENTS], v[ELEMENTS], expected_o[ELEMENTS], expected_lse[ROWS];
static flashattn_plan *plan;

struct job {
  int id;
  int failed;
  flashattn_parallel_fn parallel; /* NULL: the library's own threads */
  int asked;                      /* how often */
  float o[ELEMENTS], lse[ROWS];
};

static int32_t attend(struct job *job) {
  flashattn_args args;
  flashattn_args_init(&args, sizeof args);
  int64_t bytes = 0;
  args.batch = BATCH;
  args.seqlen_q = args.seqlen_kv = SEQ;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.o.data = job->o;
  args.lse = job->lse;
  args.parallel = job->parallel;
  args.parallel_user = job->parallel ? &job->asked : NULL;
  int32_t status = flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &args, &bytes);
  void *workspace = malloc((size_t)bytes + 1);
  if (status == FLASHATTN_OK && workspace) {
    status = flashattn_forward(plan, &args, workspace, bytes, NULL);
  }
  free(workspace);
  return status;
}

/* The sentence of this thread's failure is this thread's, and a success leaves it alone. */
static int own_error(int id) {
  flashattn_desc desc;
  char wanted[32];
  const char *field;
  int32_t reason;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = -1 - id;
  desc.dim_qk = 8;
  snprintf(wanted, sizeof wanted, "heads_q = %d ", -1 - id);
  if (flashattn_check(&desc, NULL) != FLASHATTN_ERROR_INVALID_ARGUMENT) return 0;
  sched_yield();
  desc.heads_q = 1;
  if (flashattn_check(&desc, NULL) != FLASHATTN_OK) return 0;
  return strstr(flashattn_last_error(&reason, &field), wanted) != NULL &&
         reason == FLASHATTN_REASON_SIZE && strcmp(field, "heads_q") == 0;
}

static void *work(void *user) {
  struct job *job = (struct job *)user;
  job->failed += flashattn_last_error(NULL, NULL)[0] != 0;
  for (int round = 0; round < ROUNDS; ++round) {
    memset(job->o, 0xA5, sizeof job->o);
    job->failed += attend(job) != FLASHATTN_OK;
    job->failed += memcmp(job->o, expected_o, sizeof expected_o) != 0;
    job->failed += memcmp(job->lse, expected_lse, sizeof expected_lse) != 0;
    job->failed += !own_error(job->id);
  }
  return NULL;
}

/* Lines of the log, and those without text or with a level that was not asked for. The library calls
 * from one thread at a time. */
struct lines {
  int good, bad;
};

static void count_line(void *user, int32_t level, const char *message) {
  struct lines *lines = (struct lines *)user;
  const int good = level > FLASHATTN_LOG_OFF && level <= FLASHATTN_LOG_DEBUG && message[0] != 0;
  lines->good += good;
  lines->bad += !good;
}

static void test_threads(struct job *jobs) {
  pthread_t threads[THREADS];
  struct lines lines = {0, 0};
  for (int t = 0; t < THREADS; ++t) {
    jobs[t].id = t;
    CHECK(pthread_create(&threads[t], NULL, work, &jobs[t]) == 0);
  }
  for (int n = 0; n < 200; ++n) {
    flashattn_set_log(n % 2 ? FLASHATTN_LOG_DEBUG : FLASHATTN_LOG_OFF, count_line, &lines);
    sched_yield();
  }
  /* As long as anybody works, or once where all were quick. */
  CHECK_OK(flashattn_set_log(FLASHATTN_LOG_DEBUG, count_line, &lines));
  CHECK(own_error(THREADS));
  for (int t = 0; t < THREADS; ++t) {
    pthread_join(threads[t], NULL);
    CHECK(jobs[t].failed == 0);
  }
  CHECK_OK(flashattn_set_log(FLASHATTN_LOG_OFF, NULL, NULL));
  CHECK(lines.good > 0 && lines.bad == 0);
  const int before = lines.good;
  CHECK(own_error(THREADS) && lines.good == before);
}

static void run_backwards(void *user, int32_t count, flashattn_task_fn task, void *context) {
  ++*(int *)user;
  for (int32_t n = count - 1; n >= 0; --n) task(context, n);
}

struct offer {
  flashattn_task_fn task;
  void *context;
  int32_t index;
};

static void *take_offer(void *user) {
  const struct offer *offer = (const struct offer *)user;
  offer->task(offer->context, offer->index);
  return NULL;
}

static void run_on_new_threads(void *user, int32_t count, flashattn_task_fn task, void *context) {
  pthread_t threads[16];
  struct offer offers[16];
  ++*(int *)user;
  for (int32_t n = 0; n < count && n < 16; ++n) {
    offers[n] = (struct offer){task, context, n};
    if (pthread_create(&threads[n], NULL, take_offer, &offers[n]) != 0) abort();
  }
  for (int32_t n = 0; n < count && n < 16; ++n) pthread_join(threads[n], NULL);
  for (int32_t n = 16; n < count; ++n) task(context, n);
}

/* The caller's threads give the bits of the library's, one after another or at once. */
static void test_parallel(struct job *job) {
  const flashattn_parallel_fn pools[] = {run_backwards, run_on_new_threads};
  for (int p = 0; p < 2; ++p) {
    job->parallel = pools[p];
    job->asked = 0;
    memset(job->o, 0xA5, sizeof job->o);
    CHECK_OK(attend(job));
    CHECK(job->asked > 0);
    CHECK(memcmp(job->o, expected_o, sizeof expected_o) == 0);
    CHECK(memcmp(job->lse, expected_lse, sizeof expected_lse) == 0);
  }
  job->parallel = NULL;
}

/* After work on several threads, a child works too. It must not hang: the alarm ends it. */
static void test_fork(struct job *job) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    memset(job->o, 0xA5, sizeof job->o);
    const int ok = attend(job) == FLASHATTN_OK &&
                   memcmp(job->o, expected_o, sizeof expected_o) == 0 && own_error(77);
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
  static struct job jobs[THREADS];
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS;
  desc.dim_qk = DIM;
  desc.mask = FLASHATTN_MASK_CAUSAL;
  desc.features = FLASHATTN_FEATURE_LSE;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, NULL))) return check_report();
  unsigned seed = 1;
  for (int n = 0; n < ELEMENTS; ++n) {
    float *const arrays[] = {&q[n], &k[n], &v[n]};
    for (int a = 0; a < 3; ++a) {
      seed = seed * 1664525u + 1013904223u;
      *arrays[a] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
  }
  CHECK_OK(attend(&jobs[0]));
  memcpy(expected_o, jobs[0].o, sizeof expected_o);
  memcpy(expected_lse, jobs[0].lse, sizeof expected_lse);
  test_fork(&jobs[0]);
  test_parallel(&jobs[0]);
  test_threads(jobs);
  test_fork(&jobs[0]);
  flashattn_plan_destroy(plan);
  return check_report();
}
