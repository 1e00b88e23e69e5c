// Checks the arguments of flashattn_quantize.
#include <cinttypes>
#include <cstdio>

#include "core/error.h"
#include "core/validate_args.h"
#include "core/validate_desc.h"

namespace flashattn {
namespace {

constexpr uint32_t kTransforms = FLASHATTN_TRANSFORM_SMOOTH_K | FLASHATTN_TRANSFORM_ROTATE;

// Refuses plans without 8-bit types or with layouts that cannot be quantised, unknown types, and
// transforms that would change the results of attention.
void check_choices(const Problem& problem, const flashattn_quantize_args& args) {
  if (!problem.has_8bit()) {
    reject(FLASHATTN_REASON_DTYPE, "dtype",
           "the plan has dtype = %s and dtype_kv = %s, so that nothing is to be quantised; make a "
           "plan with dtype FLASHATTN_DTYPE_F8E4M3, or dtype_kv F8E4M3 or I8",
           dtype_name(problem.dtype), dtype_name(problem.dtype_kv));
  }
  if (problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_LAYOUT, "layout",
           "the plan's layout has PAGED_KV, but flashattn_quantize knows no pages; quantise with a "
           "plan without it, and copy the tokens to their pages");
  }
  if (problem.is_latent()) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_LAYOUT, "layout",
           "the plan's layout has LATENT_KV, which flashattn_quantize does not make; quantise v in "
           "blocks of %d elements before, as the model does",
           problem.descale_dim);
  }
  if (args.dtype < FLASHATTN_DTYPE_F32 || args.dtype > FLASHATTN_DTYPE_BF16) {
    reject(FLASHATTN_REASON_DTYPE, "dtype",
           "dtype = %d is not a type of what is quantised; set FLASHATTN_DTYPE_F32 = 1, F16 = 2 or "
           "BF16 = 3",
           args.dtype);
  }
  if ((args.transform & ~kTransforms) != 0) {
    reject(FLASHATTN_REASON_VALUE, "transform",
           "transform = 0x%" PRIx32 " has the unknown bits 0x%" PRIx32
           "; this library knows 0x%" PRIx32 ": clear the others",
           args.transform, args.transform & ~kTransforms, kTransforms);
  }
  const bool rotates = (args.transform & FLASHATTN_TRANSFORM_ROTATE) != 0;
  if (args.rotation_seed != 0 && !rotates) {
    reject(FLASHATTN_REASON_VALUE, "rotation_seed",
           "rotation_seed = %" PRIu64
           " has a meaning only with the transform ROTATE; ask for that, or leave it at 0",
           args.rotation_seed);
  }
  const int32_t block = hadamard_size(problem.dim_qk);
  if (rotates && block < 32 && block != problem.dim_qk) {
    reject(FLASHATTN_REASON_HEAD_DIM_MULTIPLE, "transform",
           "transform has ROTATE, but dim_qk = %d is neither a power of two nor a multiple of 32; "
           "pad the heads of q and k with zeros, or clear ROTATE",
           problem.dim_qk);
  }
  if ((args.transform & FLASHATTN_TRANSFORM_SMOOTH_K) == 0) return;
  if (problem.softcap > 0) {
    reject(FLASHATTN_REASON_SOFTCAP, "transform",
           "transform has SMOOTH_K, but the plan has softcap = %g, which tells shifted scores "
           "apart; clear SMOOTH_K",
           static_cast<double>(problem.softcap));
  }
  if (problem.has_feature(FLASHATTN_FEATURE_SINK)) {
    reject(FLASHATTN_REASON_SINK, "transform",
           "transform has SMOOTH_K, but the plan's features have SINK, which does not shift with "
           "the scores; clear SMOOTH_K");
  }
}

// The arrays of one of q, k and v.
struct Operand {
  const char *name, *out_name, *descale_name;
  flashattn_tensor *in, *out, *descale;
  Rows rows;
  int32_t heads, dim, dtype_out, tokens;
};

void add_operand(const Problem& problem, const Shape& shape, int32_t dtype, const Operand& x,
                 ArrayList* arrays) {
  const bool given = x.in->data != nullptr, is_8bit = dtype_size(x.dtype_out) == 1;
  check_beside(x.out_name, ".data", x.out->data, given, x.name);
  check_beside(x.descale_name, ".data", x.descale->data, given && is_8bit,
               "an input that becomes F8E4M3 or I8");
  if (!given) return;
  arrays->add(tensor_array(x.name, Use::kInput, x.in, x.rows, x.heads, x.dim, dtype));
  arrays->add(tensor_array(x.out_name, Use::kOutput, x.out, x.rows, x.heads, x.dim, x.dtype_out));
  if (!is_8bit) return;
  const int64_t blocks = descale_blocks(problem, x.tokens);
  arrays->add(strided_array(x.descale_name, Use::kOutput, x.descale,
                            {shape.batch, problem.heads_kv, blocks, 1}, Order::kHeads,
                            sizeof(float)));
}

}  // namespace

