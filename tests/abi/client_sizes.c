/* Programs compiled with a later header, whose structures are larger: they run while they ask for
 * nothing that this library does not know, and are refused with a message when they do. (Programs
 * of earlier headers: struct_size.c; this is the first version that later ones accept.) */
#include <string.h>

#include "../unit/check.h"
#include "case_file.h"

static size_t size_of(const char *kind) {
  return strcmp(kind, "desc") == 0 ? sizeof(flashattn_desc) : sizeof(flashattn_args);
}

/* struct_size comes first in every structure; case_run keeps CASE_TAIL zero bytes behind. */
static void enlarge(const char *kind, void *structure) {
  const uint32_t size = (uint32_t)(size_of(kind) + CASE_TAIL);
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
  uint64_t plain = 0, larger = 1;
  for (int n = 0; n < file.count; ++n) {
    CHECK(case_run(&file, n, NULL, &plain) == CASE_PASSED);
    CHECK(case_run(&file, n, enlarge, &larger) == CASE_PASSED);
    CHECK(plain == larger);
  }
  const char *const kinds[] = {"desc", "args"};
  for (int k = 0; k < 2; ++k) {
    int32_t reason = 0;
    const char *field = NULL;
    marked = kinds[k];
    /* The first case runs backward too. case_run prints the refusal that is wanted here. */
    CHECK(case_run(&file, 0, enlarge_and_mark, NULL) == CASE_FAILED);
    const char *message = flashattn_last_error(&reason, &field);
    CHECK(reason == FLASHATTN_REASON_STRUCT_SIZE);
    CHECK(strcmp(field, "struct_size") == 0);
    CHECK(strlen(message) > 40);
  }
  case_file_close(&file);
  return check_report();
}
