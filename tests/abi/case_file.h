/* Reads tests/data/cases.txt and cases.bin (tests/numerics/make_cases.py says what they hold) and
 * runs the cases through the C functions. C99. */
#ifndef FLASHATTN_TESTS_CASE_FILE_H
#define FLASHATTN_TESTS_CASE_FILE_H

#include <stdint.h>

#include "flashattn.h"

enum { MAX_CASES = 256 };

typedef struct case_file {
  char* text;
  unsigned char *memory, *blob; /* what was allocated; the contents, 64-aligned in it */
  int count;
  const char* start[MAX_CASES]; /* the first line of each case */
} case_file;

typedef enum case_outcome { CASE_PASSED, CASE_FAILED, CASE_SKIPPED } case_outcome;

/* Changes every structure before it goes to the library, or NULL. kind: the structure's name
 * without flashattn_; the copy lies in memory with CASE_TAIL zero bytes behind it. */
enum { CASE_TAIL = 64 };
typedef void (*case_hook)(const char* kind, void* structure);

/* folder holds the two files. 0 when they cannot be read. */
int case_file_open(case_file* file, const char* folder);
void case_file_close(case_file* file);

/* Runs the case that a paragraph of tests/data/refusals.txt names, changed as it says, and compares
 * status, reason and field; prints what is wrong. CASE_SKIPPED: a field is not known here. */
case_outcome case_refused(const case_file* file, const char* paragraph);

/* Runs case n forward, and backward where it says so, and judges every number; prints what is
 * wrong. digest: out, may be NULL; of the bits of all results. A case is skipped when it uses a
 * field that the header this was compiled with does not have. */
case_outcome case_run(const case_file* file, int n, case_hook hook, uint64_t* digest);

#endif
