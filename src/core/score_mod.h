// What happens to scores before the softmax, for one head of one sequence: resolved once here,
// applied by the CPU backend and by every kernel in its own way.
#pragma once

#include "core/problem.h"

namespace flashattn {

// Scores are kept in units of log2(e), so that 2^x serves for e^x.
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// log2(e) takes scores near FLT_MAX past it. Where scores may be of any size they are kept in
// quarters: in units of kWideUnit log2(e), in which every finite score and bias is finite.
constexpr float kWideUnit = 4.0f;

// 2^(s - m) with s = product * factor as one fused operation keeps what rounding took from m: a
// factor common to the row. Up to this |m|, in units of log2(e), 16 bits round it to 1; beyond,
// scores are rounded before m is subtracted, so that the largest weight is exactly 1.
constexpr float kFarScore = 0x1p9f;

// Up to this |m| it is near 1: enough for kernels that do over what lies beyond.
constexpr float kFartherScore = 0x1p20f;

// Below this |lse| the rounding of lse and of its product with log2(e) changes a weight by less
// than 2^-13, a quarter of a rounding to fp16. From it on the backward pass recomputes what an fp32
// lse no longer holds: the row's largest score and, beside it, the sum of its weights.
constexpr float kFarLse = 1024;

// The part of such an lse within which those two say what it is: scores of another order of
// summation differ by as much. An lse further away counts keys that the call does not see, as where
// a ring of devices shares them.
constexpr float kLseParts = 0x1p-21f;

// What a score is a multiple of, as the CPU backend keeps it.
struct ScoreUnit {
  float log2;   // 2^(score * log2) is e^score
  double nats;  // score * nats is the score of the specification
};

// Scores that are more than a product times a factor: with log2(e) / 4 for e every score up to
// FLT_MAX, and the difference of any two, is finite.
constexpr ScoreUnit kModifiedUnit = {kWideUnit, kWideUnit * 0.693147180559945309};

// What is added to, multiplied with or hidden from the scores of one head of one sequence.
struct ScoreMod {
  float scale;
  float softcap;     // 0: off
  float slope;       // of ALiBi; 0: off
  int32_t offset;    // off of the specification
  const char* bias;  // of query 0; NULL: none
  int64_t bias_row;  // elements
  int32_t dtype_bias;
  const uint8_t* blocks;  // of query 0; NULL: none
  int64_t blocks_row;
  int32_t block_q, block_kv;

  // Whether the scores need more than a factor.
  FLASHATTN_HD bool modified() const { return softcap != 0 || slope != 0 || bias || scale < 0; }

  // Products are scores as they are where these are not modified.
  FLASHATTN_HD ScoreUnit unit() const {
    return modified() ? kModifiedUnit : ScoreUnit{scale * kLog2E, scale};
  }
};

FLASHATTN_HD ScoreMod score_mod(const Problem& problem, const Inputs& in, int32_t b, int32_t h,
                                Lengths len) {
  ScoreMod rules{};
  rules.scale = problem.scale;
  rules.softcap = problem.softcap;
  rules.offset = diagonal_offset(problem.mask_rule(), len);
  if (problem.bias & FLASHATTN_BIAS_ALIBI) {
    rules.slope = in.alibi_slopes[b * in.alibi_stride_batch + h * in.alibi_stride_head];
  }
  if (problem.bias & FLASHATTN_BIAS_DENSE) {
    const int64_t size = dtype_size(problem.dtype_bias);
    rules.bias = static_cast<const char*>(in.bias) +
                 (b * in.bias_stride_batch + h * in.bias_stride_head) * size;
    rules.bias_row = in.bias_stride_row;
    rules.dtype_bias = problem.dtype_bias;
  }
  if (problem.mask & FLASHATTN_MASK_BLOCKS) {
    rules.blocks = in.block_mask + b * in.block_mask_stride_batch + h * in.block_mask_stride_head;
    rules.blocks_row = in.block_mask_stride_row;
    rules.block_q = problem.block_q;
    rules.block_kv = problem.block_kv;
  }
  return rules;
}

// The sink of a query head; -infinity: there is none.
FLASHATTN_HD float sink_of(const Problem& problem, const Inputs& in, int32_t h) {
  return problem.features & FLASHATTN_FEATURE_SINK ? in.sink[h] : -__builtin_inff();
}

}  // namespace flashattn
