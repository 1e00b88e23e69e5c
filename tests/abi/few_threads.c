/* The system gives fewer threads than asked for: results are right, the process goes on, and has all
 * of them when the system gives them again. */
#include <flashattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../unit/check.h"
#include "thread_count.h"

enum {
  HEADS = 64,
  SEQ = 128,
  DIM = 16,
  SIZE = SEQ * HEADS * DIM
};
static float q[SIZE], v[SIZE], o[SIZE];

/* Bytes of address space in use; 0: not known. */
static rlim_t in_use(void) {
  unsigned long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file) return 0;
  if (fscanf(file, "%lu", &pages) != 1) pages = 0;
  fclose(file);
  return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

int main(void) {
  const rlim_t stack = (rlim_t)1 << 20; /* of a thread of the library */
  struct rlimit space;
  if (!CHECK(getrlimit(RLIMIT_AS, &space) == 0)) return check_report();
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS;
  desc.dim_qk = DIM;
  desc.threads = HEADS;
  flashattn_plan *plan = NULL;
  flashattn_args args;
  flashattn_args_init(&args, sizeof args);
  args.batch = 1;
  args.seqlen_q = args.seqlen_kv = SEQ;
  args.q.data = args.k.data = q;
  args.v.data = v;
  args.o.data = o;
  for (int n = 0; n < SIZE; ++n) v[n] = (float)(n / DIM % HEADS); /* the head's number */
  int64_t bytes = 0;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, NULL))) return check_report();
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &args, &bytes));
  void *workspace = malloc((size_t)bytes);
  flashattn_plan *small = NULL;
  desc.heads_q = desc.threads = 2;
  if (!CHECK_OK(flashattn_plan_create(&desc, &small, NULL))) return check_report();
  CHECK_OK(flashattn_forward(small, &args, workspace, bytes, NULL));
  const rlim_t used = in_use();
  if (!workspace || !used) return 77;
  CHECK(count_threads(NULL, NULL) == 1);
  const struct rlimit few = {used + 5 * stack, space.rlim_max};
  CHECK(setrlimit(RLIMIT_AS, &few) == 0);
  for (int times = 0; times < 3; ++times) {
    if (times == 2) {
      CHECK(setrlimit(RLIMIT_AS, &space) == 0);
      usleep(1100000); /* after which they are asked for again */
    }
    memset(o, 0, sizeof o);
    CHECK_OK(flashattn_forward(plan, &args, workspace, bytes, NULL));
    int wrong = 0;
    for (int n = 0; n < SIZE; ++n) wrong += o[n] != v[n];
    CHECK(wrong == 0);
    const int threads = count_threads(NULL, NULL) + 1;
    if (!CHECK(times < 2 ? threads >= 2 && threads <= 8 : threads == HEADS)) {
      printf("%d threads\n", threads);
    }
  }
  flashattn_plan_destroy(small);
  flashattn_plan_destroy(plan);
  free(workspace);
  return check_report();
}
