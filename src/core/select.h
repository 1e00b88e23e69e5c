// Chooses the backend of a problem: the first, in order of preference, that does not refuse.
#pragma once

#include "core/backend.h"

namespace flashattn {

// The GPU backend that the environment variable FLASHATTN_BACKEND names, for tests and comparisons.
// Then no other GPU backend is chosen, and it runs its own kernels for every shape. NULL: none.
// Read once a process.
const char* forced_backend();

// Refuses with UNSUPPORTED if every backend refuses, with the message of the one that came closest.
// passed_over: receives the message of the first backend that refused, for Backend::plan; may be
// NULL.
const Backend& select_backend(const Problem& problem, const Device& device, BackendList list,
                              std::string* passed_over);

}  // namespace flashattn
