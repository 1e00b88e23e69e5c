#include "core/validate_args.h"

#include <cinttypes>
#include <cstdio>

#include "core/copy_in.h"
#include "core/error.h"
#include "core/validate_desc.h"

namespace flashattn {
namespace {

// A pointer member of the structure that is not part of a tensor.
struct Pointer {
  const char* field;
  const void* data;
  bool used;         // whether this plan uses it
  const char* user;  // the bit or field of the descriptor that would use it
};

void check_unused(const Pointer& pointer) {
  if (!pointer.data || pointer.used) return;
  reject(FLASHATTN_REASON_NULL_POINTER, pointer.field,
         "%s is set, but this plan does not use it: flashattn_desc has no %s; ask for that in the "
         "descriptor, or leave the pointer NULL",
         pointer.field, pointer.user);
}

// The name of a size, or of its maximum, for messages.
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
  int64_t maximum;
};

// Nothing is formatted on success: formatting takes longer than all checks.
void check_size(const Size& size, const char* prefix) {
  const bool good = size.value >= 0 && size.value <= size.most && (size.value == 0 || size.used) &&
                    (size.maximum <= 0 || size.value <= size.maximum);
  if (good) return;
  const Name name(prefix, size.member), limit("max_", size.member);
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
           " has a meaning only with a VARLEN layout, which this plan has not; leave it at 0",
           name.text, size.value);
  }
  reject(FLASHATTN_REASON_SIZE, name.text,
         "%s = %" PRId64 " is above %s = %" PRId64
         " of the plan's descriptor; make a plan with a larger maximum or none",
         name.text, size.value, limit.text, size.maximum);
}

// The longest sequence: backends may round its tokens up to tiles and step past its end without
// overflow.
constexpr int64_t kMaxTokens = INT32_MAX - 0xffff;

// In fp32 this many elements fill the address space. Below the limit backends may multiply by the
// element size, the number of splits and the rounding to tiles without overflow.
constexpr int64_t kMaxElements = INT64_C(1) << 46;

