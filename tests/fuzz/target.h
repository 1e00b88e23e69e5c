#pragma once

#include "calls.h"

namespace fuzz {

// One input. Aborts where the library is at fault.
Round run_input(const uint8_t* data, size_t size);

}  // namespace fuzz
