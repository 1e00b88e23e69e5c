// The process-wide log. Silent until flashattn_set_log gives it somewhere to go.
#pragma once

#include <cstdint>

#include "flashattn.h"

namespace flashattn {

// Refuses an unknown level. From the moment this returns, the function set before is not called.
void set_log(int32_t level, flashattn_log_fn fn, void* user);

// Whether a line of this level would go anywhere: ask before doing work for it.
bool log_enabled(int32_t level) noexcept;

__attribute__((format(printf, 2, 3))) void log(int32_t level, const char* format, ...) noexcept;

}  // namespace flashattn
