/* Bad values, field by field, and what the library says of them: the table of bad_input.c. */
#ifndef BAD_INPUT_ROWS_H
#define BAD_INPUT_ROWS_H

#include <math.h>

#include "fixture.h"

enum target { DESC, FORWARD, BACKWARD, MERGE, KEEP, CONTENTS };
enum kind { I32, I64, F32, ADDRESS };

struct row {
  enum variant variant;
  enum target target;
  size_t offset; /* of the member that is spoilt, in the structure of the target */
  enum kind kind;
  double value; /* ADDRESS: added to the pointer; NAN: it becomes NULL; INFINITY: it is set */
  int32_t status, reason;
  const char* field;
};

#define D(member) DESC, offsetof(flashattn_desc, member)
#define F(member) FORWARD, offsetof(flashattn_forward_args, member)
#define B(member) BACKWARD, offsetof(flashattn_backward_args, member)
#define M(member) MERGE, offsetof(flashattn_merge_args, member)
#define K(member) KEEP, offsetof(flashattn_forward_args, member)
#define IN(member) CONTENTS, offsetof(struct inputs, member)
#define INVALID(reason) FLASHATTN_ERROR_INVALID_ARGUMENT, FLASHATTN_REASON_##reason
#define UNSUPPORTED(reason) FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_##reason

#define TO_NULL ADDRESS, NAN
#define TO_SOMETHING ADDRESS, INFINITY

