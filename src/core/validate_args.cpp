#include "core/validate_args.h"

#include <cinttypes>
#include <cstdio>

#include "core/copy_in.h"
#include "core/error.h"
#include "core/validate_desc.h"

namespace flashattn {
namespace {

constexpr const char* kRowStrides[] = {"_stride_batch", "_stride_head", "_stride_row"};

// A pointer of the structure that is not a tensor's.
struct Pointer {
  const char* field;
  const void* data;
  bool used;         // by this plan
  const char* user;  // what would use it
};

void check_unused(const Pointer& pointer) {
  if (!pointer.data || pointer.used) return;
  reject(FLASHATTN_REASON_NULL_POINTER, pointer.field,
         "%s is set, but this plan does not use it: flashattn_desc has no %s; ask for that in the "
         "descriptor, or leave the pointer NULL",
         pointer.field, pointer.user);
}

// A member that counts something beside an array.
struct Word {
  const char* field;
  int64_t value;
  bool used;
  const char* user;
};

void check_unused(const Word& word) {
  if (word.value == 0 || word.used) return;
  reject(FLASHATTN_REASON_VALUE, word.field,
         "%s = %" PRId64
         ", but this plan does not use it: flashattn_desc has no %s; ask for that in the "
         "descriptor, or leave it at 0",
         word.field, word.value, word.user);
}

// A member of a shape, by its name there or by that of its promise.
struct Name {
  char text[32];

