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

// Refuses with UNSUPPORTED when every family does, in the words of the one that came closest.
const Family& select_family(const Problem& problem, const Device& device, FamilyList list);

}  // namespace flashattn
