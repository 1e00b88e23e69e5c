/* Every field with bad values: status, reason, field, a sentence, and not one byte written. */
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
  const char *field;
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
    {PAGED, D(layout), I32, FLASHATTN_LAYOUT_PAGED_KV | FLASHATTN_LAYOUT_VARLEN_KV,
     INVALID(LAYOUT), "layout"},
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

static void *target_of(struct fixture *f, enum target target) {
  switch (target) {
    case DESC: return &f->desc;
    case BACKWARD: return &f->backward;
    case MERGE: return &f->merge;
    case CONTENTS: return f->in;
    default: return &f->forward;
  }
}

static void spoil(struct fixture *f, const struct row *row) {
  char *at = (char *)target_of(f, row->target) + row->offset;
  const int32_t i32 = (int32_t)(row->kind == I32 ? row->value : 0);
  const int64_t i64 = (int64_t)(row->kind == I64 ? row->value : 0);
  const float f32 = (float)row->value;
  char *pointer;
  switch (row->kind) {
    case I32: memcpy(at, &i32, sizeof i32); break;
    case I64: memcpy(at, &i64, sizeof i64); break;
    case F32: memcpy(at, &f32, sizeof f32); break;
    case ADDRESS:
      memcpy(&pointer, at, sizeof pointer);
      if (isnan(row->value)) {
        pointer = NULL;
      } else if (isinf(row->value)) {
        pointer = (char *)f->in;
      } else {
        pointer += (int)row->value;
      }
      memcpy(at, &pointer, sizeof pointer);
      break;
  }
}

static int32_t call(struct fixture *f, const flashattn_plan *plan, enum target target) {
  switch (target) {
    case BACKWARD:
      return flashattn_backward(plan, &f->backward, f->workspace, f->workspace_bytes, f->stream);
    case MERGE: return flashattn_merge(plan, &f->merge, f->stream);
    case KEEP: return flashattn_dropout_mask(plan, &f->forward, f->out->keep, f->stream);
    default:
      return flashattn_forward(plan, &f->forward, f->workspace, f->workspace_bytes, f->stream);
  }
}

static void check_refusal(const struct fixture *f, const char *name, int32_t status,
                          int32_t wanted, int32_t wanted_reason, const char *wanted_field) {
  int32_t reason;
  const char *field;
  const char *text = flashattn_last_error(&reason, &field);
  const int ok = status == wanted && reason == wanted_reason && strcmp(field, wanted_field) == 0 &&
                 strlen(text) > 20 && outputs_untouched(f);
  if (!ok) {
    printf("%s: %s, reason %d, field %s; wanted %s, %d, %s; outputs %s; %s\n", name,
           flashattn_status_name(status), reason, field, flashattn_status_name(wanted),
           wanted_reason, wanted_field, outputs_untouched(f) ? "untouched" : "WRITTEN", text);
  }
  CHECK(ok);
}

static void test_rows(struct fixture *f) {
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    const struct row *row = &rows[i];
    char name[64];
    snprintf(name, sizeof name, "row %d (%s)", (int)i, row->field);
    fixture_reset(f, row->variant);
    flashattn_plan *plan = NULL;
    if (row->target == DESC) {
      flashattn_plan *const untouched = (flashattn_plan *)f;
      spoil(f, row);
      plan = untouched;
      CHECK(flashattn_check(&f->desc) == row->status);
      const int32_t status = flashattn_plan_create(&f->desc, &plan);
      check_refusal(f, name, status, row->status, row->reason, row->field);
      if (status == FLASHATTN_OK) {
        flashattn_plan_destroy(plan);
      } else {
        CHECK(plan == untouched);
      }
      continue;
    }
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan))) continue;
    spoil(f, row);
    check_refusal(f, name, call(f, plan, row->target), row->status, row->reason, row->field);
    flashattn_plan_destroy(plan);
  }
}

/* The calls that are spoilt above succeed as they stand. */
static void test_baseline(struct fixture *f) {
  const enum variant variants[] = {PLAIN, EVERYTHING, VARLEN, PAGED};
  for (int i = 0; i < 4; ++i) {
    fixture_reset(f, variants[i]);
    flashattn_plan *plan = NULL;
    if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan))) continue;
    CHECK_OK(flashattn_check(&f->desc));
    CHECK_OK(call(f, plan, FORWARD));
    if (f->desc.ops & FLASHATTN_OP_BACKWARD) CHECK_OK(call(f, plan, BACKWARD));
    CHECK_OK(call(f, plan, MERGE));
    CHECK_OK(call(f, plan, KEEP));
    flashattn_plan_destroy(plan);
  }
}

