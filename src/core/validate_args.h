// Checks of everything a call is given, before anything is read from or written to the arrays.
#pragma once

#include "core/arrays.h"
#include "core/problem.h"

namespace flashattn {

Shape shape_of(const flashattn_args& args);

// Sizes, their products, and maxima of the plan. prefix: of the members' names; "max_" for the
// maxima themselves.
void check_shape(const Problem& problem, const Shape& shape, const char* prefix = "");

// Each checks the arguments of a call, resolves strides, and lists the arrays the call will touch,
// overlaps not yet looked at: the workspace comes to them. With `host`, lengths and page numbers
// are looked into.
ForwardArgs check_forward(const Problem& problem, bool host, flashattn_args args,
                          ArrayList* arrays);
BackwardArgs check_backward(const Problem& problem, bool host, flashattn_args args,
                            ArrayList* arrays);

// Checked whole, overlaps included. The strides of part_o are the caller's memory and stay as they
// are: resolve_strides() gives those to use.
MergeArgs check_merge(const Problem& problem, flashattn_merge_args args);
ForwardArgs check_dropout_mask(const Problem& problem, const flashattn_args& args,
                               const uint8_t* keep);

// validate_contents.cpp: what lengths and page numbers in host memory say.
void check_contents(const Problem& problem, const Shape& shape, const Inputs& inputs);

}  // namespace flashattn