struct Extent {
  const char* member;  // the size that the message names
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

// The random number generator numbers the heads of all sequences in 32 bits.
void check_dropout_heads(const Problem& problem, const Shape& shape) {
  const int64_t heads = static_cast<int64_t>(shape.batch) * problem.heads_q;
  if (problem.dropout == 0 || heads <= INT64_C(0x100000000)) return;
  reject(FLASHATTN_REASON_SIZE, "batch",
         "batch = %d times heads_q = %d is above 2^32, the limit of dropout's random numbers; "
         "split the batch",
         shape.batch, problem.heads_q);
}

// A tensor member of the structure.
struct Tensor {
  const char* field;
  const flashattn_tensor* tensor;
  bool used;
  const char* user;
};

void check_unused(const Tensor& tensor) {
  if (!tensor.tensor->data || tensor.used) return;
  char field[64];
  std::snprintf(field, sizeof field, "%s.data", tensor.field);
  check_unused(Pointer{field, tensor.tensor->data, false, tensor.user});
}

// Refuses arguments that the plan has no use for.
void check_unused(const Problem& problem, const flashattn_args& args) {
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  const bool paged = problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  const bool backward = problem.has_op(FLASHATTN_OP_BACKWARD);
  const auto bias = [&](uint32_t bit) { return problem.has_bias(bit); };
  const auto mask = [&](uint32_t bit) { return problem.has_mask(bit); };
  const auto feature = [&](uint32_t bit) { return problem.has_feature(bit); };
  const bool lse = backward || feature(FLASHATTN_FEATURE_LSE);
  const Pointer pointers[] = {
      {"cu_seqlens_q", args.cu_seqlens_q, varlen_q, "layout bit VARLEN_Q"},
      {"cu_seqlens_kv", args.cu_seqlens_kv, varlen_kv, "layout bit VARLEN_KV"},
      {"sink", args.sink, feature(FLASHATTN_FEATURE_SINK), "feature bit SINK"},
      {"rng_device", args.rng_device, problem.dropout > 0, "dropout"},
      {"lse", args.lse, lse, "feature bit LSE"},
      {"dlse", args.dlse, feature(FLASHATTN_FEATURE_DLSE), "feature bit DLSE"},
      {"dsink", args.dsink, feature(FLASHATTN_FEATURE_DSINK), "feature bit DSINK"},
  };
  for (const Pointer& pointer : pointers) check_unused(pointer);
  constexpr char kBackward[] = "op bit BACKWARD";
  constexpr char kLists[] = "mask bit BLOCK_LISTS";
  constexpr char kCache[] = "dtype_kv F8E4M3 or I8 without layout bit LATENT_KV";
  const bool latent = problem.is_latent(), descales = problem.has_8bit_cache() && !latent;
  const Tensor tensors[] = {
      {"page_table", &args.page_table, paged, "layout bit PAGED_KV"},
      {"bias", &args.bias, bias(FLASHATTN_BIAS_DENSE), "bias bit DENSE"},
      {"alibi_slopes", &args.alibi_slopes, bias(FLASHATTN_BIAS_ALIBI), "bias bit ALIBI"},
      {"block_mask", &args.block_mask,
       mask(FLASHATTN_MASK_BLOCKS) && !mask(FLASHATTN_MASK_BLOCK_LISTS),
       "mask bit BLOCKS, without BLOCK_LISTS"},
      {"block_index", &args.block_index, mask(FLASHATTN_MASK_BLOCK_LISTS), kLists},
      {"block_begin", &args.block_begin, mask(FLASHATTN_MASK_BLOCK_LISTS), kLists},
      {"block_end", &args.block_end, mask(FLASHATTN_MASK_BLOCK_LISTS), kLists},
      {"block_lens", &args.block_lens, mask(FLASHATTN_MASK_BLOCK_LENS), "mask bit BLOCK_LENS"},
      {"tree_bits", &args.tree_bits, mask(FLASHATTN_MASK_TREE), "mask bit TREE"},
      {"descale_q", &args.descale_q, problem.has_8bit_q(), "dtype F8E4M3"},
      {"descale_k", &args.descale_k, descales, kCache},
      {"descale_v", &args.descale_v, descales, kCache},
      {"descale_latent", &args.descale_latent, latent, "layout bit LATENT_KV"},
      {"scale_o", &args.scale_o, problem.dtype_o == FLASHATTN_DTYPE_F8E4M3, "dtype_o F8E4M3"},
      {"amax_o", &args.amax_o, problem.has_8bit() && !latent,
       "dtype F8E4M3, or dtype_kv F8E4M3 or I8 without layout bit LATENT_KV"},
      {"dout", &args.dout, backward, kBackward},
      {"dq", &args.dq, backward, kBackward},
      {"dk", &args.dk, backward, kBackward},
      {"dv", &args.dv, backward, kBackward},
      {"dbias", &args.dbias, feature(FLASHATTN_FEATURE_DBIAS), "feature bit DBIAS"},
  };
  for (const Tensor& tensor : tensors) check_unused(tensor);
  if (args.pages != 0 && !paged) {
    reject(FLASHATTN_REASON_VALUE, "pages",
           "pages = %" PRId64
           ", but this plan does not use it: flashattn_desc has no layout bit PAGED_KV; ask for "
           "that in the descriptor, or leave it at 0",
           args.pages);
  }
  if (args.starts_kv && paged) {
    reject(FLASHATTN_REASON_LAYOUT, "starts_kv",
           "starts_kv is set, but the layout has PAGED_KV: pages before a start need not be there; "
           "leave them out of page_table, or starts_kv NULL");
  }
}

void add_lengths(const Problem& problem, const Shape& shape, flashattn_args* args, Inputs* in,
                 ArrayList* arrays) {
  const int64_t batch = shape.batch;
  const auto add = [&](const char* name, const int32_t* data, bool used, int64_t count) {
    if (used) arrays->add(packed_array(name, Use::kInput, data, sizeof(int32_t), count));
    return data;
  };
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  in->cu_seqlens_q = add("cu_seqlens_q", args->cu_seqlens_q, varlen_q && batch > 0, batch + 1);
  in->cu_seqlens_kv = add("cu_seqlens_kv", args->cu_seqlens_kv, varlen_kv && batch > 0, batch + 1);
  in->lens_q = add("lens_q", args->lens_q, args->lens_q != nullptr, batch);
  in->lens_kv = add("lens_kv", args->lens_kv, args->lens_kv != nullptr, batch);
  in->starts_kv = add("starts_kv", args->starts_kv, args->starts_kv != nullptr, batch);
  if (!problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) return;

  if (args->pages < 0 || (args->pages == 0 && batch > 0 && shape.seqlen_kv > 0)) {
    reject(FLASHATTN_REASON_SIZE, "pages",
           "pages = %" PRId64 " is below 1; set it to the number of pages in the pool",
           args->pages);
  }
  in->pages = args->pages;
  arrays->add(strided_array("page_table", Use::kInput, &args->page_table,
                            {batch, 1, 1, ceil_div(shape.seqlen_kv, problem.page_size)},
                            Order::kHeads, sizeof(int32_t)));
  in->page_table = static_cast<const int32_t*>(args->page_table.data);
  in->page_table_stride = args->page_table.stride_batch;
}

void add_biases(const Problem& problem, const Shape& shape, flashattn_args* args, Inputs* in,
                ArrayList* arrays) {
  const int64_t heads = problem.heads_q;
  const bool work = shape.batch > 0 && (shape.seqlen_q > 0 || shape.seqlen_kv > 0);
  if (problem.has_bias(FLASHATTN_BIAS_DENSE)) {
    arrays->add(strided_array("bias", Use::kInput, &args->bias,
                              {shape.batch, heads, shape.seqlen_q, shape.seqlen_kv}, Order::kHeads,
                              dtype_size(problem.dtype_bias)));
    in->bias = args->bias.data;
    in->bias_stride_batch = args->bias.stride_batch;
    in->bias_stride_head = args->bias.stride_head;
    in->bias_stride_row = args->bias.stride_seq;
  }
  if (problem.has_bias(FLASHATTN_BIAS_ALIBI)) {
    arrays->add(strided_array("alibi_slopes", Use::kInput, &args->alibi_slopes,
                              {shape.batch, work ? heads : 0, 1, 1}, Order::kHeads, sizeof(float)));
    in->alibi_slopes = static_cast<const float*>(args->alibi_slopes.data);
    in->alibi_stride_batch = args->alibi_slopes.stride_batch;
    in->alibi_stride_head = args->alibi_slopes.stride_head;
  }
  if (problem.has_mask(FLASHATTN_MASK_BLOCKS) && !problem.has_mask(FLASHATTN_MASK_BLOCK_LISTS)) {
    arrays->add(strided_array("block_mask", Use::kInput, &args->block_mask,
                              {shape.batch, heads, ceil_div(shape.seqlen_q, problem.block_q),
                               ceil_div(shape.seqlen_kv, problem.block_kv)},
                              Order::kHeads, 1));
    in->block_mask = static_cast<const uint8_t*>(args->block_mask.data);
    in->block_mask_stride_batch = args->block_mask.stride_batch;
    in->block_mask_stride_head = args->block_mask.stride_head;
    in->block_mask_stride_row = args->block_mask.stride_seq;
  }
  if (problem.has_feature(FLASHATTN_FEATURE_SINK)) {
    arrays->add(packed_array("sink", Use::kInput, args->sink, sizeof(float), work ? heads : 0));
    in->sink = args->sink;
  }
  in->rng_seed = args->rng_seed;
  in->rng_offset = args->rng_offset;
  if (args->rng_device) {
    arrays->add(packed_array("rng_device", Use::kInput, args->rng_device, sizeof(uint64_t), 2));
    in->rng_device = args->rng_device;
  }
}

void add_descales(const Problem& problem, const Shape& shape, flashattn_args* args, Inputs* in,
                  ArrayList* arrays) {
  const auto add = [&](const char* name, flashattn_tensor* tensor, int32_t tokens) {
    if (!tensor->data) return flashattn_tensor{};
    arrays->add(strided_array(name, Use::kInput, tensor,
                              {shape.batch, problem.heads_kv, descale_blocks(problem, tokens), 1},
                              Order::kHeads, sizeof(float)));
    return *tensor;
  };
  in->descale_q = add("descale_q", &args->descale_q, shape.seqlen_q);
  in->descale_k = add("descale_k", &args->descale_k, shape.seqlen_kv);
  in->descale_v = add("descale_v", &args->descale_v, shape.seqlen_kv);
}

// Checks and copies the inputs that forward and backward share.
Inputs check_inputs(const Problem& problem, bool host, const Shape& shape, flashattn_args* args,
                    ArrayList* arrays) {
  check_shape(problem, shape);
  check_dropout_heads(problem, shape);
  Inputs in{};
  add_lengths(problem, shape, args, &in, arrays);
  const Rows q = query_rows(problem, shape), kv = key_rows(problem, shape, in.pages);
  const auto add = [&](const char* name, flashattn_tensor* tensor, Rows rows, int32_t heads,
                       int32_t dim, int32_t dtype) {
    arrays->add(tensor_array(name, Use::kInput, tensor, rows, heads, dim, dtype));
    return *tensor;
  };
  in.q = add("q", &args->q, q, problem.heads_q, problem.dim_qk, problem.dtype);
  in.k = add("k", &args->k, kv, problem.heads_kv, problem.columns_k(), problem.dtype_k());
  in.v = add("v", &args->v, kv, problem.heads_kv, problem.dim_v, problem.dtype_kv);
  add_descales(problem, shape, args, &in, arrays);
  add_biases(problem, shape, args, &in, arrays);
  if (host) check_contents(problem, shape, in);
  return in;
}

}  // namespace

