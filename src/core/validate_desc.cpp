#include "core/validate_desc.h"

#include <cinttypes>
#include <climits>
#include <cmath>

#include "core/error.h"

namespace flashattn {
namespace {

// Each split of a query's keys has a partial result in the workspace.
constexpr int32_t kMaxSplits = 4096;

bool is_dtype(int32_t value) {
  return value >= FLASHATTN_DTYPE_DEFAULT && value <= FLASHATTN_DTYPE_I8;
}

struct Bits {
  const char* field;
  uint32_t value, known;
};

void check_bits(const flashattn_desc& desc) {
  const Bits table[] = {
      {"ops", desc.ops, FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD},
      {"layout", desc.layout,
       FLASHATTN_LAYOUT_VARLEN_Q | FLASHATTN_LAYOUT_VARLEN_KV | FLASHATTN_LAYOUT_PAGED_KV |
           FLASHATTN_LAYOUT_LATENT_KV},
      {"mask", desc.mask,
       FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK |
           FLASHATTN_MASK_TOP_LEFT | FLASHATTN_MASK_BLOCKS | FLASHATTN_MASK_TREE |
           FLASHATTN_MASK_PAGES | FLASHATTN_MASK_BLOCK_LISTS | FLASHATTN_MASK_BLOCK_LENS},
      {"bias", desc.bias, FLASHATTN_BIAS_ALIBI | FLASHATTN_BIAS_DENSE},
      {"features", desc.features,
       FLASHATTN_FEATURE_LSE | FLASHATTN_FEATURE_SINK | FLASHATTN_FEATURE_DLSE |
           FLASHATTN_FEATURE_DBIAS | FLASHATTN_FEATURE_DSINK},
  };
  for (const Bits& bits : table) {
    if ((bits.value & ~bits.known) == 0) continue;
    reject(FLASHATTN_REASON_VALUE, bits.field,
           "%s = 0x%" PRIx32 " has the unknown bits 0x%" PRIx32 "; this library knows 0x%" PRIx32
           ": clear the others",
           bits.field, bits.value, bits.value & ~bits.known, bits.known);
  }
}

// A field that holds an enumerator in [least, most].
struct Choice {
  const char* field;
  int32_t value, least, most, reason;
  const char *what, *remedy;
};

void check_choices(const flashattn_desc& desc) {
  constexpr int32_t kDtype = FLASHATTN_REASON_DTYPE, kValue = FLASHATTN_REASON_VALUE;
  const Choice table[] = {
      {"device", desc.device, FLASHATTN_DEVICE_CPU, FLASHATTN_DEVICE_CUDA, kValue,
       "a kind of device", "use FLASHATTN_DEVICE_CPU = 0 or FLASHATTN_DEVICE_CUDA = 1"},
      {"dtype", desc.dtype, FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F8E4M3, kDtype,
       "a type of q, k and v",
       "required: set FLASHATTN_DTYPE_F32 = 1, F16 = 2, BF16 = 3 or F8E4M3 = 4"},
      // The types of a cache are not a range: I8 is known, U8 below it is not.
      {"dtype_kv", desc.dtype_kv == FLASHATTN_DTYPE_I8 ? 0 : desc.dtype_kv, FLASHATTN_DTYPE_DEFAULT,
       FLASHATTN_DTYPE_F8E4M3, kDtype, "a type of k and v",
       "use FLASHATTN_DTYPE_F8E4M3 = 4 or I8 = 6 for a cache, or 0 for the type of q"},
      {"dtype_o", desc.dtype_o, FLASHATTN_DTYPE_DEFAULT, FLASHATTN_DTYPE_F8E4M3, kDtype,
       "a type of o", "use FLASHATTN_DTYPE_F32 = 1, or 0 for the type of q"},
      {"dtype_grad", desc.dtype_grad, FLASHATTN_DTYPE_DEFAULT, FLASHATTN_DTYPE_BF16, kDtype,
       "a type of dq, dk and dv", "use FLASHATTN_DTYPE_F32 = 1, F16 = 2 or BF16 = 3, or 0"},
      {"dtype_bias", desc.dtype_bias, FLASHATTN_DTYPE_DEFAULT, FLASHATTN_DTYPE_U8, kDtype,
       "a type of the dense bias",
       "use FLASHATTN_DTYPE_F32 = 1, F16 = 2 or BF16 = 3, U8 = 5 for a boolean mask, or 0 for the "
       "type of q"},
      {"determinism", desc.determinism, FLASHATTN_DETERMINISM_DEFAULT,
       FLASHATTN_DETERMINISM_BATCH_INVARIANT, kValue, "a level of determinism",
       "use FLASHATTN_DETERMINISM_DEFAULT = 0, RUN_TO_RUN = 1 or BATCH_INVARIANT = 2"},
  };
  for (const Choice& choice : table) {
    if (choice.value >= choice.least && choice.value <= choice.most) continue;
    const bool named = choice.reason == kDtype && is_dtype(choice.value);
    reject(choice.reason, choice.field, "%s = %d%s%s%s is not %s; %s", choice.field, choice.value,
           named ? " (" : "", named ? dtype_name(choice.value) : "", named ? ")" : "", choice.what,
           choice.remedy);
  }
}

struct Range {
  const char* field;
  int64_t value, least, most;
  int32_t reason;
  const char* remedy;
};

void check_ranges(const flashattn_desc& desc) {
  constexpr int32_t kSize = FLASHATTN_REASON_SIZE;
  constexpr int32_t kValue = FLASHATTN_REASON_VALUE;
  constexpr char kMaximum[] = "give the largest size that calls will have, or 0 for none";
  const Range table[] = {
      {"device_index", desc.device_index, 0, INT32_MAX, kValue, "count devices from 0"},
      {"heads_q", desc.heads_q, 1, INT32_MAX, kSize, "required: set the number of query heads"},
      {"heads_kv", desc.heads_kv, 0, INT32_MAX, kSize,
       "set the number of key and value heads, or 0 for heads_q"},
      {"dim_qk", desc.dim_qk, 1, INT32_MAX, kSize,
       "required: set the number of elements of a query and a key"},
      {"dim_v", desc.dim_v, 0, INT32_MAX, kSize,
       "set the number of elements of a value, or 0 for dim_qk"},
      {"page_size", desc.page_size, 0, INT32_MAX, FLASHATTN_REASON_PAGE_SIZE,
       "set the number of tokens of a page"},
      {"window_left", desc.window_left, -1, INT32_MAX, kValue,
       "set the number of visible keys before the diagonal, or -1 for all"},
      {"window_right", desc.window_right, -1, INT32_MAX, kValue,
       "set the number of visible keys after the diagonal, or -1 for all"},
      {"chunk", desc.chunk, 0, INT32_MAX, kSize, "set the number of tokens of a chunk"},
      {"block_q", desc.block_q, 0, INT32_MAX, kSize, "set the number of queries of a block"},
      {"block_kv", desc.block_kv, 0, INT32_MAX, kSize, "set the number of keys of a block"},
      {"tree", desc.tree, 0, 256, kSize, "set the number of drafted tokens"},
      {"descale_block", desc.descale_block, 0, INT32_MAX, kSize,
       "set the number of tokens that share a descale, or 0 for all of a sequence"},
      {"descale_dim", desc.descale_dim, 0, INT32_MAX, kSize,
       "set the number of elements of a value that share a descale"},
      {"splits", desc.splits, 0, kMaxSplits, kSize, "use 0 to let the library choose, 1 for never"},
      {"max_batch", desc.max_batch, 0, INT32_MAX, kSize, kMaximum},
      {"max_seqlen_q", desc.max_seqlen_q, 0, INT32_MAX, kSize, kMaximum},
      {"max_seqlen_kv", desc.max_seqlen_kv, 0, INT32_MAX, kSize, kMaximum},
      {"multiprocessors", desc.multiprocessors, 0, INT32_MAX, kSize,
       "use 0 for all multiprocessors"},
      {"threads", desc.threads, 0, INT32_MAX, kSize, "use 0 for all threads"},
      {"max_total_q", desc.max_total_q, 0, INT64_MAX, kSize, kMaximum},
      {"max_total_kv", desc.max_total_kv, 0, INT64_MAX, kSize, kMaximum},
      {"workspace_limit", desc.workspace_limit, 0, INT64_MAX, kSize, "use 0 for no limit"},
  };
  for (const Range& range : table) {
    if (range.value < range.least) {
      reject(range.reason, range.field, "%s = %" PRId64 " is below %" PRId64 "; %s", range.field,
             range.value, range.least, range.remedy);
    }
    if (range.value > range.most) {
      reject(range.reason, range.field, "%s = %" PRId64 " is above %" PRId64 "; %s", range.field,
             range.value, range.most, range.remedy);
    }
  }
}

// The limit keeps the number times log2(e) finite: infinity times a product of 0 would be NaN.
constexpr double kLargestFactor = 0x1p127;

// A factor of the formula, which must lie in [least, below).
struct Real {
  const char* field;
  float value;
  double least, below;
  int32_t reason;
  const char* remedy;
};

void check_reals(const flashattn_desc& desc) {
  const Real table[] = {
      {"scale", desc.scale, -kLargestFactor, kLargestFactor, FLASHATTN_REASON_VALUE,
       "use a factor of magnitude below 2^127, or 0 for 1 / sqrt(dim_qk)"},
      {"softcap", desc.softcap, 0, kLargestFactor, FLASHATTN_REASON_SOFTCAP,
       "use a cap above 0 and below 2^127, or 0 for none"},
      {"dropout", desc.dropout, 0, 1, FLASHATTN_REASON_DROPOUT,
       "use a probability of at least 0 and below 1"},
  };
  for (const Real& real : table) {
    if (std::isfinite(real.value) && real.value >= real.least && real.value < real.below) continue;
    reject(real.reason, real.field, "%s = %g is out of range; %s", real.field,
           static_cast<double>(real.value), real.remedy);
  }
}

// A field that has a meaning only together with another one.
struct Dependent {
  const char* field;
  int64_t value;
  bool wanted;  // whether the other field is set
  bool needed;  // whether 0 is refused if the other field is set
  int32_t reason;
  const char* other;
};

void check_dependents(const Problem& p) {
  const bool window = p.has_mask(FLASHATTN_MASK_WINDOW), chunk = p.has_mask(FLASHATTN_MASK_CHUNK);
  const bool blocks = p.has_mask(FLASHATTN_MASK_BLOCKS);
  constexpr int32_t kMask = FLASHATTN_REASON_MASK_COMBINATION;
  const Dependent table[] = {
      {"page_size", p.page_size, p.has_layout(FLASHATTN_LAYOUT_PAGED_KV), true,
       FLASHATTN_REASON_PAGE_SIZE, "layout bit FLASHATTN_LAYOUT_PAGED_KV"},
      {"window_left", p.window_left, window, false, kMask, "mask bit FLASHATTN_MASK_WINDOW"},
      {"window_right", p.window_right, window, false, kMask, "mask bit FLASHATTN_MASK_WINDOW"},
      {"chunk", p.chunk, chunk, true, kMask, "mask bit FLASHATTN_MASK_CHUNK"},
      {"block_q", p.block_q, blocks, true, kMask, "mask bit FLASHATTN_MASK_BLOCKS"},
      {"block_kv", p.block_kv, blocks, true, kMask, "mask bit FLASHATTN_MASK_BLOCKS"},
      {"tree", p.tree, p.has_mask(FLASHATTN_MASK_TREE), true, kMask,
       "mask bit FLASHATTN_MASK_TREE"},
      {"descale_block", p.descale_block, p.has_8bit(), false, FLASHATTN_REASON_DTYPE,
       "dtype FLASHATTN_DTYPE_F8E4M3 or dtype_kv F8E4M3 or I8"},
      {"descale_dim", p.descale_dim, p.is_latent(), true, FLASHATTN_REASON_LAYOUT,
       "layout bit FLASHATTN_LAYOUT_LATENT_KV"},
      {"dtype_grad", p.dtype_grad, p.has_op(FLASHATTN_OP_BACKWARD), false, FLASHATTN_REASON_OP,
       "op bit FLASHATTN_OP_BACKWARD"},
      {"dtype_bias", p.dtype_bias, p.has_bias(FLASHATTN_BIAS_DENSE), false, FLASHATTN_REASON_BIAS,
       "bias bit FLASHATTN_BIAS_DENSE"},
      {"max_total_q", p.max_total_q, p.has_layout(FLASHATTN_LAYOUT_VARLEN_Q), false,
       FLASHATTN_REASON_LAYOUT, "layout bit FLASHATTN_LAYOUT_VARLEN_Q"},
      {"max_total_kv", p.max_total_kv, p.has_layout(FLASHATTN_LAYOUT_VARLEN_KV), false,
       FLASHATTN_REASON_LAYOUT, "layout bit FLASHATTN_LAYOUT_VARLEN_KV"},
      {"multiprocessors", p.multiprocessors, p.device == FLASHATTN_DEVICE_CUDA, false,
       FLASHATTN_REASON_VALUE, "device FLASHATTN_DEVICE_CUDA"},
      {"threads", p.threads, p.device == FLASHATTN_DEVICE_CPU, false, FLASHATTN_REASON_VALUE,
       "device FLASHATTN_DEVICE_CPU"},
  };
  for (const Dependent& row : table) {
    if (row.value != 0 && !row.wanted) {
      reject(row.reason, row.field,
             "%s = %" PRId64 " has a meaning only with the %s; ask for that, or leave %s at 0",
             row.field, row.value, row.other, row.field);
    }
    if (row.value == 0 && row.wanted && row.needed) {
      reject(row.reason, row.field, "%s = 0, but the %s needs it; set it to at least 1", row.field,
             row.other);
    }
  }
}

// A bit that another choice requires or excludes.
struct Conflict {
  bool found;
  int32_t reason;
  const char* field;
  const char* message;
};

void check_conflicts(const Problem& p) {
  const bool backward = p.has_op(FLASHATTN_OP_BACKWARD);
  const bool paged = p.has_layout(FLASHATTN_LAYOUT_PAGED_KV);
  const bool dbias = p.has_feature(FLASHATTN_FEATURE_DBIAS);
  const Conflict table[] = {
      {paged && p.has_layout(FLASHATTN_LAYOUT_VARLEN_KV), FLASHATTN_REASON_LAYOUT, "layout",
       "layout has both PAGED_KV and VARLEN_KV, but keys lie in pages or packed, not both; clear "
       "one (with pages, lens_kv says how many tokens a sequence has)"},
      {p.has_mask(FLASHATTN_MASK_TREE) && backward, FLASHATTN_REASON_MASK_COMBINATION, "mask",
       "mask has TREE, which is for forward only, but ops has BACKWARD; clear one"},
      {p.has_mask(kMaskOfBlocks) && !p.has_mask(FLASHATTN_MASK_BLOCKS),
       FLASHATTN_REASON_MASK_COMBINATION, "mask",
       "mask has BLOCK_LISTS or BLOCK_LENS, which say more of the blocks of BLOCKS, but not "
       "BLOCKS; add that or clear them"},
      {p.has_mask(FLASHATTN_MASK_PAGES) && !paged, FLASHATTN_REASON_MASK_COMBINATION, "mask",
       "mask has PAGES, by which page_table hides keys, but layout has no PAGED_KV; add that or "
       "clear PAGES"},
      {paged && backward, FLASHATTN_REASON_LAYOUT, "layout",
       "layout has PAGED_KV, which is for forward only, but ops has BACKWARD; clear one"},
      {p.is_latent() && backward, FLASHATTN_REASON_LAYOUT, "layout",
       "layout has LATENT_KV, which is for forward only, but ops has BACKWARD; clear one"},
      {p.is_latent() && (p.has_8bit_q() || !p.has_8bit_cache()), FLASHATTN_REASON_DTYPE_MIX,
       "dtype_kv",
       "layout has LATENT_KV, a quantised cache beside wider q; set dtype F32, F16 or BF16 and "
       "dtype_kv F8E4M3 or I8, or clear LATENT_KV"},
      {p.is_latent() && p.descale_block != 0, FLASHATTN_REASON_LAYOUT, "descale_block",
       "descale_block is set, but with LATENT_KV each token has its own descales, for descale_dim "
       "elements each; leave descale_block at 0"},
      {p.has_feature(FLASHATTN_FEATURE_DLSE) && !backward, FLASHATTN_REASON_OP, "features",
       "features has DLSE, an input of backward, but ops has no BACKWARD; add that or clear DLSE"},
      {dbias && !backward, FLASHATTN_REASON_OP, "features",
       "features has DBIAS, an output of backward, but ops has no BACKWARD; add that or clear "
       "DBIAS"},
      {p.has_feature(FLASHATTN_FEATURE_DSINK) && !backward, FLASHATTN_REASON_OP, "features",
       "features has DSINK, an output of backward, but ops has no BACKWARD; add that or clear "
       "DSINK"},
      {dbias && !p.has_bias(FLASHATTN_BIAS_DENSE), FLASHATTN_REASON_BIAS, "features",
       "features has DBIAS, but bias has no DENSE; add that or clear DBIAS"},
      {dbias && p.dtype_bias == FLASHATTN_DTYPE_U8, FLASHATTN_REASON_BIAS, "features",
       "features has DBIAS, but a boolean mask (dtype_bias U8) has no gradient; clear DBIAS or use "
       "a bias of floats"},
      {backward && p.dtype_o == FLASHATTN_DTYPE_F8E4M3, FLASHATTN_REASON_DTYPE_MIX, "dtype_o",
       "dtype_o is F8E4M3, but ops has BACKWARD, which reads o and dout in more bits; set F32, F16 "
       "or BF16"},
      {p.has_feature(FLASHATTN_FEATURE_DSINK) && !p.has_feature(FLASHATTN_FEATURE_SINK),
       FLASHATTN_REASON_SINK, "features",
       "features has DSINK, but not SINK; add that or clear DSINK"},
      {p.has_bias(FLASHATTN_BIAS_DENSE) && p.dtype_bias == FLASHATTN_DTYPE_F8E4M3,
       FLASHATTN_REASON_BIAS, "dtype_bias",
       "dtype_bias is F8E4M3, which the dense bias cannot be; set F32, F16, BF16 or, for a boolean "
       "mask, U8"},
  };
  for (const Conflict& row : table) {
    if (row.found) reject(row.reason, row.field, "%s", row.message);
  }
}

// Refuses a probability that rounds to 0 or 1: the caller asked for something between.
void check_dropout_step(const Problem& p) {
  const double dropout = static_cast<double>(p.dropout);
  if (p.dropout > 0 && p.dropout_threshold() == 0) {
    reject(
        FLASHATTN_REASON_DROPOUT, "dropout",
        "dropout = %.9g rounds to 0 in steps of 1/65536, which drops nothing; use 0 for none, or "
        "at least 1/65536 = %.9g",
        dropout, 1 / 65536.0);
  }
  if (p.dropout_threshold() >= 65536) {
    reject(FLASHATTN_REASON_DROPOUT, "dropout",
           "dropout = %.9g rounds to 1 in steps of 1/65536, which keeps nothing; use at most %.9g",
           dropout, 65535.0 / 65536.0);
  }
}

// Whether o may have this type: the type of q, F32, or any type if some input has 8 bits.
bool output_type_fits(const Problem& p) {
  return p.dtype_o == p.dtype || p.dtype_o == FLASHATTN_DTYPE_F32 || p.has_8bit();
}

void resolve_defaults(Problem* p) {
  if (p->ops == 0) p->ops = FLASHATTN_OP_FORWARD;
  if (p->dtype_kv == FLASHATTN_DTYPE_DEFAULT) p->dtype_kv = p->dtype;
  if (p->dtype_o == FLASHATTN_DTYPE_DEFAULT) p->dtype_o = p->dtype;
  if (p->dtype_grad == FLASHATTN_DTYPE_DEFAULT && p->has_op(FLASHATTN_OP_BACKWARD)) {
    p->dtype_grad = p->dtype == FLASHATTN_DTYPE_F8E4M3 ? p->dtype_o : p->dtype;
  }
  if (p->heads_kv == 0) p->heads_kv = p->heads_q;
  if (p->dim_v == 0) p->dim_v = p->dim_qk;
  if (p->scale == 0) p->scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p->dim_qk)));
  if (p->has_bias(FLASHATTN_BIAS_DENSE) && p->dtype_bias == FLASHATTN_DTYPE_DEFAULT) {
    p->dtype_bias = p->dtype;
  }
  if (p->dropout == 0) p->dropout = 0;  // turns -0 into 0
  if (p->softcap == 0) p->softcap = 0;
}

}  // namespace

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case FLASHATTN_DTYPE_DEFAULT: return "FLASHATTN_DTYPE_DEFAULT";
    case FLASHATTN_DTYPE_F32: return "FLASHATTN_DTYPE_F32";
    case FLASHATTN_DTYPE_F16: return "FLASHATTN_DTYPE_F16";
    case FLASHATTN_DTYPE_BF16: return "FLASHATTN_DTYPE_BF16";
    case FLASHATTN_DTYPE_F8E4M3: return "FLASHATTN_DTYPE_F8E4M3";
    case FLASHATTN_DTYPE_U8: return "FLASHATTN_DTYPE_U8";
    case FLASHATTN_DTYPE_I8: return "FLASHATTN_DTYPE_I8";
    default: return "unknown";
  }
}

