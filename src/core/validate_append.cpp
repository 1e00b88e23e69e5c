// Checks the arguments of flashattn_append_kv.
#include <cinttypes>
#include <cmath>
#include <utility>

#include "core/append_rows.h"
#include "core/error.h"
#include "core/validate_args.h"
#include "core/validate_desc.h"

namespace flashattn {
namespace {

bool is_wide(int32_t dtype) {
  return dtype >= FLASHATTN_DTYPE_F32 && dtype <= FLASHATTN_DTYPE_BF16;
}

void check_types(const Problem& problem, flashattn_append_kv_args* args) {
  if (problem.is_latent()) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_LAYOUT, "layout",
           "the plan's layout has LATENT_KV, to which flashattn_append_kv cannot append; write new "
           "records with code of your own");
  }
  if (args->dtype == FLASHATTN_DTYPE_DEFAULT) args->dtype = problem.dtype;
  if (!is_wide(args->dtype)) {
    reject(FLASHATTN_REASON_DTYPE, "dtype",
           "dtype = %d (%s) is not a type of new tokens; set FLASHATTN_DTYPE_F32 = 1, F16 = 2 or "
           "BF16 = 3",
           args->dtype, dtype_name(args->dtype));
  }
  if (args->dtype != problem.dtype && problem.dtype != FLASHATTN_DTYPE_F8E4M3) {
    reject(FLASHATTN_REASON_DTYPE_MIX, "dtype",
           "dtype = %d (%s) is not the plan's dtype = %s; convert q, k and v, or leave it at 0",
           args->dtype, dtype_name(args->dtype), dtype_name(problem.dtype));
  }
  if (args->dtype_rotary != FLASHATTN_DTYPE_DEFAULT && !is_wide(args->dtype_rotary)) {
    reject(FLASHATTN_REASON_DTYPE, "dtype_rotary",
           "dtype_rotary = %d (%s) is not a type of cosines and sines; set FLASHATTN_DTYPE_F32 = "
           "1, F16 = 2 or BF16 = 3",
           args->dtype_rotary, dtype_name(args->dtype_rotary));
  }
}

void check_rotary(const Problem& problem, const flashattn_append_kv_args& args) {
  if (args.rotary != FLASHATTN_ROTARY_HALVES && args.rotary != FLASHATTN_ROTARY_INTERLEAVED) {
    reject(FLASHATTN_REASON_VALUE, "rotary",
           "rotary = %d is not known; set FLASHATTN_ROTARY_HALVES = 0 or INTERLEAVED = 1",
           args.rotary);
  }
  const bool table = args.rotary_cos.data, rotates = args.rotary_dim != 0;
  if (args.rotary_dim < 0 || args.rotary_dim > problem.dim_qk || args.rotary_dim % 2 != 0 ||
      args.rotary_dim > 2 * kMaxRotaryPairs) {
    reject(FLASHATTN_REASON_SIZE, "rotary_dim",
           "rotary_dim = %d is not an even number within 0 and dim_qk = %d, nor above %d; give the "
           "number of elements that turn",
           args.rotary_dim, problem.dim_qk, 2 * kMaxRotaryPairs);
  }
  if (args.rotary != FLASHATTN_ROTARY_HALVES && !rotates) {
    reject(FLASHATTN_REASON_VALUE, "rotary",
           "rotary = %d has a meaning only with rotary_dim; give that, or leave it at 0",
           args.rotary);
  }
  if (args.dtype_rotary != FLASHATTN_DTYPE_DEFAULT && !table) {
    reject(FLASHATTN_REASON_DTYPE, "dtype_rotary",
           "dtype_rotary = %d has a meaning only with rotary_cos; give that, or leave it at 0",
           args.dtype_rotary);
  }
  check_beside("rotary_cos", ".data", args.rotary_cos.data, rotates, "rotary_dim");
  check_beside("rotary_sin", ".data", args.rotary_sin.data, table, "rotary_cos");
  check_beside("positions", "", args.positions, rotates, "rotary_dim");
  check_beside("q", ".data", args.q.data, rotates, "rotary_dim, without which q stays as it is");
  if (args.rotary_positions < 0 || (args.rotary_positions == 0) == table) {
    reject(FLASHATTN_REASON_SIZE, "rotary_positions",
           "rotary_positions = %d %s; give the number of rows of rotary_cos, and 0 without it",
           args.rotary_positions, table ? "is below 1" : "is not 0");
  }
  const bool computes = rotates && !table;
  if (computes ? !(args.rotary_base >= 1) || std::isinf(args.rotary_base) : args.rotary_base != 0) {
    reject(FLASHATTN_REASON_VALUE, "rotary_base", "rotary_base = %g %s",
           static_cast<double>(args.rotary_base),
           computes
               ? "is not a finite number of at least 1, and there is no rotary_cos; give a base "
                 "or tables"
               : "has a meaning only with rotary_dim and without rotary_cos; leave it at 0");
  }
}

