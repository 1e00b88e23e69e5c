// The devices of this machine.
#pragma once

#include "core/problem.h"

namespace flashattn {

// Returns 0 if the build or the machine has none. Refuses a kind that does not exist.
int32_t device_count(int32_t kind);

// Refuses a kind or index that does not exist. The device lives as long as the process. field: the
// member that holds the index, for the message.
const Device& find_device(int32_t kind, int32_t index, const char* field = "device_index");

}  // namespace flashattn
