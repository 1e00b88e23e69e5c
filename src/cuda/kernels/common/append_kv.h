// New keys and values into a cache, with rotary position embedding: flashattn_append_kv.
#pragma once

#include "core/append_rows.h"

namespace flashattn::cuda {

// q, k or v: from the new tokens to q_out or the cache. A thread moves one vec at a time: some
// elements x of a row and as many elements y, which are rotated together. If c, the vec's first
// pair, is below `split`, x begins with element c and y with split + c of the row; other vecs are
// neighbouring elements from 2 c on.
struct AppendOperand {
  flashattn_tensor from, to, descale;  // data NULL: nothing is moved; of descale: it is 1
  FastDivmod by_vecs;                  // vecs of a row
  int32_t first_vec;                   // index of the operand's first vec in a token
  int32_t dim, pairs, split;           // pairs: to rotate
};

struct AppendParams {
  Problem problem;
  AppendArgs args;
  AppendOperand operands[3];  // q, k, v
  int32_t vecs;               // vecs of a token in q, k and v together
  int32_t slots;              // tokens that a CTA moves at once
  int32_t tokens_per_cta;
  int32_t pairs;              // pairs of a token to rotate; 0: none
  int32_t groups_kv, groups;  // of heads, a warp a head: of k and v, of all
  bool writes_lens;           // false: another kernel does, once all CTAs have read lens_kv
  FastDivmod by_vecs, by_pairs, by_page, by_block;
};
static_assert(sizeof(AppendParams) <= 4096, "kernel parameters of any toolkit and driver");

constexpr int kAppendMaxThreads = 384;
constexpr int kAppendBlockMaxThreads = 128;  // of a CTA that makes descales, a warp a head
constexpr int kAppendVector = 8;  // elements that a thread loads at once, where rows are aligned
constexpr int kAppendMaxAngles = 1024;    // angles of all tokens of a CTA
constexpr int kAppendBlockAngles = 2048;  // of a CTA that makes descales
static_assert(kAppendMaxAngles >= kMaxRotaryPairs && kAppendBlockAngles >= kMaxRotaryPairs);

struct AppendKernels {
  void (*append)(AppendParams);         // moves tokens; descales are given
  void (*append_blocks)(AppendParams);  // moves tokens, and makes descales of k and v
  void (*advance_lens)(AppendParams);   // writes lens_out, which may be lens_kv, after the others
};

// dtype: of new tokens. vectors: rows of all arrays of the call can be moved 8 elements at once.
AppendKernels append_kernels(int32_t dtype, bool vectors);

}  // namespace flashattn::cuda
