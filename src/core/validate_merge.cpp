// Checks the arguments of flashattn_merge.
#include "core/error.h"
#include "core/validate_args.h"
#include "core/validate_desc.h"

namespace flashattn {

MergeArgs check_merge(const Problem& problem, flashattn_merge_args args) {
  check_reserved(args.reserved, "flashattn_merge_args");
  const bool varlen = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  // flashattn_merge reads only these sizes, so only these are checked.
  Shape shape{};
  shape.batch = varlen ? 0 : args.batch;
  shape.seqlen_q = varlen ? 0 : args.seqlen_q;
  shape.total_q = varlen ? args.total_q : 0;
  check_shape(problem, shape);
  if (args.parts < 1) {
    reject(FLASHATTN_REASON_SIZE, "parts",
           "parts = %d is below 1; set it to the number of partial results", args.parts);
  }
  if (args.dtype_part == FLASHATTN_DTYPE_DEFAULT) args.dtype_part = problem.dtype_o;
  if (args.dtype_part != problem.dtype_o && args.dtype_part != FLASHATTN_DTYPE_F32) {
    reject(FLASHATTN_REASON_DTYPE, "dtype_part",
           "dtype_part = %d (%s) is neither the plan's dtype_o = %s nor FLASHATTN_DTYPE_F32 = %d; "
           "use one of them, or 0 for dtype_o",
           args.dtype_part, dtype_name(args.dtype_part), dtype_name(problem.dtype_o),
           FLASHATTN_DTYPE_F32);
  }
  const Rows rows = query_rows(problem, shape);
  const int32_t heads = problem.heads_q, dim = problem.dim_v;
  Array o = tensor_array("o", Use::kOutput, &args.o, rows, heads, dim, problem.dtype_o);
  Array lse = lse_array("lse", Use::kOutput, args.lse, problem, rows);
  if (!args.lse) lse.extent[0] = 0;
  check_array(&o);
  check_array(&lse);
  check_apart(o, lse);
  const struct {
    const char* field;
    const void* data;
  } lists[] = {{"part_o", args.part_o}, {"part_lse", args.part_lse}};
  for (const auto& list : lists) {
    if (list.data) continue;
    reject(FLASHATTN_REASON_NULL_POINTER, list.field,
           "%s is NULL; give a host array with one entry for each of the %d parts", list.field,
           args.parts);
  }
  for (int32_t p = 0; p < args.parts; ++p) {
    flashattn_tensor tensor = args.part_o[p];
    Array part_o = tensor_array("part_o", Use::kInput, &tensor, rows, heads, dim, args.dtype_part);
    Array part_lse = lse_array("part_lse", Use::kInput, args.part_lse[p], problem, rows);
    part_o.index = part_lse.index = p;
    check_array(&part_o);
    check_array(&part_lse);
    const bool in_place = part_o.data == o.data && args.dtype_part == problem.dtype_o &&
                          tensor.stride_batch == args.o.stride_batch &&
                          tensor.stride_head == args.o.stride_head &&
                          tensor.stride_seq == args.o.stride_seq;
    if (!in_place) check_apart(o, part_o);
    if (part_lse.data != lse.data) check_apart(lse, part_lse);
    check_apart(o, part_lse);
    check_apart(lse, part_o);
  }
  return {shape, args.parts, args.dtype_part, args.part_o, args.part_lse, args.o, args.lse};
}

}  // namespace flashattn
