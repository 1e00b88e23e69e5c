// What an operation costs at the least, as flashattn_plan_properties reports it.
#pragma once

#include "core/problem.h"

namespace flashattn {

struct Cost {
  int64_t flops, bytes;  // INT64_MAX where they do not fit
};

// Lengths are those of the shape: upper bounds where the real ones lie on the device. VARLEN: as
// few and as long sequences as the totals allow. Takes time linear in the sequence length.
Cost operation_cost(const Problem& problem, uint32_t op, const Shape& shape);

}  // namespace flashattn
