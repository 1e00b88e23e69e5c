// Which kernel family serves a problem: the first, in order of preference, that does not refuse.
#pragma once

#include "core/family.h"

namespace flashattn {

struct FamilyList {
  const Family* const* families;  // in order of preference
  size_t count;
};

// All families of this build.
FamilyList families();

// The GPU family that the environment variable FLASHATTN_FAMILY asks for, for tests and
// comparisons: no other is chosen then, and it uses its own kernels for every shape. NULL: none.
// Read once a process.
const char* forced_family();

// Refuses with UNSUPPORTED when every family does, in the words of the one that came closest.
// passed_over: what the first of the preferred families said, for Family::plan; may be NULL.
const Family& select_family(const Problem& problem, const Device& device, FamilyList list,
                            std::string* passed_over);

}  // namespace flashattn
