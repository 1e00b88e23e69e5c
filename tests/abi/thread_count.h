/* Threads of this process, the caller's among them. */
#ifndef FLASHATTN_TESTS_THREAD_COUNT_H
#define FLASHATTN_TESTS_THREAD_COUNT_H

#include <dirent.h>

/* sum: of their numbers, which changes where one takes another's place; may be NULL. */
static inline int sum_threads(long* sum) {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  if (sum) *sum = 0;
  if (!folder) return 0;
  for (struct dirent* entry; (entry = readdir(folder));) {
    const long number = strtol(entry->d_name, NULL, 10);
    count += number > 0;
    if (sum) *sum += number;
  }
  closedir(folder);
  return count;
}

static inline int count_threads(void) { return sum_threads(NULL); }

#endif