void check_update(const Problem& problem, const flashattn_append_kv_args& args) {
  check_reserved(args.reserved, "flashattn_append_kv_args");
  if (args.update_descales == 0) return;
  if (args.update_descales != 1) {
    reject(FLASHATTN_REASON_VALUE, "update_descales",
           "update_descales = %d is neither 0 nor 1; set 1 to have descales made",
           args.update_descales);
  }
  const bool has_tokens =
      problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q) ? args.total_q > 0 : args.seqlen_q > 0;
  // Arrays of no token may be NULL.
  if (has_tokens && args.q.data && !args.k.data && !args.v.data) {
    reject(FLASHATTN_REASON_VALUE, "update_descales",
           "update_descales = 1 has a meaning only with k or v; give one, or leave it at 0");
  }
  if (!problem.has_8bit_cache()) {
    reject(
        FLASHATTN_REASON_DTYPE, "update_descales",
        "update_descales = 1 has a meaning only with a cache of F8E4M3 or I8, and dtype_kv = %s; "
        "leave it at 0",
        dtype_name(problem.dtype_kv));
  }
  if (problem.descale_block == 0) {
    reject(FLASHATTN_REASON_SIZE, "update_descales",
           "update_descales = 1, but descale_block = 0: one descale of all tokens would mean to "
           "round the whole cache again; make the plan with a descale_block of 1 or more");
  }
  const int64_t rows = int64_t{args.seqlen_q} + args.seqlen_kv;
  if (rows > INT32_MAX) {
    reject(FLASHATTN_REASON_SIZE, "seqlen_q",
           "seqlen_q = %d and seqlen_kv = %d are %" PRId64
           " in all, above %d, the most that "
           "update_descales counts blocks of; append fewer tokens at once",
           args.seqlen_q, args.seqlen_kv, rows, INT32_MAX);
  }
}

// Sets turns[c]: the rotation of pair c from one position to the next, in units of 2^-64 turns. The
// angle errs by 1e-6 at position 2^31, and less in proportion.
void fill_turns(float base, int32_t rotary_dim, uint64_t* turns) {
  constexpr double kRadian = 0.15915494309189535;  // turns
  const double step = std::pow(static_cast<double>(base), -2.0 / rotary_dim);
  double turn = kRadian;
  for (int32_t c = 0; c < rotary_dim / 2; ++c, turn *= step) {
    turns[c] = static_cast<uint64_t>(std::ldexp(turn, 64));
  }
}

bool same_strides(const flashattn_tensor& x, const flashattn_tensor& y) {
  return x.stride_batch == y.stride_batch && x.stride_head == y.stride_head &&
         x.stride_seq == y.stride_seq;
}

