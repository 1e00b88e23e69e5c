/* The library's threads in this process, by the name that it gives them. */
#ifndef FLASHATTN_TESTS_THREAD_COUNT_H
#define FLASHATTN_TESTS_THREAD_COUNT_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* all: out, how many threads there are, whoever's. sum: out, of the numbers of the library's, which
 * changes where one takes another's place. Both may be NULL. */
static inline int count_threads(int* all, long* sum) {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  if (all) *all = 0;
  if (sum) *sum = 0;
  if (!folder) return 0;
  for (struct dirent* entry; (entry = readdir(folder));) {
    const long number = strtol(entry->d_name, NULL, 10);
    char path[64], name[32] = "";
    if (number <= 0) continue;
    if (all) ++*all;
    snprintf(path, sizeof path, "/proc/self/task/%ld/comm", number);
    FILE* file = fopen(path, "r");
    if (file && fgets(name, sizeof name, file) && strcmp(name, "flashattn\n") == 0) {
      ++count;
      if (sum) *sum += number;
    }
    if (file) fclose(file);
  }
  closedir(folder);
  return count;
}

#endif
