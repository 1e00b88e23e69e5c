/* Counts checks and prints those that fail. For C99 and C++. */
#ifndef FLASHATTN_TESTS_CHECK_H
#define FLASHATTN_TESTS_CHECK_H

#include <stdio.h>
#include <string.h>

#include "flashattn.h"

static int check_passed, check_failed, check_skipped;

/* Returns ok, so that a test can stop where going on has no meaning. */
static inline int check_that(int ok, const char* file, int line, const char* what) {
  if (ok) {
    ++check_passed;
  } else if (++check_failed <= 50) {
    printf("%s:%d: failed: %s\n", file, line, what);
  }
  return ok;
}

#define CHECK(condition) check_that(!!(condition), __FILE__, __LINE__, #condition)

static inline int check_status(int32_t status, int32_t wanted, const char* file, int line,
                               const char* what) {
  if (status != wanted) {
    printf("%s:%d: %s, wanted %s: %s\n", file, line, flashattn_status_name(status),
           flashattn_status_name(wanted), flashattn_last_error(NULL, NULL));
  }
  return check_that(status == wanted, file, line, what);
}

#define CHECK_STATUS(call, wanted) check_status((call), (wanted), __FILE__, __LINE__, #call)
#define CHECK_OK(call) CHECK_STATUS(call, FLASHATTN_OK)

/* The last line of a test, and what main returns. */
static inline int check_report(void) {
  printf("%d passed, %d failed, %d skipped\n", check_passed, check_failed, check_skipped);
  return check_failed != 0 || check_passed == 0;
}

#endif
