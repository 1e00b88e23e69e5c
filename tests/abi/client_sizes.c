/* Programs compiled with other headers. Of a later one, whose structures are larger: it runs while
 * it asks for nothing that this library does not know, and is refused with a sentence when it does.
 * Of an earlier one, whose structures are smaller: what lies behind them is not read. */
#include <string.h>

#include "../unit/check.h"
#include "case_file.h"

static size_t size_of(const char *kind) {
  if (strcmp(kind, "desc") == 0) return sizeof(flashattn_desc);
  return strcmp(kind, "forward_args") == 0 ? sizeof(flashattn_args)
                                           : sizeof(flashattn_args);
}

/* struct_size comes first in every structure; case_run keeps CASE_TAIL zero bytes behind. */
static void enlarge(const char *kind, void *structure) {
  const uint32_t size = (uint32_t)(size_of(kind) + CASE_TAIL);
  memcpy(structure, &size, sizeof size);
}

/* Up to the reserved words, with something else in their place. */
static void shorten(const char *kind, void *structure) {
  const uint32_t size = (uint32_t)(size_of(kind) - sizeof(int64_t[4]));
  memset((char *)structure + size, 0xA5, sizeof(int64_t[4]));
  memcpy(structure, &size, sizeof size);
}

static const char *marked; /* which structure carries something unknown */

static void enlarge_and_mark(const char *kind, void *structure) {
  enlarge(kind, structure);
  if (strcmp(kind, marked) == 0) ((char *)structure)[size_of(kind) + CASE_TAIL - 1] = 1;
}

int main(int argc, char **argv) {
  case_file file;
  if (!CHECK(argc > 1 && case_file_open(&file, argv[1]))) return check_report();
  uint64_t plain = 0, larger = 1, smaller = 2;
  for (int n = 0; n < file.count; ++n) {
    CHECK(case_run(&file, n, NULL, &plain) == CASE_PASSED);
    CHECK(case_run(&file, n, enlarge, &larger) == CASE_PASSED);
    CHECK(case_run(&file, n, shorten, &smaller) == CASE_PASSED);
    CHECK(plain == larger && plain == smaller);
  }
  const char *const kinds[] = {"desc", "forward_args", "backward_args"};
  for (int k = 0; k < 3; ++k) {
    int32_t reason = 0;
    const char *field = NULL;
    marked = kinds[k];
    /* The first case runs backward too. case_run prints the refusal that is wanted here. */
    CHECK(case_run(&file, 0, enlarge_and_mark, NULL) == CASE_FAILED);
    const char *sentence = flashattn_last_error(&reason, &field);
    CHECK(reason == FLASHATTN_REASON_STRUCT_SIZE);
    CHECK(strcmp(field, "struct_size") == 0);
    CHECK(strlen(sentence) > 40);
  }
  case_file_close(&file);
  return check_report();
}
