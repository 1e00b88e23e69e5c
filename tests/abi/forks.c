/* Forked processes compute the same bits with as many threads, and none hangs:  forks MODE FOLDER
 *   fresh    the parent has not used the library
 *   used     it has, so that its threads wait in a pool that the child does not have
 *   busy     another of its threads is inside a call at that moment
 *   log      another of its threads is inside the log's callback at that moment */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../unit/check.h"
#include "case_file.h"
#include "thread_count.h"
#include "threaded.h"

enum {
  FORKS = 20,
  SECONDS = 10
};

static case_file file;
static uint64_t *known; /* of each case and, behind these, of the large call; children share it */
static atomic_int stop;

/* How many cases went wrong, or gave other bits than before. */
static int run_all(void) {
  int wrong = 0;
  for (int n = 0; n < file.count; ++n) {
    uint64_t digest = 0;
    wrong += case_run(&file, n, NULL, &digest) != CASE_PASSED || (known[n] && digest != known[n]);
    known[n] = digest;
  }
  uint64_t digest = 0, *large = &known[MAX_CASES];
  wrong += !threaded_run(&digest) || (*large && digest != *large);
  *large = digest;
  return wrong;
}

static int run_in_child(void) {
  int status = -1;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(SECONDS); /* instead of hanging */
    int wrong = run_all();
    if (!CHECK(count_threads(NULL, NULL) == THREADED - 1)) {
      printf("%d threads in the child\n", count_threads(NULL, NULL));
      ++wrong;
    }
    fflush(stdout);
    _exit(wrong != 0);
  }
  if (child < 0 || waitpid(child, &status, 0) != child) return 0;
  if (WIFSIGNALED(status)) printf("the child ended with signal %d\n", WTERMSIG(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void *keep_busy(void *unused) {
  int n = 0;
  while (!stop) {
    uint64_t digest;
    case_run(&file, n++ % file.count, NULL, NULL);
    threaded_run(&digest);
  }
  return unused;
}

static pid_t parent;
static atomic_int inside;

static void log_and_wait(void *user, int32_t level, const char *message) {
  (void)user, (void)level, (void)message;
  inside = 1;
  while (!stop && getpid() == parent) sched_yield();
}

static void *write_to_log(void *unused) {
  case_run(&file, 0, NULL, NULL);
  return unused;
}

int main(int argc, char **argv) {
  pthread_t thread;
  known = mmap(NULL, (MAX_CASES + 1) * sizeof *known, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (!CHECK(known != MAP_FAILED)) return check_report();
  if (!CHECK(argc > 2 && case_file_open(&file, argv[2]))) return check_report();
  const int busy = strcmp(argv[1], "busy") == 0;
  const int times = busy ? FORKS : 1;
  if (busy || strcmp(argv[1], "used") == 0) CHECK(run_all() == 0);
  const int logs = strcmp(argv[1], "log") == 0;
  parent = getpid();
  if (logs) CHECK_OK(flashattn_set_log(FLASHATTN_LOG_DEBUG, log_and_wait, NULL));
  if (busy || logs)
    CHECK(pthread_create(&thread, NULL, busy ? keep_busy : write_to_log, NULL) == 0);
  while (logs && !inside) sched_yield();
  for (int n = 0; n < times; ++n) CHECK(run_in_child());
  stop = 1;
  if (busy || logs) pthread_join(thread, NULL);
  CHECK(run_all() == 0);
  case_file_close(&file);
  return check_report();
}