/* What no single member can say. */
static void test_calls(struct fixture *f) {
  flashattn_plan *plan = NULL;
  int64_t bytes = 0;
  const int32_t invalid = FLASHATTN_ERROR_INVALID_ARGUMENT;
  fixture_reset(f, PLAIN);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan))) return;

  check_refusal(f, "plan NULL", call(f, NULL, FORWARD), invalid, FLASHATTN_REASON_NULL_POINTER,
                "plan");
  check_refusal(f, "args NULL", flashattn_forward(plan, NULL, NULL, 0, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "args NULL", flashattn_backward(plan, NULL, NULL, 0, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "args NULL", flashattn_merge(plan, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "args");
  check_refusal(f, "keep NULL", flashattn_dropout_mask(plan, &f->forward, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "keep");
  check_refusal(f, "desc NULL", flashattn_check(NULL), invalid, FLASHATTN_REASON_NULL_POINTER,
                "desc");
  check_refusal(f, "plan out NULL", flashattn_plan_create(&f->desc, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "plan");
  check_refusal(f, "bytes NULL", flashattn_workspace_size(plan, 1, &f->forward.shape, NULL),
                invalid, FLASHATTN_REASON_NULL_POINTER, "bytes");
  check_refusal(f, "op", flashattn_workspace_size(plan, 3, &f->forward.shape, &bytes), invalid,
                FLASHATTN_REASON_VALUE, "op");
  check_refusal(f, "shape NULL", flashattn_workspace_size(plan, 1, NULL, &bytes), invalid,
                FLASHATTN_REASON_SIZE, "max_batch");
  check_refusal(f, "properties NULL", flashattn_plan_info(plan, 1, NULL, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "properties");
  check_refusal(f, "log level", flashattn_set_log(4, NULL, NULL), invalid, FLASHATTN_REASON_VALUE,
                "level");
  check_refusal(f, "desc_init", flashattn_desc_init(&f->desc, 3), invalid,
                FLASHATTN_REASON_STRUCT_SIZE, "struct_size");
  check_refusal(f, "desc_init", flashattn_desc_init(NULL, 3), invalid,
                FLASHATTN_REASON_NULL_POINTER, "desc");
  check_refusal(f, "count", flashattn_device_count(0, NULL), invalid,
                FLASHATTN_REASON_NULL_POINTER, "count");
  flashattn_device_properties device = {.struct_size = sizeof device};
  check_refusal(f, "device", flashattn_device_info(9, 0, &device), invalid, FLASHATTN_REASON_VALUE,
                "device");
  check_refusal(f, "device_index", flashattn_device_info(0, 1, &device),
                FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, "device_index");

  f->stream = f;
  const enum target targets[] = {FORWARD, BACKWARD, MERGE, KEEP};
  for (int i = 0; i < 4; ++i) {
    check_refusal(f, "stream", call(f, plan, targets[i]), invalid, FLASHATTN_REASON_STREAM,
                  "stream");
  }
  f->stream = NULL;
  f->part_lse[1] = NULL;
  check_refusal(f, "part_lse[1]", call(f, plan, MERGE), invalid, FLASHATTN_REASON_NULL_POINTER,
                "part_lse");
  f->part_lse[1] = f->part_lse[0];
  f->part_o[1].stride_seq = -1;
  check_refusal(f, "part_o[1]", call(f, plan, MERGE), invalid, FLASHATTN_REASON_STRIDE,
                "part_o.stride_seq");

  for (int op = 0; op < 2; ++op) {
    const enum target target = op == 0 ? FORWARD : BACKWARD;
    if (!CHECK_OK(flashattn_workspace_size(plan, op == 0 ? FLASHATTN_OP_FORWARD
                                                         : FLASHATTN_OP_BACKWARD,
                                           &f->forward.shape, &bytes))) {
      continue;
    }
    if (bytes == 0) continue;
    f->workspace_bytes = bytes - 1;
    check_refusal(f, "workspace", call(f, plan, target), FLASHATTN_ERROR_WORKSPACE,
                  FLASHATTN_REASON_SIZE, "workspace_bytes");
    f->workspace = NULL;
    f->workspace_bytes = bytes;
    check_refusal(f, "workspace", call(f, plan, target), FLASHATTN_ERROR_WORKSPACE,
                  FLASHATTN_REASON_NULL_POINTER, "workspace");
    f->workspace = f->out->workspace;
  }
  flashattn_plan_destroy(plan);

  fixture_reset(f, PAGED);
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan))) return;
  check_refusal(f, "op", call(f, plan, BACKWARD), invalid, FLASHATTN_REASON_OP, "ops");
  flashattn_plan_destroy(plan);

  fixture_reset(f, PLAIN);
  f->desc.max_batch = 1;
  if (!CHECK_OK(flashattn_plan_create(&f->desc, &plan))) return;
  check_refusal(f, "promise", call(f, plan, FORWARD), invalid, FLASHATTN_REASON_SIZE,
                "shape.batch");
  flashattn_plan_destroy(plan);

  fixture_reset(f, PLAIN);
  f->desc.device = FLASHATTN_DEVICE_CUDA;
  f->desc.threads = 0;
  int32_t count = -1;
  CHECK_OK(flashattn_device_count(FLASHATTN_DEVICE_CUDA, &count));
  if (count == 0) CHECK_STATUS(flashattn_check(&f->desc), FLASHATTN_ERROR_UNSUPPORTED);
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 1;
  test_baseline(&f);
  test_rows(&f);
  test_calls(&f);
  fixture_close(&f);
  return check_report();
}
