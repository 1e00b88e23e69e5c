#define _POSIX_C_SOURCE 199309L /* clock_gettime */

#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int succeeded(int32_t status) {
  if (status == FLASHATTN_OK) return 1;
  fprintf(stderr, "%s: %s\n", flashattn_status_name(status), flashattn_last_error(NULL, NULL));
  return 0;
}

void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) fprintf(stderr, "no memory for %zu elements of %zu bytes\n", count, size);
  return memory;
}

double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* SplitMix64 (Steele et al. 2014). */
float random_number(uint64_t *state) {
  uint64_t bits = *state += 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  return (float)(bits >> 40) * 0x1p-23f - 1.0f;
}
