#include "core/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "core/copy_in.h"

namespace flashattn {
namespace {

thread_local Error t_error;

void record(int32_t reason, const char* field, const char* format, va_list values) {
  // A message may quote the error that it replaces, so it is formatted elsewhere first.
  char text[sizeof t_error.text];
  std::vsnprintf(text, sizeof text, format, values);
  std::snprintf(t_error.text, sizeof t_error.text, "%s", text);
  std::snprintf(t_error.field, sizeof t_error.field, "%s", field);
  t_error.reason = reason;
}

}  // namespace

const Error& last_error() { return t_error; }

int32_t fail(int32_t status, int32_t reason, const char* field, const char* format, ...) {
  va_list values;
  va_start(values, format);
  record(reason, field, format, values);
  va_end(values);
  return status;
}

void ErrorOut::set(flashattn_error* error) {
  if (error) copy_in(error, "error");  // refuses a wrong size, or members of a later header
  error_ = error;
}

void ErrorOut::write(int32_t status) const noexcept {
  if (!error_) return;
  flashattn_error own{};
  own.status = status;
  own.reason = t_error.reason;
  std::memcpy(own.field, t_error.field, sizeof own.field);
  std::memcpy(own.message, t_error.text, sizeof own.message);
  copy_out(own, error_);
}

void refuse(int32_t status, int32_t reason, const char* field, const char* format, ...) {
  va_list values;
  va_start(values, format);
  record(reason, field, format, values);
  va_end(values);
  throw Refused{status};
}

void reject(int32_t reason, const char* field, const char* format, ...) {
  va_list values;
  va_start(values, format);
  record(reason, field, format, values);
  va_end(values);
  throw Refused{FLASHATTN_ERROR_INVALID_ARGUMENT};
}

int32_t status_of_exception() noexcept {
  try {
    throw;
  } catch (const Refused& refused) {
    return refused.status;
  } catch (const std::bad_alloc&) {
    return fail(FLASHATTN_ERROR_OUT_OF_MEMORY, FLASHATTN_REASON_NONE, "",
                "host memory ran out; nothing was changed: free some and call again");
  } catch (const std::exception& exception) {
    return fail(FLASHATTN_ERROR_INTERNAL, FLASHATTN_REASON_NONE, "",
                "unexpected exception: %s; this is a fault of the library, please report it",
                exception.what());
  } catch (...) {
    return fail(FLASHATTN_ERROR_INTERNAL, FLASHATTN_REASON_NONE, "",
                "unknown exception; this is a fault of the library, please report it");
  }
}

}  // namespace flashattn