// Refuses new tokens without room, page or position. Only the lengths have been checked before.
void check_rows(const Problem& problem, const AppendArgs& args) {
  const Inputs& in = args.inputs;
  const bool stores = in.k.data || in.v.data;
  for (int32_t b = 0; b < args.shape.batch; ++b) {
    const AppendRows r = append_rows(problem, args, b);
    if (stores && r.stored < r.tokens) {
      reject(FLASHATTN_REASON_LENGTHS, "lens_kv",
             "lens_kv[%d] = %d and %d new tokens make more than the %d rows of sequence %d in the "
             "cache; give it more room, or fewer tokens",
             b, in.lens_kv[b], r.tokens, r.end, b);
    }
    const int64_t first = r.position, last = first + r.tokens - 1;
    const char* const field = args.positions ? "positions" : "lens_kv";
    if (args.rotary_dim > 0 && r.tokens > 0 && first < 0) {
      reject(FLASHATTN_REASON_LENGTHS, field,
             "%s[%d] = %" PRId64 " is below 0; give the position of the first new token", field, b,
             first);
    }
    if (args.rotary_cos.data && r.tokens > 0 && last >= args.rotary_positions) {
      reject(FLASHATTN_REASON_LENGTHS, field,
             "%s: sequence %d has new tokens up to position %" PRId64
             ", but rotary_cos ends at that of rotary_positions = %d; give longer tables",
             field, b, last, args.rotary_positions);
    }
    if (!stores || !problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV) || r.stored == 0) continue;
    const int32_t* const row = in.page_table + b * in.page_table_stride;
    // Tokens that the first block holds may be rounded again.
    const int32_t first_row =
        in.lens_kv[b] - (args.update_descales ? in.lens_kv[b] % problem.descale_block : 0);
    for (int32_t n = first_row / problem.page_size; n <= (r.end - 1) / problem.page_size; ++n) {
      if (row[n] >= 0 && row[n] < in.pages) continue;
      reject(FLASHATTN_REASON_LENGTHS, "page_table",
             "page_table[%d][%d] = %d is not within 0 and %" PRId64 ", the last of pages = %" PRId64
             "; tokens %d to %d of sequence %d are written there: give it the number of a page of "
             "the pool",
             b, n, row[n], in.pages - 1, in.pages, in.lens_kv[b], r.end - 1, b);
    }
  }
}

// One of q, k and v, the array that it is written to, and its descale.
struct Operand {
  const char *name, *out_name, *descale_name;
  flashattn_tensor *in, *out, *descale;
  Rows out_rows;
  int32_t heads, dim, dtype_out;
};

void add_operand(const Problem& problem, const Shape& shape, int32_t dtype, const Operand& x,
                 bool updates, ArrayList* arrays) {
  const bool given = x.in->data != nullptr;
  const Rows rows = query_rows(problem, shape);
  if (!given && (rows.batch == 0 || rows.tokens == 0)) return;  // no token has an address
  const bool scales = given && x.descale && problem.has_8bit_cache();
  check_beside(x.out_name, ".data", x.out->data, given, x.name);
  if (x.descale) {
    check_beside(x.descale_name, ".data", x.descale->data, scales,
                 given ? "a cache of F8E4M3 or I8" : x.name);
  }
  if (!given) return;
  const Array in = tensor_array(x.name, Use::kInput, x.in, rows, x.heads, x.dim, dtype);
  const Array out =
      tensor_array(x.out_name, Use::kOutput, x.out, x.out_rows, x.heads, x.dim, x.dtype_out);
  const bool in_place = !x.descale && x.in->data == x.out->data && same_strides(*x.in, *x.out);
  if (!in_place) arrays->add(in);
  arrays->add(out);
  if (!scales || (!x.descale->data && !updates)) return;
  arrays->add(
      strided_array(x.descale_name, updates ? Use::kOutput : Use::kInput, x.descale,
                    {shape.batch, problem.heads_kv, descale_blocks(problem, shape.seqlen_kv), 1},
                    Order::kHeads, sizeof(float)));
}

}  // namespace

