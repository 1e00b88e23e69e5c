/* A program that opens the library at run time:  opened MODE FOLDER LIBRARY [IMPOSTOR]
 *   repeat     dlopen, a case, dlclose: 1,000 times; memory stays flat
 *   threads    the same 8,000 times, in threads that come and go
 *   impostor   beside a library with the same C and C++ names, opened first and for everybody to
 *              see, whose functions abort */
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../unit/check.h"
#include "case_file.h"
#include "late.h"
#include "threaded.h"

enum {
  TIMES = 1000,
  THREADS = 8,
  ROUNDS = 1000,
  STRETCHES = 10,
  SLACK = 1 << 18
};

static case_file file;
static const char *library;

static long resident_bytes(void) {
  long total = 0, resident = 0;
  FILE *stream = fopen("/proc/self/statm", "r");
  if (!stream) return 0;
  if (fscanf(stream, "%ld %ld", &total, &resident) != 2) resident = 0;
  fclose(stream);
  return resident * sysconf(_SC_PAGESIZE);
}

/* Leaves a message in this thread's storage, which outlives the handle. */
static int fail_once(void) {
  flashattn_desc desc = {.struct_size = sizeof desc};
  flashattn_plan *plan = NULL;
  return flashattn_plan_create(&desc, &plan, NULL) == FLASHATTN_ERROR_INVALID_ARGUMENT &&
         strlen(flashattn_last_error(NULL, NULL)) > 20;
}

static int one_life(int n) {
  void *handle = late_open(library, (n % 2 ? RTLD_NOW : RTLD_LAZY) | RTLD_LOCAL);
  if (!handle) return 0;
  uint64_t digest;
  const int good = case_run(&file, n % file.count, NULL, NULL) == CASE_PASSED &&
                   threaded_run(&digest) && fail_once();
  return late_close(handle) && good;
}

static void *thread_life(void *number) { return one_life((int)(intptr_t)number) ? number : NULL; }

static int one_round(int round) {
  pthread_t threads[THREADS];
  int good = 0;
  for (intptr_t n = 0; n < THREADS; ++n) {
    void *number = (void *)(round * THREADS + n + 1);
    if (pthread_create(&threads[n], NULL, thread_life, number) != 0) return 0;
  }
  for (int n = 0; n < THREADS; ++n) {
    void *result = NULL;
    pthread_join(threads[n], &result);
    good += result != NULL;
  }
  return good == THREADS;
}

/* A leak grows in every stretch. Allocators and stack caches, which keep what the busiest moment
 * needed, grow in some: the first warms up, and the smallest growth of the others counts. */
static void run_flat(int (*once)(int), int times) {
  long before = 0, least = LONG_MAX;
  int good = 0;
  for (int n = 0; n < times; ++n) {
    if (n == times / STRETCHES) before = resident_bytes();
    good += once(n);
    if ((n + 1) % (times / STRETCHES) != 0 || before == 0) continue;
    const long after = resident_bytes();
    if (after - before < least) least = after - before;
    before = after;
  }
  CHECK(good == times);
  if (!CHECK(least < SLACK)) printf("memory grew by %ld bytes and more in every stretch\n", least);
}

static void run_beside(const char *impostor) {
  void *other = dlopen(impostor, RTLD_NOW | RTLD_GLOBAL);
  if (!CHECK(other)) return;
  CHECK(dlsym(RTLD_DEFAULT, "flashattn_forward") == dlsym(other, "flashattn_forward"));
  void *handle = late_open(library, RTLD_NOW | RTLD_LOCAL);
  if (!CHECK(handle)) return;
  for (int n = 0; n < file.count; ++n) CHECK(case_run(&file, n, NULL, NULL) == CASE_PASSED);
  CHECK(fail_once());
  CHECK(late_close(handle));
  CHECK(dlclose(other) == 0);
}

int main(int argc, char **argv) {
  if (!CHECK(argc > 3 && case_file_open(&file, argv[2]))) return check_report();
  library = argv[3];
  const char *mode = argv[1];
  if (strcmp(mode, "repeat") == 0) run_flat(one_life, TIMES);
  if (strcmp(mode, "threads") == 0) run_flat(one_round, ROUNDS);
  if (strcmp(mode, "impostor") == 0 && CHECK(argc > 4)) run_beside(argv[4]);
  case_file_close(&file);
  return check_report();
}
