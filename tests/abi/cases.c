/* Every case of tests/data through the C functions, forward and backward:  cases FOLDER [old]
 * old: compiled with an older header; cases that use what it does not have are skipped. */
#include <string.h>

#include "../unit/check.h"
#include "case_file.h"

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
  case_file_close(&file);
  return check_report();
}
