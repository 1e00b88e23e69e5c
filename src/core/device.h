// The devices of this machine.
#pragma once

#include "core/problem.h"

namespace flashattn {

// Refuses a kind that does not exist; 0 where the build or the machine has none.
int32_t device_count(int32_t kind);

// Refuses a kind or number that does not exist. Lives as long as the process. field: what the
// caller calls the index.
const Device& find_device(int32_t kind, int32_t index, const char* field = "device_index");

}  // namespace flashattn
