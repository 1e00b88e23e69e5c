// The least cost of an operation, as flashattn_plan_properties reports it.
#pragma once

#include "core/problem.h"

namespace flashattn {

struct Cost {
  int64_t flops, bytes;  // INT64_MAX where they do not fit
};

// Lengths are those of the shape: upper bounds if the real lengths lie on the device. VARLEN: as
// few and as long sequences as the totals allow. The time that this function takes does not depend
// on the lengths.
Cost operation_cost(const Problem& problem, uint32_t op, const Shape& shape);

}  // namespace flashattn