static const struct row rows[] = {
    /* The descriptor. */
    {PLAIN, D(struct_size), I32, 0, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, D(struct_size), I32, 8, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, D(struct_size), I32, -1, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, D(device), I32, 2, INVALID(VALUE), "device"},
    {PLAIN, D(device), I32, -1, INVALID(VALUE), "device"},
    {PLAIN, D(device_index), I32, 1, UNSUPPORTED(NO_DEVICE), "device_index"},
    {PLAIN, D(device_index), I32, -1, INVALID(VALUE), "device_index"},
    {PLAIN, D(ops), I32, 4, INVALID(VALUE), "ops"},
    {PLAIN, D(dtype), I32, 0, INVALID(DTYPE), "dtype"},
    {PLAIN, D(dtype), I32, FLASHATTN_DTYPE_U8, INVALID(DTYPE), "dtype"},
    {PLAIN, D(dtype), I32, 6, INVALID(DTYPE), "dtype"},
    {PLAIN, D(dtype), I32, FLASHATTN_DTYPE_F8E4M3, UNSUPPORTED(DTYPE), "dtype"},
    {PLAIN, D(dtype_o), I32, FLASHATTN_DTYPE_U8, INVALID(DTYPE), "dtype_o"},
    {PLAIN, D(dtype_o), I32, FLASHATTN_DTYPE_F16, INVALID(DTYPE_MIX), "dtype_o"},
    {PLAIN, D(heads_q), I32, 0, INVALID(SIZE), "heads_q"},
    {PLAIN, D(heads_q), I32, -4, INVALID(SIZE), "heads_q"},
    {PLAIN, D(heads_q), I32, 5, INVALID(HEAD_RATIO), "heads_kv"},
    {PLAIN, D(heads_kv), I32, 3, INVALID(HEAD_RATIO), "heads_kv"},
    {PLAIN, D(heads_kv), I32, 8, INVALID(HEAD_RATIO), "heads_kv"},
    {PLAIN, D(heads_kv), I32, -1, INVALID(SIZE), "heads_kv"},
    {PLAIN, D(dim_qk), I32, 0, INVALID(SIZE), "dim_qk"},
    {PLAIN, D(dim_qk), I32, -8, INVALID(SIZE), "dim_qk"},
    {PLAIN, D(dim_qk), I32, 513, UNSUPPORTED(HEAD_DIM_MAX), "dim_qk"},
    {PLAIN, D(dim_v), I32, -1, INVALID(SIZE), "dim_v"},
    {PLAIN, D(dim_v), I32, 513, UNSUPPORTED(HEAD_DIM_MAX), "dim_v"},
    {PLAIN, D(layout), I32, 8, INVALID(VALUE), "layout"},
    {PLAIN, D(layout), I32, FLASHATTN_LAYOUT_PAGED_KV, INVALID(PAGE_SIZE), "page_size"},
    {PAGED, D(layout), I32, FLASHATTN_LAYOUT_PAGED_KV | FLASHATTN_LAYOUT_VARLEN_KV, INVALID(LAYOUT),
     "layout"},
    {PAGED, D(ops), I32, FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD, INVALID(LAYOUT), "layout"},
    {PLAIN, D(page_size), I32, 16, INVALID(PAGE_SIZE), "page_size"},
    {PAGED, D(page_size), I32, 0, INVALID(PAGE_SIZE), "page_size"},
    {PAGED, D(page_size), I32, -16, INVALID(PAGE_SIZE), "page_size"},
    {PLAIN, D(mask), I32, 32, INVALID(VALUE), "mask"},
    {PLAIN, D(mask), I32, FLASHATTN_MASK_CHUNK, INVALID(MASK_COMBINATION), "chunk"},
    {PLAIN, D(mask), I32, FLASHATTN_MASK_BLOCKS, INVALID(MASK_COMBINATION), "block_q"},
    {PLAIN, D(window_left), I32, 4, INVALID(MASK_COMBINATION), "window_left"},
    {PLAIN, D(window_left), I32, -1, INVALID(MASK_COMBINATION), "window_left"},
    {EVERYTHING, D(window_left), I32, -2, INVALID(VALUE), "window_left"},
    {EVERYTHING, D(window_right), I32, -2, INVALID(VALUE), "window_right"},
    {PLAIN, D(window_right), I32, 1, INVALID(MASK_COMBINATION), "window_right"},
    {PLAIN, D(chunk), I32, 8, INVALID(MASK_COMBINATION), "chunk"},
    {EVERYTHING, D(chunk), I32, 0, INVALID(MASK_COMBINATION), "chunk"},
    {EVERYTHING, D(chunk), I32, -1, INVALID(SIZE), "chunk"},
    {PLAIN, D(block_q), I32, 8, INVALID(MASK_COMBINATION), "block_q"},
    {EVERYTHING, D(block_q), I32, 0, INVALID(MASK_COMBINATION), "block_q"},
    {EVERYTHING, D(block_kv), I32, -1, INVALID(SIZE), "block_kv"},
    {PLAIN, D(bias), I32, 4, INVALID(VALUE), "bias"},
    {PLAIN, D(bias_dtype), I32, FLASHATTN_DTYPE_F32, INVALID(BIAS), "bias_dtype"},
    {EVERYTHING, D(bias_dtype), I32, 6, INVALID(DTYPE), "bias_dtype"},
    {EVERYTHING, D(bias_dtype), I32, FLASHATTN_DTYPE_F8E4M3, INVALID(BIAS), "bias_dtype"},
    {EVERYTHING, D(bias_dtype), I32, FLASHATTN_DTYPE_U8, INVALID(BIAS), "features"},
    {EVERYTHING, D(bias), I32, FLASHATTN_BIAS_ALIBI, INVALID(BIAS), "features"},
    {PLAIN, D(features), I32, 32, INVALID(VALUE), "features"},
    {PAGED, D(features), I32, FLASHATTN_FEATURE_DLSE, INVALID(OP), "features"},
    {PAGED, D(features), I32, FLASHATTN_FEATURE_DBIAS, INVALID(OP), "features"},
    {PAGED, D(features), I32, FLASHATTN_FEATURE_DSINK, INVALID(OP), "features"},
    {PLAIN, D(features), I32, FLASHATTN_FEATURE_DBIAS, INVALID(BIAS), "features"},
    {PLAIN, D(features), I32, FLASHATTN_FEATURE_DSINK, INVALID(SINK), "features"},
    {PLAIN, D(determinism), I32, 3, INVALID(VALUE), "determinism"},
    {PLAIN, D(scale), F32, NAN, INVALID(VALUE), "scale"},
    {PLAIN, D(scale), F32, INFINITY, INVALID(VALUE), "scale"},
    {PLAIN, D(softcap), F32, -1, INVALID(SOFTCAP), "softcap"},
    {PLAIN, D(softcap), F32, NAN, INVALID(SOFTCAP), "softcap"},
    {PLAIN, D(dropout), F32, 1, INVALID(DROPOUT), "dropout"},
    {PLAIN, D(dropout), F32, -0.5, INVALID(DROPOUT), "dropout"},
    {PLAIN, D(dropout), F32, NAN, INVALID(DROPOUT), "dropout"},
    {PLAIN, D(dropout), F32, 0.9999999, INVALID(DROPOUT), "dropout"},
    {PLAIN, D(splits), I32, -1, INVALID(SIZE), "splits"},
    {PLAIN, D(splits), I32, 4097, INVALID(SIZE), "splits"},
    {PLAIN, D(max_batch), I32, -1, INVALID(SIZE), "max_batch"},
    {PLAIN, D(max_seqlen_q), I32, -1, INVALID(SIZE), "max_seqlen_q"},
    {PLAIN, D(max_seqlen_kv), I32, -1, INVALID(SIZE), "max_seqlen_kv"},
    {PLAIN, D(max_total_q), I64, 7, INVALID(LAYOUT), "max_total_q"},
    {VARLEN, D(max_total_kv), I64, -7, INVALID(SIZE), "max_total_kv"},
    {PLAIN, D(sm_limit), I32, 8, INVALID(VALUE), "sm_limit"},
    {PLAIN, D(threads), I32, -1, INVALID(SIZE), "threads"},
    {PLAIN, D(workspace_limit), I64, -1, INVALID(SIZE), "workspace_limit"},
    {PLAIN, D(workspace_limit), I64, 1, INVALID(WORKSPACE_LIMIT), "max_batch"},
    {PLAIN, D(reserved0), I32, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, D(reserved[3]), I64, 1, INVALID(RESERVED), "reserved"},

    /* Sizes and structure of a call. */
    {PLAIN, F(struct_size), I32, 0, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, B(struct_size), I32, 64, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, M(struct_size), I32, 0, FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE,
     "struct_size"},
    {PLAIN, F(reserved0), I32, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, F(reserved[0]), I64, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, F(inputs.reserved[0]), I64, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, F(shape.reserved), I32, 1, INVALID(RESERVED), "shape.reserved"},
    {PLAIN, B(reserved0), I32, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, B(reserved[3]), I64, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, M(reserved0), I32, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, M(reserved[1]), I64, 1, INVALID(RESERVED), "reserved"},
    {PLAIN, F(shape.batch), I32, -1, INVALID(SIZE), "shape.batch"},
    {PLAIN, F(shape.seqlen_q), I32, -1, INVALID(SIZE), "shape.seqlen_q"},
    {PLAIN, B(shape.seqlen_kv), I32, -1, INVALID(SIZE), "shape.seqlen_kv"},
    {PLAIN, F(shape.total_q), I64, 10, INVALID(SIZE), "shape.total_q"},
    {PLAIN, F(shape.total_kv), I64, 10, INVALID(SIZE), "shape.total_kv"},
    {VARLEN, F(shape.total_q), I64, -1, INVALID(SIZE), "shape.total_q"},
    {VARLEN, F(shape.total_kv), I64, 9e18, INVALID(SIZE), "shape.total_kv"},
    {PAGED, F(inputs.pages), I64, 9e18, INVALID(SIZE), "inputs.k.data"},
    {PLAIN, F(inputs.q.stride_batch), I64, 9e18, INVALID(SIZE), "inputs.q.data"},
    {PLAIN, F(inputs.k.stride_seq), I64, 4e18, INVALID(SIZE), "inputs.k.data"},

    /* Pointers that are missing, superfluous or crooked. */
    {PLAIN, F(inputs.q.data), TO_NULL, INVALID(NULL_POINTER), "inputs.q.data"},
    {PLAIN, F(inputs.k.data), TO_NULL, INVALID(NULL_POINTER), "inputs.k.data"},
    {PLAIN, F(inputs.v.data), TO_NULL, INVALID(NULL_POINTER), "inputs.v.data"},
    {PLAIN, F(o.data), TO_NULL, INVALID(NULL_POINTER), "o.data"},
    {PLAIN, F(lse), TO_NULL, INVALID(NULL_POINTER), "lse"},
    {PLAIN, B(o.data), TO_NULL, INVALID(NULL_POINTER), "o.data"},
    {PLAIN, B(dout.data), TO_NULL, INVALID(NULL_POINTER), "dout.data"},
    {PLAIN, B(lse), TO_NULL, INVALID(NULL_POINTER), "lse"},
    {PLAIN, B(dq.data), TO_NULL, INVALID(NULL_POINTER), "dq.data"},
    {PLAIN, B(dk.data), TO_NULL, INVALID(NULL_POINTER), "dk.data"},
    {PLAIN, B(dv.data), TO_NULL, INVALID(NULL_POINTER), "dv.data"},
    {EVERYTHING, B(dlse), TO_NULL, INVALID(NULL_POINTER), "dlse"},
    {EVERYTHING, B(dbias), TO_NULL, INVALID(NULL_POINTER), "dbias"},
    {EVERYTHING, B(dsink), TO_NULL, INVALID(NULL_POINTER), "dsink"},
    {EVERYTHING, F(inputs.bias), TO_NULL, INVALID(NULL_POINTER), "inputs.bias"},
    {EVERYTHING, F(inputs.alibi_slopes), TO_NULL, INVALID(NULL_POINTER), "inputs.alibi_slopes"},
    {EVERYTHING, F(inputs.sink), TO_NULL, INVALID(NULL_POINTER), "inputs.sink"},
    {EVERYTHING, F(inputs.block_mask), TO_NULL, INVALID(NULL_POINTER), "inputs.block_mask"},
    {VARLEN, F(inputs.cu_seqlens_q), TO_NULL, INVALID(NULL_POINTER), "inputs.cu_seqlens_q"},
    {VARLEN, B(inputs.cu_seqlens_kv), TO_NULL, INVALID(NULL_POINTER), "inputs.cu_seqlens_kv"},
    {PAGED, F(inputs.page_table), TO_NULL, INVALID(NULL_POINTER), "inputs.page_table"},
    {PLAIN, M(part_o), TO_NULL, INVALID(NULL_POINTER), "part_o"},
    {PLAIN, M(part_lse), TO_NULL, INVALID(NULL_POINTER), "part_lse"},
    {PLAIN, M(o.data), TO_NULL, INVALID(NULL_POINTER), "o.data"},
    {PLAIN, F(inputs.cu_seqlens_q), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.cu_seqlens_q"},
    {PLAIN, F(inputs.cu_seqlens_kv), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.cu_seqlens_kv"},
    {PLAIN, F(inputs.page_table), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.page_table"},
    {PLAIN, F(inputs.bias), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.bias"},
    {PLAIN, F(inputs.alibi_slopes), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.alibi_slopes"},
    {PLAIN, B(inputs.sink), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.sink"},
    {PLAIN, B(inputs.block_mask), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.block_mask"},
    {PLAIN, F(inputs.descale_q), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.descale_q"},
    {PLAIN, F(inputs.rng_device), TO_SOMETHING, INVALID(NULL_POINTER), "inputs.rng_device"},
    {PLAIN, B(dlse), TO_SOMETHING, INVALID(NULL_POINTER), "dlse"},
    {PLAIN, B(dbias), TO_SOMETHING, INVALID(NULL_POINTER), "dbias"},
    {PLAIN, B(dsink), TO_SOMETHING, INVALID(NULL_POINTER), "dsink"},
    {PLAIN, F(inputs.q.data), ADDRESS, 1, INVALID(MISALIGNED), "inputs.q.data"},
    {PLAIN, F(o.data), ADDRESS, 2, INVALID(MISALIGNED), "o.data"},
    {PLAIN, F(lse), ADDRESS, 2, INVALID(MISALIGNED), "lse"},
    {PLAIN, B(dk.data), ADDRESS, 1, INVALID(MISALIGNED), "dk.data"},
    {VARLEN, F(inputs.cu_seqlens_kv), ADDRESS, 1, INVALID(MISALIGNED), "inputs.cu_seqlens_kv"},
    {EVERYTHING, F(inputs.rng_device), ADDRESS, 4, INVALID(MISALIGNED), "inputs.rng_device"},
    {EVERYTHING, K(inputs.rng_device), ADDRESS, 4, INVALID(MISALIGNED), "inputs.rng_device"},
    {EVERYTHING, K(shape.batch), I32, -1, INVALID(SIZE), "shape.batch"},
    {EVERYTHING, K(shape.batch), I32, 2147483647, INVALID(SIZE), "shape.batch"},

    /* Strides. One that is not zero ends "packed". */
    {PLAIN, F(inputs.q.stride_seq), I64, -32, INVALID(STRIDE), "inputs.q.stride_seq"},
    {PLAIN, F(inputs.k.stride_head), I64, -1, INVALID(STRIDE), "inputs.k.stride_head"},
    {PLAIN, F(inputs.v.stride_batch), I64, -1, INVALID(STRIDE), "inputs.v.stride_batch"},
    {PLAIN, F(o.stride_seq), I64, 16, INVALID(STRIDE), "o.stride_head"},
    {PLAIN, B(dk.stride_head), I64, 8, INVALID(STRIDE), "dk.stride_seq"},
    {VARLEN, F(inputs.q.stride_batch), I64, 160, INVALID(STRIDE), "inputs.q.stride_batch"},
    {VARLEN, B(dv.stride_batch), I64, 160, INVALID(STRIDE), "dv.stride_batch"},
    {EVERYTHING, F(inputs.bias_stride_head), I64, -1, INVALID(STRIDE), "inputs.bias_stride_head"},
    {EVERYTHING, F(inputs.alibi_stride_batch), I64, -4, INVALID(STRIDE),
     "inputs.alibi_stride_batch"},
    {EVERYTHING, F(inputs.block_mask_stride_row), I64, -4, INVALID(STRIDE),
     "inputs.block_mask_stride_row"},
    {EVERYTHING, B(dbias_stride_row), I64, 3, INVALID(STRIDE), "dbias_stride_row"},
    {EVERYTHING, B(dbias_stride_head), I64, 1, INVALID(STRIDE), "dbias_stride_head"},
    {PAGED, F(inputs.page_table_stride), I64, -2, INVALID(STRIDE), "inputs.page_table_stride"},
    {PAGED, F(inputs.pages), I64, 0, INVALID(SIZE), "inputs.pages"},
    {PAGED, F(inputs.pages), I64, -1, INVALID(SIZE), "inputs.pages"},

    /* Merge. */
    {PLAIN, M(parts), I32, 0, INVALID(SIZE), "parts"},
    {PLAIN, M(parts), I32, -1, INVALID(SIZE), "parts"},
    {PLAIN, M(part_dtype), I32, FLASHATTN_DTYPE_BF16, INVALID(DTYPE), "part_dtype"},
    {PLAIN, M(part_dtype), I32, 9, INVALID(DTYPE), "part_dtype"},
    {PLAIN, M(shape.batch), I32, -2, INVALID(SIZE), "shape.batch"},

    /* Lengths and page numbers that the CPU reads. */
    {VARLEN, IN(cu_q[0]), I32, -1, INVALID(LENGTHS), "inputs.cu_seqlens_q"},
    {VARLEN, IN(cu_q[1]), I32, 11, INVALID(LENGTHS), "inputs.cu_seqlens_q"},
    {VARLEN, IN(cu_q[2]), I32, 11, INVALID(LENGTHS), "inputs.cu_seqlens_q"},
    {VARLEN, IN(cu_kv[2]), I32, 3, INVALID(LENGTHS), "inputs.cu_seqlens_kv"},
    {VARLEN, IN(cu_kv[2]), I32, 2147483647, INVALID(LENGTHS), "inputs.cu_seqlens_kv"},
    {VARLEN, IN(lens_q[1]), I32, 6, INVALID(LENGTHS), "inputs.lens_q"},
    {PLAIN, IN(lens_q[0]), I32, -1, INVALID(LENGTHS), "inputs.lens_q"},
    {PLAIN, IN(lens_kv[1]), I32, 8, INVALID(LENGTHS), "inputs.lens_kv"},
    {PAGED, IN(pages[1]), I32, PAGES, INVALID(LENGTHS), "inputs.page_table"},
    {PAGED, IN(pages[2]), I32, -1, INVALID(LENGTHS), "inputs.page_table"},
    {PAGED, IN(lens_kv[0]), I32, 9, INVALID(LENGTHS), "inputs.lens_kv"},
};

#endif
