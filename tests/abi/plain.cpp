// A C++ program without exceptions and without type information, as game engines and browsers are
// built: all cases, and a refusal, inside of which the library throws.
#include "../unit/check.h"
extern "C" {
#include "case_file.h"
}

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "to be compiled with -fno-exceptions -fno-rtti"
#endif

int main(int argc, char** argv) {
  static case_file file;
  if (!CHECK(argc > 1 && case_file_open(&file, argv[1]))) return check_report();
  for (int n = 0; n < file.count; ++n) {
    CHECK(case_run(&file, n, nullptr, nullptr) == CASE_PASSED);
  }
  flashattn_desc desc = {};
  flashattn_plan* plan = nullptr;
  desc.struct_size = sizeof desc;
  CHECK_STATUS(flashattn_plan_create(&desc, &plan, NULL), FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(flashattn_last_error(nullptr, nullptr), "dtype") != nullptr);
  case_file_close(&file);
  return check_report();
}
