// Score modifications of one head of one sequence, resolved once here and applied by the CPU
// backend and by every GPU kernel.
#pragma once

#include "core/block_mask_rows.h"

namespace flashattn {

// A score s is kept as s * log2(e), so that 2^x serves for e^x.
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// Near FLT_MAX s * log2(e) overflows. Code for scores of any size therefore keeps a score as s *
// log2(e) / kWideUnit, which is finite for every finite score and bias.
constexpr float kWideUnit = 4.0f;

// 2^(product * factor - m) as one fused operation includes the rounding error of m, a factor common
// to the row. Up to this |m|, in units of log2(e), a 16-bit type rounds the factor to 1. Beyond it
// scores are rounded before m is subtracted, so that the largest element of P is exactly 1.
constexpr float kLargeScore = 0x1p9f;

// Up to this |m| the common factor of kLargeScore is near 1: enough for kernels that redo tiles
// beyond it.
constexpr float kRedoScore = 0x1p20f;

// Below this |lse| the rounding of lse and of lse * log2(e) changes P by less than 2^-13 of itself,
// a quarter of a rounding to fp16. From it on the backward pass recomputes what an fp32 lse no
// longer holds: the row's largest score, and the sum of P relative to it.
constexpr float kLargeLse = 1024;

// If the recomputed lse differs from the given one by at most this fraction, the recomputed one is
// used: another order of summation changes scores by as much. A larger difference means that lse
// counts keys that this call does not see, as in ring attention.
constexpr float kLseParts = 0x1p-21f;

// Score modifications of a problem as bits: all that it asks for beyond a positive scale and masks
// by position. Code that chooses among kernels names the bits that a kernel computes, so that a bit
// added here later is never ignored.
constexpr uint32_t kModSoftcap = 1, kModDropout = 2, kModNegativeScale = 4, kModBlockMask = 8,
                   kModKeyBits = 16;  // kKeyBitMasks
// The bits of flashattn_desc::bias, future ones too, lie from bit 8 on.
constexpr uint32_t kModAlibi = FLASHATTN_BIAS_ALIBI << 8, kModDenseBias = FLASHATTN_BIAS_DENSE << 8;

FLASHATTN_HD uint32_t modifications(const Problem& problem) {
  return (problem.softcap != 0 ? kModSoftcap : 0) | (problem.dropout != 0 ? kModDropout : 0) |
         (problem.scale < 0 ? kModNegativeScale : 0) |
         (problem.mask & FLASHATTN_MASK_BLOCKS ? kModBlockMask : 0) |
         (problem.mask & kKeyBitMasks ? kModKeyBits : 0) | problem.bias << 8;
}

// The unit in which the CPU backend keeps scores.
struct ScoreUnit {
  float log2;   // 2^(x * log2) is e^s, x being the score s as it is kept
  double nats;  // x * nats is s, the score of the specification
};

// Modified scores are kept as s * log2(e) / 4: every score up to FLT_MAX, and the difference of any
// two, is finite.
constexpr ScoreUnit kModifiedUnit = {kWideUnit, kWideUnit * 0.693147180559945309};

// The modifications of the scores of one head of one sequence.
struct ScoreMod {
  float scale;
  float softcap;     // 0: off
  float slope;       // ALiBi slope; 0: off
  int32_t offset;    // `off` of the specification
  const char* bias;  // row of query 0; NULL: none
  int64_t bias_row;  // elements from query to query
  int32_t dtype_bias;
  const uint8_t* blocks;  // row of query 0 in the block mask; NULL: none
  int64_t blocks_row;
  int32_t block_q, block_kv;
  const int32_t* block_lens;  // keys of each block that count; NULL: all

  // Whether scores need more than a positive factor.
  FLASHATTN_HD bool modified() const { return softcap != 0 || slope != 0 || bias || scale < 0; }

  // Unmodified scores are kept as products of q and k.
  FLASHATTN_HD ScoreUnit unit() const {
    return modified() ? kModifiedUnit : ScoreUnit{scale * kLog2E, scale};
  }
};

FLASHATTN_HD ScoreMod score_mod(const Problem& problem, const Inputs& in, int32_t b, int32_t h,
                                Lengths len) {
  ScoreMod mods{};
  mods.scale = problem.scale;
  mods.softcap = problem.softcap;
  mods.offset = diagonal_offset(problem.mask_rule(), len);
  if (problem.bias & FLASHATTN_BIAS_ALIBI) {
    mods.slope = in.alibi_slopes[b * in.alibi_stride_batch + h * in.alibi_stride_head];
  }
  if (problem.bias & FLASHATTN_BIAS_DENSE) {
    const int64_t size = dtype_size(problem.dtype_bias);
    mods.bias = static_cast<const char*>(in.bias) +
                (b * in.bias_stride_batch + h * in.bias_stride_head) * size;
    mods.bias_row = in.bias_stride_row;
    mods.dtype_bias = problem.dtype_bias;
  }
  if (problem.mask & FLASHATTN_MASK_BLOCKS) {
    mods.blocks = in.block_mask + b * in.block_mask_stride_batch + h * in.block_mask_stride_head;
    mods.blocks_row = in.block_mask_stride_row;
    mods.block_q = problem.block_q;
    mods.block_kv = problem.block_kv;
    if (problem.mask & FLASHATTN_MASK_BLOCK_LENS) {
      mods.block_lens = block_lens_of(mods.blocks, mods.blocks_row);
    }
  }
  return mods;
}

// The sink of a query head; -infinity if there is none.
FLASHATTN_HD float sink_of(const Problem& problem, const Inputs& in, int32_t h) {
  return problem.features & FLASHATTN_FEATURE_SINK ? in.sink[h] : -__builtin_inff();
}

}  // namespace flashattn