  Name(const char* prefix, const char* member) {
    std::snprintf(text, sizeof text, "%s%s", prefix, member);
  }
};

struct Size {
  const char* member;
  int64_t value, most;
  bool used;
  int64_t promise;
};

void check_size(const Size& size, const char* prefix) {
  const Name name(prefix, size.member), promised("max_", size.member);
  if (size.value < 0) {
    reject(FLASHATTN_REASON_SIZE, name.text, "%s = %" PRId64 " is below 0; give a size", name.text,
           size.value);
  }
  if (size.value > size.most) {
    reject(FLASHATTN_REASON_SIZE, name.text,
           "%s = %" PRId64 " is above %" PRId64
           ", the limit of this library; split the sequence and merge, or give a tighter bound",
           name.text, size.value, size.most);
  }
  if (size.value != 0 && !size.used) {
    reject(FLASHATTN_REASON_SIZE, name.text,
           "%s = %" PRId64
           " has a meaning only with a VARLEN layout, which this plan has not; "
           "leave it at 0",
           name.text, size.value);
  }
  if (size.promise > 0 && size.value > size.promise) {
    reject(FLASHATTN_REASON_SIZE, name.text,
           "%s = %" PRId64 " is above %s = %" PRId64
           ", which the plan's descriptor promised; make "
           "a plan with a larger promise or none",
           name.text, size.value, promised.text, size.promise);
  }
}

// So that families may round the tokens of a sequence up to tiles, and step past its end.
constexpr int64_t kMaxTokens = INT32_MAX - 0xffff;

// As fp32 they fill the address space. Below it families may multiply by an element's bytes, the
// number of splits and what rounding up to tiles adds, without a second thought.
constexpr int64_t kMaxElements = INT64_C(1) << 46;

struct Extent {
  const char* member;  // the factor to reduce
  int64_t batch, tokens;
};

void check_extent(const Extent& extent, int32_t heads, int32_t dim, const char* prefix) {
  int64_t elements = 0;
  bool overflow = __builtin_mul_overflow(extent.batch, extent.tokens, &elements);
  overflow |= __builtin_mul_overflow(elements, static_cast<int64_t>(heads), &elements);
  overflow |= __builtin_mul_overflow(elements, static_cast<int64_t>(dim), &elements);
  if (!overflow && elements <= kMaxElements) return;
  const Name name(prefix, extent.member);
  reject(FLASHATTN_REASON_SIZE, name.text,
         "%s: %" PRId64 " sequences of %" PRId64
         " tokens, %d heads and %d elements a head make more "
         "than 2^46 elements, the limit of this library; split the batch or give tighter bounds",
         name.text, extent.batch, extent.tokens, heads, dim);
}

// Heads of all sequences are numbered in 32 bits by the random numbers.
void check_dropout_heads(const Problem& problem, const flashattn_shape& shape) {
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem.heads_q;
  if (problem.dropout == 0 || heads <= INT64_C(0x100000000)) return;
  reject(FLASHATTN_REASON_SIZE, "shape.batch",
         "batch = %d times heads_q = %d is above 2^32, the limit of dropout's random numbers; "
         "split the batch",
         shape.batch, problem.heads_q);
}

// Strides that nobody steps by are dropped in place.
Array strided_array(const char* name, Use use, const void* data, int32_t element,
                    const int64_t (&extent)[4], int64_t* batch, int64_t* head, int64_t* row) {
  drop_idle_strides(extent, batch, head, row, use == Use::kSum);
  const int64_t stride[] = {*batch, *head, *row};
  Array array = packed_array(name, use, data, element, 0);
  array.suffixes = kRowStrides;
  for (int d = 0; d < 4; ++d) {
    array.extent[d] = extent[d];
    array.stride[d] = d < 3 ? stride[d] : 1;
  }
  return array;
}

void add_lengths(const Problem& problem, const flashattn_shape& shape, flashattn_inputs* in,
                 ArrayList* arrays) {
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  const Pointer pointers[] = {
      {"inputs.cu_seqlens_q", in->cu_seqlens_q, varlen_q, "layout bit VARLEN_Q"},
      {"inputs.cu_seqlens_kv", in->cu_seqlens_kv, varlen_kv, "layout bit VARLEN_KV"},
      {"inputs.page_table", in->page_table, paged, "layout bit PAGED_KV"},
  };
  for (const Pointer& pointer : pointers) check_unused(pointer);
  const Word words[] = {
      {"inputs.page_table_stride", in->page_table_stride, paged, "layout bit PAGED_KV"},
      {"inputs.pages", in->pages, paged, "layout bit PAGED_KV"},
  };
  for (const Word& word : words) check_unused(word);
  const int64_t batch = shape.batch;
  const auto add = [&](const char* name, const int32_t* data, bool used, int64_t count) {
    if (used) arrays->add(packed_array(name, Use::kInput, data, sizeof(int32_t), count));
  };
  add("inputs.cu_seqlens_q", in->cu_seqlens_q, varlen_q && batch > 0, batch + 1);
  add("inputs.cu_seqlens_kv", in->cu_seqlens_kv, varlen_kv && batch > 0, batch + 1);
  add("inputs.lens_q", in->lens_q, in->lens_q != nullptr, batch);
  add("inputs.lens_kv", in->lens_kv, in->lens_kv != nullptr, batch);
  if (!paged) return;

  if (in->pages < 0 || (in->pages == 0 && batch > 0 && shape.seqlen_kv > 0)) {
    reject(FLASHATTN_REASON_SIZE, "inputs.pages",
           "inputs.pages = %" PRId64 " is below 1; set it to the number of pages in the pool",
           in->pages);
  }
  const int64_t row = ceil_div(shape.seqlen_kv, problem.page_size);
  if (in->page_table_stride == 0) in->page_table_stride = row;
  static constexpr const char* kStride[] = {"_stride", "", ""};
  Array table =
      packed_array("inputs.page_table", Use::kInput, in->page_table, sizeof(int32_t), batch, row);
  table.suffixes = kStride;
  if (batch <= 1 || row == 0) in->page_table_stride = 0;
  table.stride[0] = in->page_table_stride;
  arrays->add(table);
}

void add_biases(const Problem& problem, const flashattn_shape& shape, flashattn_inputs* in,
                ArrayList* arrays) {
  const bool dense = problem.has_bias(FLASHATTN_BIAS_DENSE);
  const bool alibi = problem.has_bias(FLASHATTN_BIAS_ALIBI);
  const bool blocks = problem.has_mask(FLASHATTN_MASK_BLOCKS);
  const bool sink = problem.has_feature(FLASHATTN_FEATURE_SINK);
  const bool f8 = problem.dtype == FLASHATTN_DTYPE_F8E4M3;
  const bool dropout = problem.dropout > 0;
  const Pointer pointers[] = {
      {"inputs.bias", in->bias, dense, "bias bit DENSE"},
      {"inputs.alibi_slopes", in->alibi_slopes, alibi, "bias bit ALIBI"},
      {"inputs.sink", in->sink, sink, "feature bit SINK"},
      {"inputs.block_mask", in->block_mask, blocks, "mask bit BLOCKS"},
      {"inputs.descale_q", in->descale_q, f8, "dtype F8E4M3"},
      {"inputs.descale_k", in->descale_k, f8, "dtype F8E4M3"},
      {"inputs.descale_v", in->descale_v, f8, "dtype F8E4M3"},
      {"inputs.rng_device", in->rng_device, dropout, "dropout"},
  };
  for (const Pointer& pointer : pointers) check_unused(pointer);
  const Word words[] = {
      {"inputs.bias_stride_batch", in->bias_stride_batch, dense, "bias bit DENSE"},
      {"inputs.bias_stride_head", in->bias_stride_head, dense, "bias bit DENSE"},
      {"inputs.bias_stride_row", in->bias_stride_row, dense, "bias bit DENSE"},
      {"inputs.alibi_stride_batch", in->alibi_stride_batch, alibi, "bias bit ALIBI"},
      {"inputs.block_mask_stride_batch", in->block_mask_stride_batch, blocks, "mask bit BLOCKS"},
      {"inputs.block_mask_stride_head", in->block_mask_stride_head, blocks, "mask bit BLOCKS"},
      {"inputs.block_mask_stride_row", in->block_mask_stride_row, blocks, "mask bit BLOCKS"},
  };
  for (const Word& word : words) check_unused(word);
  const bool work = shape.batch > 0 && (shape.seqlen_q > 0 || shape.seqlen_kv > 0);
  if (dense) {
    arrays->add(strided_array("inputs.bias", Use::kInput, in->bias, dtype_size(problem.bias_dtype),
                              {shape.batch, problem.heads_q, shape.seqlen_q, shape.seqlen_kv},
                              &in->bias_stride_batch, &in->bias_stride_head, &in->bias_stride_row));
  }
  if (alibi) {
    static constexpr const char* kStride[] = {"_stride_batch", "", ""};
    Array slopes = packed_array("inputs.alibi", Use::kInput, in->alibi_slopes, sizeof(float),
                                shape.batch, work ? problem.heads_q : 0);
    slopes.pointer_suffix = "_slopes";
    slopes.suffixes = kStride;
    if (shape.batch <= 1 || !work) in->alibi_stride_batch = 0;
    slopes.stride[0] = in->alibi_stride_batch;
    arrays->add(slopes);
  }
  if (blocks) {
    const int64_t rows = ceil_div(shape.seqlen_q, problem.block_q);
    const int64_t columns = ceil_div(shape.seqlen_kv, problem.block_kv);
    if (in->block_mask_stride_row == 0) in->block_mask_stride_row = columns;
    arrays->add(strided_array("inputs.block_mask", Use::kInput, in->block_mask, 1,
                              {shape.batch, problem.heads_q, rows, columns},
                              &in->block_mask_stride_batch, &in->block_mask_stride_head,
                              &in->block_mask_stride_row));
  }
  const auto add = [&](const char* name, const void* data, bool used, int32_t element,
                       int64_t count) {
    if (used) arrays->add(packed_array(name, Use::kInput, data, element, count));
  };
  add("inputs.sink", in->sink, sink, sizeof(float), work ? problem.heads_q : 0);
  add("inputs.descale_q", in->descale_q, in->descale_q != nullptr, sizeof(float), 1);
  add("inputs.descale_k", in->descale_k, in->descale_k != nullptr, sizeof(float), 1);
  add("inputs.descale_v", in->descale_v, in->descale_v != nullptr, sizeof(float), 1);
  add("inputs.rng_device", in->rng_device, in->rng_device != nullptr, sizeof(uint64_t), 2);
}

// What forward and backward share.
void check_inputs(const Problem& problem, bool host, const flashattn_shape& shape,
                  flashattn_inputs* in, ArrayList* arrays) {
  check_reserved("flashattn_inputs", "inputs.reserved", in->reserved, 4);
  check_shape(problem, shape);
  check_dropout_heads(problem, shape);
  add_lengths(problem, shape, in, arrays);
  const Rows q = query_rows(problem, shape), kv = key_rows(problem, shape, in->pages);
  arrays->add(tensor_array("inputs.q", Use::kInput, &in->q, q, problem.heads_q, problem.dim_qk,
                           problem.dtype));
  arrays->add(tensor_array("inputs.k", Use::kInput, &in->k, kv, problem.heads_kv, problem.dim_qk,
                           problem.dtype));
  arrays->add(tensor_array("inputs.v", Use::kInput, &in->v, kv, problem.heads_kv, problem.dim_v,
                           problem.dtype));
  add_biases(problem, shape, in, arrays);
  if (host) check_contents(problem, shape, *in);
}

}  // namespace

void check_shape(const Problem& problem, const flashattn_shape& shape, const char* prefix) {
  const int64_t reserved = shape.reserved;
  check_reserved("flashattn_shape", "shape.reserved", &reserved, 1);
  const Size sizes[] = {
      {"batch", shape.batch, INT32_MAX, true, problem.max_batch},
      {"seqlen_q", shape.seqlen_q, kMaxTokens, true, problem.max_seqlen_q},
      {"seqlen_kv", shape.seqlen_kv, kMaxTokens, true, problem.max_seqlen_kv},
      {"total_q", shape.total_q, INT64_MAX, problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q),
       problem.max_total_q},
      {"total_kv", shape.total_kv, INT64_MAX, problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV),
       problem.max_total_kv},
  };
  for (const Size& size : sizes) check_size(size, prefix);
  const Extent extents[] = {
      {"batch", shape.batch, 1},
      {"seqlen_q", shape.batch, shape.seqlen_q},
      {"seqlen_kv", shape.batch, shape.seqlen_kv},
      {"total_q", 1, shape.total_q},
      {"total_kv", 1, shape.total_kv},
  };
  const int32_t dim = problem.dim_qk > problem.dim_v ? problem.dim_qk : problem.dim_v;
  for (const Extent& extent : extents) check_extent(extent, problem.heads_q, dim, prefix);
}