void check_beside(const char* name, const char* suffix, const void* data, bool used,
                  const char* other) {
  if (!data || used) return;
  char field[32];
  std::snprintf(field, sizeof field, "%s%s", name, suffix);
  reject(FLASHATTN_REASON_NULL_POINTER, field,
         "%s is set, but this call does not use it: it goes with %s; give that, or leave the "
         "pointer NULL",
         field, other);
}

QuantizeArgs check_quantize(const Problem& problem, bool host, flashattn_quantize_args args) {
  check_choices(problem, args);
  flashattn_args lengths = lengths_of(args);
  ArrayList arrays;
  QuantizeArgs own{};
  own.shape = shape_of(lengths);
  own.inputs = check_lengths(problem, host, &lengths, &arrays);
  own.dtype = args.dtype;
  own.transform = args.transform;
  own.rotation_seed = args.rotation_seed;

  const Shape& shape = own.shape;
  const Rows q = query_rows(problem, shape), kv = key_rows(problem, shape, 0);
  const bool smooths = (args.transform & FLASHATTN_TRANSFORM_SMOOTH_K) != 0;
  const bool rotates = (args.transform & FLASHATTN_TRANSFORM_ROTATE) != 0;
  const bool makes_q = problem.has_8bit_q() || rotates;
  // If only the cache has 8 bits, q_out is made only to rotate q; for lse_shift alone q is only
  // read.
  const bool reads_q = args.q.data && !makes_q && args.lse_shift;
  if (args.q.data && !makes_q && !reads_q) {
    reject(FLASHATTN_REASON_NULL_POINTER, "q.data",
           "q is set, but this plan has dtype = %s, so that q stays as it is; set transform ROTATE "
           "or lse_shift, or leave it NULL",
           dtype_name(problem.dtype));
  }
  const Operand operands[] = {
      {"q", "q_out", "descale_q", &args.q, &args.q_out, &args.descale_q, q, problem.heads_q,
       problem.dim_qk, problem.dtype, shape.seqlen_q},
      {"k", "k_out", "descale_k", &args.k, &args.k_out, &args.descale_k, kv, problem.heads_kv,
       problem.dim_qk, problem.dtype_kv, shape.seqlen_kv},
      {"v", "v_out", "descale_v", &args.v, &args.v_out, &args.descale_v, kv, problem.heads_kv,
       problem.dim_v, problem.dtype_kv, shape.seqlen_kv},
  };
  for (const Operand& operand : operands) {
    if (&operand == operands && reads_q) {
      check_beside("q_out", ".data", args.q_out.data, false, "transform ROTATE");
      arrays.add(
          tensor_array("q", Use::kInput, &args.q, q, problem.heads_q, problem.dim_qk, args.dtype));
      continue;
    }
    add_operand(problem, shape, args.dtype, operand, &arrays);
  }
  check_beside("k_mean", ".data", args.k_mean.data, smooths && args.k.data, "k and SMOOTH_K");
  check_beside("lse_shift", "", args.lse_shift, smooths && args.k.data && args.q.data,
               "q, k and SMOOTH_K");
  if (smooths && args.k.data) {
    arrays.add(strided_array("k_mean", Use::kOutput, &args.k_mean,
                             {shape.batch, problem.heads_kv, 1, problem.dim_qk}, Order::kHeads,
                             sizeof(float)));
  }
  if (args.lse_shift) {
    arrays.add(lse_array("lse_shift", Use::kOutput, args.lse_shift, problem, q));
  }
  arrays.check_overlaps();
  own.inputs.q = args.q;
  own.inputs.k = args.k;
  own.inputs.v = args.v;
  own.q_out = args.q_out;
  own.k_out = args.k_out;
  own.v_out = args.v_out;
  own.descale_q = args.descale_q;
  own.descale_k = args.descale_k;
  own.descale_v = args.descale_v;
  own.k_mean = args.k_mean;
  own.lse_shift = args.lse_shift;
  return own;
}

}  // namespace flashattn
