// Checks all arguments of a call before any array is read or written.
#pragma once

#include "core/arrays.h"
#include "core/block_mask_rows.h"
#include "core/problem.h"

namespace flashattn {

Shape shape_of(const flashattn_args& args);

// Checks sizes, their products and the plan's maxima. prefix: precedes the members' names in
// messages; "max_" for the maxima themselves.
void check_shape(const Problem& problem, const Shape& shape, const char* prefix = "");

// Each function checks the arguments of a call, resolves strides and lists the arrays that the call
// touches. Overlaps are checked later, together with the workspace. host: lengths and page numbers
// lie in host memory and are checked, too.
ForwardArgs check_forward(const Problem& problem, bool host, flashattn_args args,
                          ArrayList* arrays);
BackwardArgs check_backward(const Problem& problem, bool host, flashattn_args args,
                            ArrayList* arrays);

// Likewise the arrays of a block mask that the library makes. inputs: as check_forward() or
// check_backward() returned them.
BlockMaskArgs check_block_mask(const Problem& problem, const Shape& shape, const Inputs& inputs,
                               flashattn_args args, ArrayList* arrays);
// Refuses such a mask of too many blocks. prefix: as of check_shape().
void check_block_mask_size(const Problem& problem, const Shape& shape, const char* prefix);

// Each function checks all arguments, overlaps included. part_o is the caller's memory, so its
// strides stay as given; resolve_strides() gives the strides to use.
MergeArgs check_merge(const Problem& problem, flashattn_merge_args args);
QuantizeArgs check_quantize(const Problem& problem, bool host, flashattn_quantize_args args);
AppendArgs check_append_kv(const Problem& problem, bool host, flashattn_append_kv_args args);
ForwardArgs check_dropout_mask(const Problem& problem, const flashattn_args& args,
                               const uint8_t* keep);

// Refuses the array `name` if it is set but not used: it has a meaning only with `other`, which
// this call does not have. suffix: ".data" of a tensor.
void check_beside(const char* name, const char* suffix, const void* data, bool used,
                  const char* other);

// The number of blocks of tokens that have a descale each.
inline int64_t descale_blocks(const Problem& problem, int32_t tokens) {
  return problem.descale_block > 0 ? ceil_div(tokens, problem.descale_block) : tokens > 0;
}

// The number of neighbouring elements that ROTATE mixes: the largest power of two that divides dim.
inline int32_t hadamard_size(int32_t dim) { return dim & -dim; }

// Copies the sizes and lengths, which the arguments of every operation have by the same names.
template <class Args>
flashattn_args lengths_of(const Args& args) {
  flashattn_args lengths{};
  lengths.batch = args.batch;
  lengths.seqlen_q = args.seqlen_q;
  lengths.seqlen_kv = args.seqlen_kv;
  lengths.total_q = args.total_q;
  lengths.total_kv = args.total_kv;
  lengths.cu_seqlens_q = args.cu_seqlens_q;
  lengths.cu_seqlens_kv = args.cu_seqlens_kv;
  lengths.lens_q = args.lens_q;
  lengths.lens_kv = args.lens_kv;
  lengths.starts_kv = args.starts_kv;
  return lengths;
}

// Checks the sizes and lengths of a call and, with PAGED_KV, its page table; no other array.
Inputs check_lengths(const Problem& problem, bool host, flashattn_args* args, ArrayList* arrays);

// Checks the values of lengths and page numbers in host memory (validate_contents.cpp).
void check_contents(const Problem& problem, const Shape& shape, const Inputs& inputs);

}  // namespace flashattn