Inputs check_lengths(const Problem& problem, bool host, flashattn_args* args, ArrayList* arrays) {
  const Shape shape = shape_of(*args);
  check_unused(problem, *args);
  check_shape(problem, shape);
  Inputs in{};
  add_lengths(problem, shape, args, &in, arrays);
  if (host) check_contents(problem, shape, in);
  return in;
}

Shape shape_of(const flashattn_args& args) {
  return {args.batch, args.seqlen_q, args.seqlen_kv, args.total_q, args.total_kv};
}

void check_shape(const Problem& problem, const Shape& shape, const char* prefix) {
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
  check_block_mask_size(problem, shape, prefix);
}

ForwardArgs check_forward(const Problem& problem, bool host, flashattn_args args,
                          ArrayList* arrays) {
  const bool lse = problem.has_feature(FLASHATTN_FEATURE_LSE);
  check_unused({"lse", args.lse, lse, "feature bit LSE"});
  check_unused(problem, args);
  ForwardArgs forward{};
  forward.shape = shape_of(args);
  forward.inputs = check_inputs(problem, host, forward.shape, &args, arrays);
  const Rows rows = query_rows(problem, forward.shape);
  arrays->add(tensor_array("o", Use::kOutput, &args.o, rows, problem.heads_q, problem.dim_v,
                           problem.dtype_o));
  forward.o = args.o;
  if (lse) arrays->add(lse_array("lse", Use::kOutput, args.lse, problem, rows));
  forward.lse = args.lse;
  const auto add = [&](const char* name, Use use, flashattn_tensor* tensor, int64_t heads) {
    if (!tensor->data) return flashattn_tensor{};
    arrays->add(strided_array(name, use, tensor, {forward.shape.batch, heads, 1, 1}, Order::kHeads,
                              sizeof(float)));
    return *tensor;
  };
  if (problem.has_mask(FLASHATTN_MASK_TREE)) {
    arrays->add(
        strided_array("tree_bits", Use::kInput, &args.tree_bits,
                      {forward.shape.batch, 1, forward.shape.seqlen_q, ceil_div(problem.tree, 32)},
                      Order::kHeads, sizeof(uint32_t)));
    forward.tree_bits = args.tree_bits;
  }
  if (problem.is_latent()) {
    const Rows kv = key_rows(problem, forward.shape, forward.inputs.pages);
    arrays->add(tensor_array("descale_latent", Use::kInput, &args.descale_latent, kv,
                             problem.heads_kv, problem.latent_descales(), FLASHATTN_DTYPE_F32));
    forward.descale_latent = args.descale_latent;
  }
  forward.scale_o =
      add("scale_o", Use::kInput, &args.scale_o, forward.shape.seqlen_q > 0 ? problem.heads_q : 0);
  forward.amax_o = add("amax_o", Use::kSum, &args.amax_o, problem.heads_q);
  return forward;
}

