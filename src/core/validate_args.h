// Checks of everything a call is given, before anything is read from or written to the arrays.
#pragma once

#include "core/arrays.h"
#include "core/problem.h"

namespace flashattn {

// Sizes, their products, unused fields and promises of the plan. prefix: of the members' names;
// "max_" for a shape of promises.
void check_shape(const Problem& problem, const flashattn_shape& shape,
                 const char* prefix = "shape.");

// Each checks the structure of a call, fills in what was left to default (packed strides,
// page_table_stride, block_mask_stride_row) and lists the arrays it will touch, overlaps not yet
// looked at: the workspace comes to them. With `host`, lengths and page numbers are looked into.
void check_forward(const Problem& problem, bool host, flashattn_forward_args* args,
                   ArrayList* arrays);
void check_backward(const Problem& problem, bool host, flashattn_backward_args* args,
                    ArrayList* arrays);

// Checked whole, overlaps included. The strides of part_o are the caller's memory and stay as they
// are: resolve_strides() gives the packed ones.
void check_merge(const Problem& problem, flashattn_merge_args* args);
void check_dropout_mask(const Problem& problem, const flashattn_forward_args& args,
                        const uint8_t* keep);

// validate_contents.cpp: what lengths and page numbers in host memory say.
void check_contents(const Problem& problem, const flashattn_shape& shape,
                    const flashattn_inputs& inputs);

}  // namespace flashattn
