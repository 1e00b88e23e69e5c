/* The library's threads as a program sees them:  pool MODE FOLDER
 *   callers   100 threads call at once: the bits are the same, and no more threads are there than
 *             the calling ones and the pool's, which the first calls started; and threads that
 *             wait for the next call do not spin for long
 *   stacks    `ulimit -s` is 64 KiB, and so are the stacks of four threads that call at once */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../unit/check.h"
#include "case_file.h"
#include "thread_count.h"
#include "threaded.h"

enum {
  CALLERS = 100,
  ROUNDS = 5,
  PAUSES = 11,
  SMALL = 64 << 10
};

static case_file file;
static uint64_t known[MAX_CASES], known_large; /* digests */
static atomic_int wrong, running;

static void *call(void *unused) {
  ++running;
  for (int n = 0; n < ROUNDS; ++n) {
    uint64_t digest = 0;
    wrong += !threaded_run(&digest) || digest != known_large;
    const int which = n % file.count;
    wrong += case_run(&file, which, NULL, &digest) != CASE_PASSED || digest != known[which];
  }
  --running;
  return unused;
}

/* Returns how many threads this process had at the most. */
static int call_from(int callers, size_t stack) {
  pthread_t threads[CALLERS];
  pthread_attr_t attributes;
  int started = 0, most = 0;
  pthread_attr_init(&attributes);
  if (stack > 0) CHECK(pthread_attr_setstacksize(&attributes, stack) == 0);
  while (started < callers && pthread_create(&threads[started], &attributes, call, NULL) == 0) {
    ++started;
  }
  CHECK(started == callers);
  for (int now = 0; running > 0; usleep(1000)) {
    count_threads(&now, NULL);
    if (now > most) most = now;
  }
  for (int n = 0; n < started; ++n) pthread_join(threads[n], NULL);
  pthread_attr_destroy(&attributes);
  CHECK(wrong == 0);
  return most;
}

static int by_size(const void *x, const void *y) {
  const int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
  return (a > b) - (a < b);
}

/* After a call a thread spins for 50 us, and sleeps then. Of several calls the median, for a thread
 * that is at work elsewhere may be late. */
static void check_spinning(void) {
  int64_t before, spent[PAUSES];
  uint64_t digest;
  for (int n = 0; n < PAUSES; ++n) {
    CHECK(threaded_run(&digest));
    count_threads_time(NULL, NULL, &before);
    usleep(20000);
    count_threads_time(NULL, NULL, &spent[n]);
    if (before < 0 || spent[n] < 0) {
      ++check_skipped;
      printf("skipped: the system does not say how long threads run\n");
      return;
    }
    spent[n] -= before;
  }
  qsort(spent, PAUSES, sizeof *spent, by_size);
  const int64_t most = (THREADED - 1) * 150000; /* the system's work to let them sleep included */
  if (!CHECK(spent[PAUSES / 2] < most)) printf("%g us\n", (double)spent[PAUSES / 2] / 1000);
}

/* A limit of stacks holds from the start of a program on. */
static void limit_stacks(char **argv) {
  struct rlimit now;
  if (!CHECK(getrlimit(RLIMIT_STACK, &now) == 0) || now.rlim_cur == SMALL) return;
  now.rlim_cur = SMALL;
  if (CHECK(setrlimit(RLIMIT_STACK, &now) == 0)) execv(argv[0], argv);
  CHECK(0);
}

int main(int argc, char **argv) {
  if (!CHECK(argc > 2)) return check_report();
  const int stacks = strcmp(argv[1], "stacks") == 0;
  if (stacks) limit_stacks(argv);
  if (!CHECK(case_file_open(&file, argv[2]))) return check_report();
  for (int n = 0; n < file.count; ++n) {
    CHECK(case_run(&file, n, NULL, &known[n]) == CASE_PASSED);
  }
  CHECK(threaded_run(&known_large));
  long first = 0, last = 0;
  int before = 0;
  CHECK(count_threads(&before, &first) == THREADED - 1);
  if (!stacks) check_spinning();
  const int callers = stacks ? 4 : CALLERS;
  const int most = call_from(callers, stacks ? SMALL : 0);
  if (!CHECK(most <= callers + before)) printf("%d threads\n", most);
  CHECK(count_threads(NULL, &last) == THREADED - 1 && last == first);
  case_file_close(&file);
  return check_report();
}
