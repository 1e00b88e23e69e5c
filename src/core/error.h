// The thread's last error. Every refusal of this library has a status, a reason, the structure
// member that it is about, and a message that names field, value, limit, device and remedy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashattn.h"

namespace flashattn {

// Plain data in thread-local storage: no destructor may outlive dlclose.
struct Error {
  int32_t reason;  // enum flashattn_reason
  char field[sizeof flashattn_error::field];
  char text[sizeof flashattn_error::message];
};

// Returns what flashattn_last_error reports. Valid until the thread's next failure.
const Error& last_error();

// Records a failure and returns `status`. `field` is copied and may be "".
__attribute__((format(printf, 4, 5))) int32_t fail(int32_t status, int32_t reason,
                                                   const char* field, const char* format, ...);

// A second destination for the error of a call: memory of the caller.
class ErrorOut {
 public:
  // May be NULL. Refuses a structure of an unknown size.
  void set(flashattn_error* error);
  // Copies the thread's last error there, if the caller gave such memory.
  void write(int32_t status) const noexcept;

 private:
  flashattn_error* error_ = nullptr;
};

// Thrown by refuse() through the library's own code only; it never leaves the library.
struct Refused {
  int32_t status;
};

// Records a failure and throws Refused.
[[noreturn]] __attribute__((format(printf, 4, 5))) void refuse(int32_t status, int32_t reason,
                                                               const char* field,
                                                               const char* format, ...);

// refuse() with INVALID_ARGUMENT, the status of most refusals.
[[noreturn]] __attribute__((format(printf, 3, 4))) void reject(int32_t reason, const char* field,
                                                               const char* format, ...);

// Records the exception in flight and returns its status. Call it inside a catch block.
int32_t status_of_exception() noexcept;

}  // namespace flashattn