AppendArgs check_append_kv(const Problem& problem, bool host, flashattn_append_kv_args args) {
  check_types(problem, &args);
  check_rotary(problem, args);
  check_update(problem, args);
  flashattn_args lengths = lengths_of(args);
  lengths.page_table = args.page_table;
  lengths.pages = args.pages;
  ArrayList arrays;
  AppendArgs own{};
  own.shape = shape_of(lengths);
  own.inputs = check_lengths(problem, false, &lengths, &arrays);
  own.dtype_rotary = args.dtype_rotary ? args.dtype_rotary : FLASHATTN_DTYPE_F32;
  const Shape& shape = own.shape;
  const bool stores = args.k.data || args.v.data;
  // Where lens_kv is given, check_lengths() has added it.
  if (!args.lens_kv) {
    arrays.add(packed_array("lens_kv", Use::kInput, args.lens_kv, sizeof(int32_t), shape.batch));
  }
  if (args.positions) {
    arrays.add(
        packed_array("positions", Use::kInput, args.positions, sizeof(int32_t), shape.batch));
  }
  const Rows rows = query_rows(problem, shape), cache = key_rows(problem, shape, own.inputs.pages);
  const bool empty = rows.batch == 0 || rows.tokens == 0;
  check_beside("lens_out", "", args.lens_out, stores || empty, "k or v");
  if (args.lens_out && args.lens_out != args.lens_kv) {
    arrays.add(packed_array("lens_out", Use::kOutput, args.lens_out, sizeof(int32_t), shape.batch));
  }
  const Operand operands[] = {
      {"q", "q_out", "", &args.q, &args.q_out, nullptr, rows, problem.heads_q, problem.dim_qk,
       args.dtype},
      {"k", "k_cache", "descale_k", &args.k, &args.k_cache, &args.descale_k, cache,
       problem.heads_kv, problem.dim_qk, problem.dtype_kv},
      {"v", "v_cache", "descale_v", &args.v, &args.v_cache, &args.descale_v, cache,
       problem.heads_kv, problem.dim_v, problem.dtype_kv},
  };
  for (const Operand& operand : operands) {
    add_operand(problem, shape, args.dtype, operand, args.update_descales != 0, &arrays);
  }
  if (args.rotary_cos.data) {
    const int64_t extent[4] = {1, 1, args.rotary_positions, args.rotary_dim / 2};
    const int32_t size = dtype_size(own.dtype_rotary);
    for (const auto& table :
         {std::pair<const char*, flashattn_tensor*>{"rotary_cos", &args.rotary_cos},
          {"rotary_sin", &args.rotary_sin}}) {
      arrays.add(
          strided_array(table.first, Use::kInput, table.second, extent, Order::kTokens, size));
    }
  } else if (args.rotary_dim > 0) {
    fill_turns(args.rotary_base, args.rotary_dim, own.turns);
  }
  arrays.check_overlaps();
  own.inputs.q = args.q;
  own.inputs.k = args.k;
  own.inputs.v = args.v;
  own.inputs.descale_k = args.descale_k;
  own.inputs.descale_v = args.descale_v;
  own.dtype = args.dtype;
  own.rotary = args.rotary;
  own.rotary_dim = args.rotary_dim;
  own.rotary_positions = args.rotary_positions;
  own.update_descales = args.update_descales != 0;
  own.positions = args.positions;
  own.lens_out = args.lens_out;
  own.q_out = args.q_out;
  own.k_cache = args.k_cache;
  own.v_cache = args.v_cache;
  own.rotary_cos = args.rotary_cos;
  own.rotary_sin = args.rotary_sin;
  if (host && shape.batch > 0) {
    // Pages before the first new token need not be there.
    Problem dense = problem;
    dense.layout &= ~static_cast<uint32_t>(FLASHATTN_LAYOUT_PAGED_KV);
    check_contents(dense, shape, own.inputs);
    check_rows(problem, own);
  }
  return own;
}

}  // namespace flashattn
