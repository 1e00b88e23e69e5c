/* Every case of tests/data through the C functions, forward and backward:  cases FOLDER [old]
 * old: compiled with an older header; cases that use what it does not have are skipped. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../unit/check.h"
#include "case_file.h"

/* What all languages refuse alike. */
static void check_refusals(const case_file *file, const char *folder) {
  char path[1024], *text = calloc(1, 1 << 16);
  snprintf(path, sizeof path, "%s/refusals.txt", folder);
  FILE *stream = fopen(path, "rb");
  if (!CHECK(text && stream && fread(text, 1, (1 << 16) - 1, stream) > 0)) return;
  fclose(stream);
  int count = 0;
  for (const char *at = text; at; at = strstr(at, "\n\n")) {
    at += at == text ? 0 : 2;
    CHECK(case_refused(file, at) == CASE_PASSED);
    ++count;
  }
  CHECK(count > 10);
  free(text);
}

int main(int argc, char **argv) {
  case_file file;
  const int old = argc > 2 && strcmp(argv[2], "old") == 0;
  if (!CHECK(argc > 1 && case_file_open(&file, argv[1]))) return check_report();
  for (int n = 0; n < file.count; ++n) {
    const case_outcome outcome = case_run(&file, n, NULL, NULL);
    check_passed += outcome == CASE_PASSED;
    check_failed += outcome == CASE_FAILED;
    check_skipped += outcome == CASE_SKIPPED;
  }
  /* What the old header knew, it still does. */
  CHECK(check_passed >= (old ? 55 : 60) && (old || check_skipped == 0));
  check_refusals(&file, argv[1]);
  case_file_close(&file);
  return check_report();
}