BackwardArgs check_backward(const Problem& problem, bool host, flashattn_args args,
                            ArrayList* arrays) {
  check_unused(problem, args);
  BackwardArgs backward{};
  backward.shape = shape_of(args);
  backward.inputs = check_inputs(problem, host, backward.shape, &args, arrays);

  const Shape& shape = backward.shape;
  const Rows q = query_rows(problem, shape), kv = key_rows(problem, shape, 0);
  const auto add = [&](const char* name, Use use, flashattn_tensor* tensor, Rows rows,
                       int32_t heads, int32_t dim, int32_t dtype) {
    arrays->add(tensor_array(name, use, tensor, rows, heads, dim, dtype));
    return *tensor;
  };
  const int32_t heads_q = problem.heads_q, heads_kv = problem.heads_kv, dtype = problem.dtype_grad;
  const int32_t dim_qk = problem.dim_qk, dim_v = problem.dim_v, dtype_o = problem.dtype_o;
  backward.o = add("o", Use::kInput, &args.o, q, heads_q, dim_v, dtype_o);
  backward.dout = add("dout", Use::kInput, &args.dout, q, heads_q, dim_v, dtype_o);
  arrays->add(lse_array("lse", Use::kInput, args.lse, problem, q));
  backward.lse = args.lse;
  if (problem.has_feature(FLASHATTN_FEATURE_DLSE)) {
    arrays->add(lse_array("dlse", Use::kInput, args.dlse, problem, q));
    backward.dlse = args.dlse;
  }
  backward.dq = add("dq", Use::kOutput, &args.dq, q, heads_q, dim_qk, dtype);
  backward.dk = add("dk", Use::kOutput, &args.dk, kv, heads_kv, dim_qk, dtype);
  backward.dv = add("dv", Use::kOutput, &args.dv, kv, heads_kv, dim_v, dtype);
  if (problem.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    // A sum over no query still has elements: zeros.
    const int32_t rows = args.dbias.stride_seq == 0 ? 1 : shape.seqlen_q;
    arrays->add(strided_array("dbias", Use::kSum, &args.dbias,
                              {shape.batch, heads_q, rows, shape.seqlen_kv}, Order::kHeads,
                              sizeof(float)));
    backward.dbias = static_cast<float*>(args.dbias.data);
    backward.dbias_stride_batch = args.dbias.stride_batch;
    backward.dbias_stride_head = args.dbias.stride_head;
    backward.dbias_stride_row = args.dbias.stride_seq;
  }
  if (problem.has_feature(FLASHATTN_FEATURE_DSINK)) {
    arrays->add(packed_array("dsink", Use::kOutput, args.dsink, sizeof(float),
                             shape.batch > 0 ? heads_q : 0));
    backward.dsink = args.dsink;
  }
  return backward;
}

ForwardArgs check_dropout_mask(const Problem& problem, const flashattn_args& args,
                               const uint8_t* keep) {
  const Shape shape = shape_of(args);
  check_shape(problem, shape);
  check_dropout_heads(problem, shape);
  ArrayList arrays;
  arrays.add(packed_array("keep", Use::kOutput, keep, 1, shape.batch, problem.heads_q,
                          shape.seqlen_q, shape.seqlen_kv));
  if (args.rng_device) {
    arrays.add(packed_array("rng_device", Use::kInput, args.rng_device, sizeof(uint64_t), 2));
  }
  arrays.check_overlaps();
  ForwardArgs mask{};
  mask.shape = shape;
  mask.inputs.rng_seed = args.rng_seed;
  mask.inputs.rng_offset = args.rng_offset;
  mask.inputs.rng_device = args.rng_device;
  return mask;
}

}  // namespace flashattn