void check_reserved(int32_t reserved, const char* structure) {
  if (reserved == 0) return;
  reject(FLASHATTN_REASON_RESERVED, "reserved",
         "reserved = %d of %s must be 0; clear the structure before setting fields", reserved,
         structure);
}

Problem make_problem(const flashattn_desc& desc) {
  Problem p;
  static_cast<flashattn_desc&>(p) = desc;
  check_bits(p);
  check_choices(p);
  check_ranges(p);
  check_reals(p);
  resolve_defaults(&p);
  check_dependents(p);
  check_conflicts(p);
  if (p.heads_q % p.heads_kv != 0) {
    reject(FLASHATTN_REASON_HEAD_RATIO, "heads_kv",
           "heads_q = %d is no multiple of heads_kv = %d; each KV head serves the same number of "
           "query heads: change one, or repeat heads through strides",
           p.heads_q, p.heads_kv);
  }
  if (p.is_latent() && p.dim_qk <= p.dim_v) {
    reject(FLASHATTN_REASON_HEAD_DIM_PAIR, "dim_v",
           "dim_v = %d is not below dim_qk = %d, but with LATENT_KV a key is its value and further "
           "elements; set a smaller dim_v, or clear LATENT_KV",
           p.dim_v, p.dim_qk);
  }
  if (p.dtype_kv != p.dtype && !p.has_8bit_cache()) {
    reject(FLASHATTN_REASON_DTYPE_MIX, "dtype_kv",
           "dtype_kv = %s does not go with dtype = %s; use %s, or FLASHATTN_DTYPE_F8E4M3 or "
           "I8 for a cache",
           dtype_name(p.dtype_kv), dtype_name(p.dtype), dtype_name(p.dtype));
  }
  if (p.dtype_grad != FLASHATTN_DTYPE_DEFAULT && p.dtype_grad != p.dtype && !p.has_8bit()) {
    reject(FLASHATTN_REASON_DTYPE_MIX, "dtype_grad",
           "dtype_grad = %s does not go with dtype = %s, whose gradients have its type; use 0",
           dtype_name(p.dtype_grad), dtype_name(p.dtype));
  }
  if (!output_type_fits(p)) {
    const bool is_f32 = p.dtype == FLASHATTN_DTYPE_F32;
    reject(FLASHATTN_REASON_DTYPE_MIX, "dtype_o",
           "dtype_o = %s does not go with dtype = %s; use %s%sFLASHATTN_DTYPE_F32",
           dtype_name(p.dtype_o), dtype_name(p.dtype), is_f32 ? "" : dtype_name(p.dtype),
           is_f32 ? "" : " or ");
  }
  if (p.softcap > 0 && std::fabs(p.scale) / static_cast<double>(p.softcap) >= kLargestFactor) {
    reject(
        FLASHATTN_REASON_SOFTCAP, "softcap",
        "softcap = %g beside scale = %g: their quotient, the factor of the scores, reaches 2^127; "
        "use a larger softcap, or 0 for none",
        static_cast<double>(p.softcap), static_cast<double>(p.scale));
  }
  check_dropout_step(p);
  return p;
}

}  // namespace flashattn
