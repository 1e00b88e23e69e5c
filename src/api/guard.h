// Stands between the C functions and the library. No exception passes, every failure is recorded
// and logged, and the caller's floating-point environment is neither used nor changed.
#pragma once

#include "core/error.h"
#include "core/float_environment.h"
#include "core/log.h"

namespace flashattn {

// Runs `body`, which returns an enum flashattn_status, for the C function `function`. body sets the
// second destination of errors once it knows that the caller's structure is one of this version: a
// program of 0.1 passes no such address.
template <typename Body>
int32_t guard(const char* function, const Body& body) noexcept {
  int32_t status = FLASHATTN_OK;
  ErrorOut out;
  try {
    const FloatEnvironment environment;
    status = body(out);
  } catch (...) {
    status = status_of_exception();
  }
  if (status != FLASHATTN_OK) {
    log(FLASHATTN_LOG_ERROR, "%s: %s", function, last_error().text);
    out.write(status);
  }
  return status;
}

}  // namespace flashattn
