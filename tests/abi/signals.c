/* Two timers interrupt the calls some thousand times a second, in whatever thread runs, and their
 * handler computes too: the bits stay the same. */
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>

#include "../unit/check.h"
#include "case_file.h"
#include "threaded.h"

enum {
  ROUNDS = 40
};

static atomic_int interruptions; /* any thread may be the one interrupted */
static _Thread_local volatile double waste = 2;

static void interrupt(int signal_number) {
  (void)signal_number;
  interruptions = interruptions + 1;
  waste = waste * 1.5 - floor(waste); /* disturbs the vector registers */
  if (waste > 1e6) waste = 2;
}

static void set_timers(long microseconds) {
  const struct itimerval every = {{0, microseconds}, {0, microseconds}};
  CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
  CHECK(setitimer(ITIMER_PROF, &every, NULL) == 0);
}

int main(int argc, char **argv) {
  case_file file;
  uint64_t calm[MAX_CASES], calm_large = 0;
  if (!CHECK(argc > 1 && case_file_open(&file, argv[1]))) return check_report();
  for (int n = 0; n < file.count; ++n) CHECK(case_run(&file, n, NULL, &calm[n]) == CASE_PASSED);
  CHECK(threaded_run(&calm_large));

  struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESTART};
  sigemptyset(&action.sa_mask);
  CHECK(sigaction(SIGALRM, &action, NULL) == 0 && sigaction(SIGPROF, &action, NULL) == 0);
  set_timers(200);
  for (int round = 0; round < ROUNDS; ++round) {
    for (int n = 0; n < file.count; ++n) {
      uint64_t digest = 0;
      CHECK(case_run(&file, n, NULL, &digest) == CASE_PASSED);
      CHECK(digest == calm[n]);
    }
    uint64_t digest = 0;
    CHECK(threaded_run(&digest) && digest == calm_large);
  }
  set_timers(0);
  if (!CHECK(interruptions > 100)) printf("only %d interruptions\n", (int)interruptions);
  case_file_close(&file);
  return check_report();
}
