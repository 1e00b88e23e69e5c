// The process-wide log. Silent until flashattn_set_log sets a function.
#pragma once

#include <cstdint>

#include "flashattn.h"

namespace flashattn {

// Refuses an unknown level. Once this has returned, the previous function is not called any more.
void set_log(int32_t level, flashattn_log_fn fn, void* user);

// Whether a line of this level would be written. Ask before formatting it.
bool log_enabled(int32_t level) noexcept;

__attribute__((format(printf, 2, 3))) void log(int32_t level, const char* format, ...) noexcept;

}  // namespace flashattn
