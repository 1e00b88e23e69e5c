#include "core/cost.h"

#include <algorithm>

namespace flashattn {
namespace {

int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

int64_t plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

int64_t pairs_of_sequence(const Problem& problem, Lengths len) {
  constexpr uint32_t kShape = FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK;
  if (!problem.has_mask(kShape)) return static_cast<int64_t>(len.q) * len.kv;
  return visible_pairs(problem.mask_rule(), len);
}

// Visible pairs of one head over the whole batch.
int64_t pairs_of_batch(const Problem& problem, const Shape& shape) {
  const bool varlen_q = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q);
  const bool varlen_kv = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV);
  int64_t left = shape.batch, q = shape.total_q, kv = shape.total_kv, pairs = 0;
  // Each step counts sequences of equal lengths: first the full ones, then the one that gets the
  // remaining tokens.
  while (left > 0) {
    Lengths len = {shape.seqlen_q, shape.seqlen_kv};
    if (varlen_q) len.q = static_cast<int32_t>(std::min<int64_t>(len.q, q));
    if (varlen_kv) len.kv = static_cast<int32_t>(std::min<int64_t>(len.kv, kv));
    if (len.q == 0 || len.kv == 0) break;
    int64_t equal = left;
    if (varlen_q) equal = std::min(equal, q / len.q);
    if (varlen_kv) equal = std::min(equal, kv / len.kv);
    pairs = plus(pairs, times(equal, pairs_of_sequence(problem, len)));
    left -= equal;
    q -= equal * len.q;
    kv -= equal * len.kv;
  }
  return pairs;
}

int64_t operation_bytes(const Problem& problem, uint32_t op, const Shape& shape) {
  const bool backward = op == FLASHATTN_OP_BACKWARD;
  const int64_t queries = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)
                              ? shape.total_q
                              : times(shape.batch, shape.seqlen_q);
  const int64_t keys = problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV)
                           ? shape.total_kv
                           : times(shape.batch, shape.seqlen_kv);
  const int64_t in = dtype_size(problem.dtype), in_kv = dtype_size(problem.dtype_kv);
  const int64_t out = dtype_size(problem.dtype_o), grad = dtype_size(problem.dtype_grad);
  const int64_t heads_q = problem.heads_q, heads_kv = problem.heads_kv;
  const int64_t qk = problem.dim_qk, v = problem.dim_v;

  int64_t bytes = 0;
  const auto add = [&](int64_t arrays, int64_t rows, int64_t heads, int64_t dim, int64_t element) {
    bytes = plus(bytes, times(times(times(times(rows, heads), dim), element), arrays));
  };
  add(1, queries, heads_q, qk, in);                                            // q
  add(1, keys, heads_kv, problem.columns_k(), dtype_size(problem.dtype_k()));  // k
  add(1, keys, heads_kv, v, in_kv);                                            // v
  if (problem.is_latent()) add(1, keys, heads_kv, problem.latent_descales(), 4);
  if (backward) {
    add(1, queries, heads_q, qk, grad);  // dq
    add(1, keys, heads_kv, qk, grad);    // dk
    add(1, keys, heads_kv, v, grad);     // dv
  }
  add(backward ? 2 : 1, queries, heads_q, v, out);  // o; dout
  if (backward || problem.has_feature(FLASHATTN_FEATURE_LSE)) add(1, queries, heads_q, 1, 4);
  if (backward && problem.has_feature(FLASHATTN_FEATURE_DLSE)) add(1, queries, heads_q, 1, 4);
  // The broadcasting of a bias, slopes, a block mask or a tree is not known here. The least is
  // counted: broadcast over the batch and, except for slopes, over heads.
  if (problem.has_bias(FLASHATTN_BIAS_DENSE)) {
    add(1, shape.seqlen_q, 1, shape.seqlen_kv, dtype_size(problem.dtype_bias));
  }
  if (backward && problem.has_feature(FLASHATTN_FEATURE_DBIAS)) {
    add(1, shape.seqlen_q, 1, shape.seqlen_kv, 4);
  }
  if (problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) {
    add(1, shape.batch, 1, ceil_div(shape.seqlen_kv, problem.page_size), 4);
  }
  if (problem.has_mask(FLASHATTN_MASK_BLOCKS)) {
    add(1, ceil_div(shape.seqlen_q, problem.block_q), 1,
        ceil_div(shape.seqlen_kv, problem.block_kv), 1);
  }
  if (problem.has_mask(FLASHATTN_MASK_TREE)) {
    add(1, shape.seqlen_q, 1, ceil_div(problem.tree, 32), 4);
  }
  if (problem.has_bias(FLASHATTN_BIAS_ALIBI)) add(1, 1, heads_q, 1, 4);
  if (problem.has_feature(FLASHATTN_FEATURE_SINK)) add(1, 1, heads_q, 1, 4);
  if (backward && problem.has_feature(FLASHATTN_FEATURE_DSINK)) add(1, 1, heads_q, 1, 4);
  for (const uint32_t layout : {FLASHATTN_LAYOUT_VARLEN_Q, FLASHATTN_LAYOUT_VARLEN_KV}) {
    if (problem.has_layout(layout)) add(1, plus(shape.batch, 1), 1, 1, 4);
  }
  return bytes;
}

}  // namespace

Cost operation_cost(const Problem& problem, uint32_t op, const Shape& shape) {
  const int64_t pairs = times(pairs_of_batch(problem, shape), problem.heads_q);
  const int64_t dims = static_cast<int64_t>(problem.dim_qk) + problem.dim_v;
  // Forward: 2 FLOPs for each pair and element of Q K^T and of P V. Backward: 2.5 times that.
  const int64_t flops = times(times(pairs, dims), op == FLASHATTN_OP_BACKWARD ? 5 : 2);
  return {flops, operation_bytes(problem, op, shape)};
}

}  // namespace flashattn