void check_forward(const Problem& problem, bool host, flashattn_forward_args* args,
                   ArrayList* arrays) {
  check_reserved("flashattn_forward_args", args->reserved0, args->reserved);
  const bool lse = problem.has_feature(FLASHATTN_FEATURE_LSE);
  check_unused({"lse", args->lse, lse, "feature bit LSE"});
  check_inputs(problem, host, args->shape, &args->inputs, arrays);
  const Rows rows = query_rows(problem, args->shape);
  arrays->add(tensor_array("o", Use::kOutput, &args->o, rows, problem.heads_q, problem.dim_v,
                           problem.dtype_o));
  if (lse) arrays->add(lse_array("lse", Use::kOutput, args->lse, problem, rows));
}

void check_backward(const Problem& problem, bool host, flashattn_backward_args* args,
                    ArrayList* arrays) {
  check_reserved("flashattn_backward_args", args->reserved0, args->reserved);
  const bool dlse = problem.has_feature(FLASHATTN_FEATURE_DLSE);
  const bool dbias = problem.has_feature(FLASHATTN_FEATURE_DBIAS);
  const bool dsink = problem.has_feature(FLASHATTN_FEATURE_DSINK);
  check_unused({"dlse", args->dlse, dlse, "feature bit DLSE"});
  check_unused({"dbias", args->dbias, dbias, "feature bit DBIAS"});
  check_unused({"dsink", args->dsink, dsink, "feature bit DSINK"});
  const Word words[] = {
      {"dbias_stride_batch", args->dbias_stride_batch, dbias, "feature bit DBIAS"},
      {"dbias_stride_head", args->dbias_stride_head, dbias, "feature bit DBIAS"},
      {"dbias_stride_row", args->dbias_stride_row, dbias, "feature bit DBIAS"},
  };
  for (const Word& word : words) check_unused(word);
  check_inputs(problem, host, args->shape, &args->inputs, arrays);

  const flashattn_shape& shape = args->shape;
  const Rows q = query_rows(problem, shape), kv = key_rows(problem, shape, 0);
  arrays->add(
      tensor_array("o", Use::kInput, &args->o, q, problem.heads_q, problem.dim_v, problem.dtype_o));
  arrays->add(tensor_array("dout", Use::kInput, &args->dout, q, problem.heads_q, problem.dim_v,
                           problem.dtype_o));
  arrays->add(lse_array("lse", Use::kInput, args->lse, problem, q));
  if (dlse) arrays->add(lse_array("dlse", Use::kInput, args->dlse, problem, q));
  arrays->add(tensor_array("dq", Use::kOutput, &args->dq, q, problem.heads_q, problem.dim_qk,
                           problem.dtype));
  arrays->add(tensor_array("dk", Use::kOutput, &args->dk, kv, problem.heads_kv, problem.dim_qk,
                           problem.dtype));
  arrays->add(tensor_array("dv", Use::kOutput, &args->dv, kv, problem.heads_kv, problem.dim_v,
                           problem.dtype));
  if (dbias) {
    // A sum over no query has elements: zeros.
    const int32_t rows = args->dbias_stride_row == 0 ? 1 : shape.seqlen_q;
    arrays->add(strided_array("dbias", Use::kSum, args->dbias, sizeof(float),
                              {shape.batch, problem.heads_q, rows, shape.seqlen_kv},
                              &args->dbias_stride_batch, &args->dbias_stride_head,
                              &args->dbias_stride_row));
  }
  if (dsink) {
    arrays->add(packed_array("dsink", Use::kOutput, args->dsink, sizeof(float),
                             shape.batch > 0 ? problem.heads_q : 0));
  }
}

