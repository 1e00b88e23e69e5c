/* The system gives fewer threads than asked for: results are right, and the process goes on. Where
 * GNU's OpenMP runtime is left alone with that, it ends the process. */
#include <flashattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../unit/check.h"

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

int main(int argc, char **argv) {
  /* Of threads with large stacks there is room for a few, of all else for enough. */
  const rlim_t stack = (rlim_t)64 << 20;
  struct rlimit now;
  if (!CHECK(argc > 0 && getrlimit(RLIMIT_STACK, &now) == 0)) return check_report();
  if (now.rlim_cur != stack) {
    const struct rlimit larger = {stack, now.rlim_max};
    if (setrlimit(RLIMIT_STACK, &larger) == 0) execv(argv[0], argv);
    return 77; /* skipped */
  }
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
  /* The runtime keeps no more threads than its last team had: it is to start them anew below. */
  const int32_t heads[] = {HEADS, 2};
  flashattn_plan *plans[2] = {plan, NULL};
  desc.heads_q = desc.threads = heads[1];
  if (!CHECK_OK(flashattn_plan_create(&desc, &plans[1], NULL))) return check_report();
  for (int n = 0; n < 2; ++n) CHECK_OK(flashattn_forward(plans[n], &args, workspace, bytes, NULL));
  const rlim_t used = in_use();
  if (!workspace || !used) return 77;
  const struct rlimit few = {used + 5 * stack, used + 5 * stack};
  CHECK(setrlimit(RLIMIT_AS, &few) == 0);
  for (int times = 0; times < 2; ++times) {
    CHECK_OK(flashattn_forward(plan, &args, workspace, bytes, NULL));
    int wrong = 0;
    for (int n = 0; n < SIZE; ++n) wrong += o[n] != v[n];
    CHECK(wrong == 0);
  }
  flashattn_plan_destroy(plans[1]);
  flashattn_plan_destroy(plan);
  free(workspace);
  return check_report();
}
