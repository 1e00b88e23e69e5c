/* The library's threads in this process, by the name that it gives them. */
#ifndef FLASHATTN_TESTS_THREAD_COUNT_H
#define FLASHATTN_TESTS_THREAD_COUNT_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file of /proc about a thread of this process; NULL when it cannot be read. */
static inline FILE* open_thread_file(long number, const char* name) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/task/%ld/%s", number, name);
  return fopen(path, "r");
}

/* all: out, how many threads there are, whoever's. sum: out, of the numbers of the library's, which
 * changes where one takes another's place. time: out, nanoseconds that those ran so far; -1: the
 * system does not say. All may be NULL. */
static inline int count_threads_time(int* all, long* sum, int64_t* time) {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  if (all) *all = 0;
  if (sum) *sum = 0;
  if (time) *time = 0;
  if (!folder) return 0;
  for (struct dirent* entry; (entry = readdir(folder));) {
    const long number = strtol(entry->d_name, NULL, 10);
    char name[32] = "";
    if (number <= 0) continue;
    if (all) ++*all;
    FILE* file = open_thread_file(number, "comm");
    if (file && fgets(name, sizeof name, file) && strcmp(name, "flashattn\n") == 0) {
      ++count;
      if (sum) *sum += number;
      FILE* spent = time && *time >= 0 ? open_thread_file(number, "schedstat") : NULL;
      long long now = 0;
      if (spent && fscanf(spent, "%lld", &now) == 1) {
        *time += now;
      } else if (time) {
        *time = -1;
      }
      if (spent) fclose(spent);
    }
    if (file) fclose(file);
  }
  closedir(folder);
  return count;
}

static inline int count_threads(int* all, long* sum) { return count_threads_time(all, sum, NULL); }

#endif
