// What stands between the C functions and the library: no exception passes, every failure is
// recorded and logged, and the caller's floating-point environment is neither used nor changed.
#pragma once

#include "core/error.h"
#include "core/float_environment.h"
#include "core/log.h"

namespace flashattn {

// Runs `body`, which returns an enum flashattn_status, for the C function `function`.
template <typename Body>
int32_t guard(const char* function, const Body& body) noexcept {
  int32_t status = FLASHATTN_OK;
  try {
    const FloatEnvironment environment;
    status = body();
  } catch (...) {
    status = status_of_exception();
  }
  if (status != FLASHATTN_OK) log(FLASHATTN_LOG_ERROR, "%s: %s", function, last_error().text);
  return status;
}

}  // namespace flashattn