void check_merge(const Problem& problem, flashattn_merge_args* args) {
  check_reserved("flashattn_merge_args", args->reserved0, args->reserved);
  const flashattn_shape& given = args->shape;
  const bool varlen = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  // Only these are read, so only these are judged.
  flashattn_shape read = {};
  read.reserved = given.reserved;
  read.batch = varlen ? 0 : given.batch;
  read.seqlen_q = varlen ? 0 : given.seqlen_q;
  read.total_q = varlen ? given.total_q : 0;
  check_shape(problem, read);
  if (args->parts < 1) {
    reject(FLASHATTN_REASON_SIZE, "parts",
           "parts = %d is below 1; set it to the number of partial results", args->parts);
  }
  if (args->part_dtype == FLASHATTN_DTYPE_DEFAULT) args->part_dtype = problem.dtype_o;
  if (args->part_dtype != problem.dtype_o && args->part_dtype != FLASHATTN_DTYPE_F32) {
    reject(FLASHATTN_REASON_DTYPE, "part_dtype",
           "part_dtype = %d (%s) is neither the plan's dtype_o = %s nor FLASHATTN_DTYPE_F32 = %d; "
           "use one of them, or 0 for dtype_o",
           args->part_dtype, dtype_name(args->part_dtype), dtype_name(problem.dtype_o),
           FLASHATTN_DTYPE_F32);
  }
  const Rows rows = query_rows(problem, given);
  const int32_t heads = problem.heads_q, dim = problem.dim_v;
  Array o = tensor_array("o", Use::kOutput, &args->o, rows, heads, dim, problem.dtype_o);
  Array lse = lse_array("lse", Use::kOutput, args->lse, problem, rows);
  if (!args->lse) lse.extent[0] = 0;
  check_array(&o);
  check_array(&lse);
  check_apart(o, lse);
  const Pointer lists[] = {{"part_o", args->part_o, true, ""},
                           {"part_lse", args->part_lse, true, ""}};
  for (const Pointer& list : lists) {
    if (list.data) continue;
    reject(FLASHATTN_REASON_NULL_POINTER, list.field,
           "%s is NULL; give a host array with one entry for each of the %d parts", list.field,
           args->parts);
  }
  for (int32_t p = 0; p < args->parts; ++p) {
    flashattn_tensor tensor = args->part_o[p];
    Array part_o = tensor_array("part_o", Use::kInput, &tensor, rows, heads, dim, args->part_dtype);
    Array part_lse = lse_array("part_lse", Use::kInput, args->part_lse[p], problem, rows);
    part_o.index = part_lse.index = p;
    check_array(&part_o);
    check_array(&part_lse);
    const bool in_place = part_o.data == o.data && args->part_dtype == problem.dtype_o &&
                          tensor.stride_batch == args->o.stride_batch &&
                          tensor.stride_head == args->o.stride_head &&
                          tensor.stride_seq == args->o.stride_seq;
    if (!in_place) check_apart(o, part_o);
    if (part_lse.data != lse.data) check_apart(lse, part_lse);
    check_apart(o, part_lse);
    check_apart(lse, part_o);
  }
}

void check_dropout_mask(const Problem& problem, const flashattn_forward_args& args,
                        const uint8_t* keep) {
  check_reserved("flashattn_forward_args", args.reserved0, args.reserved);
  const flashattn_shape& shape = args.shape;
  check_shape(problem, shape);
  check_dropout_heads(problem, shape);
  ArrayList arrays;
  arrays.add(packed_array("keep", Use::kOutput, keep, 1, shape.batch, problem.heads_q,
                          shape.seqlen_q, shape.seqlen_kv));
  if (args.inputs.rng_device) {
    arrays.add(packed_array("inputs.rng_device", Use::kInput, args.inputs.rng_device,
                            sizeof(uint64_t), 2));
  }
  arrays.check_overlaps();
}

}  // namespace flashattn
