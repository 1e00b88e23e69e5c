// Makes a Problem of the caller's descriptor.
#pragma once

#include "core/problem.h"

namespace flashattn {

// Refuses what no device could compute and resolves every default. Limits of a device or backend
// are checked elsewhere: see select.h.
Problem make_problem(const flashattn_desc& desc);

void check_reserved(int32_t reserved, const char* structure);

// "FLASHATTN_DTYPE_BF16"; "unknown" for any other number.
const char* dtype_name(int32_t dtype);

}  // namespace flashattn
