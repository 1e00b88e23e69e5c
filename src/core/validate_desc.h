// From the caller's descriptor to a Problem.
#pragma once

#include "core/problem.h"

namespace flashattn {

// Refuses what no device could honour and resolves every default. What a device or kernel backend
// cannot do is not looked at here: see select.h.
Problem make_problem(const flashattn_desc& desc);

// "FLASHATTN_DTYPE_BF16"; "unknown" for any other number.
const char* dtype_name(int32_t dtype);

}  // namespace flashattn
