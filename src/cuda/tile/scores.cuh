// What happens to scores between the two products, on the accumulators of mma.sync: scale, softcap,
// ALiBi, dense bias, masks, dropout. Scores are in units of log2(e).
#pragma once

#include "core/philox.h"
#include "core/score_rules.h"
#include "cuda/params.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// A score plus its bias; a boolean mask hides, whatever the score was.
__device__ __forceinline__ float add_bias(const ScoreRules& rules, float x, int32_t i, int32_t j) {
  const int64_t at = i * rules.bias_row + j;
  switch (rules.bias_dtype) {
    case FLASHATTN_DTYPE_F32: return x + reinterpret_cast<const float*>(rules.bias)[at];
    case FLASHATTN_DTYPE_F16:
      return x + __half2float(reinterpret_cast<const __half*>(rules.bias)[at]);
    case FLASHATTN_DTYPE_BF16:
      return x + __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(rules.bias)[at]);
    default: return rules.bias[at] ? x : -INFINITY;
  }
}

// tanh as 1 - 2 / (e^2x + 1), and near 0, where that loses digits, by its series.
__device__ __forceinline__ float soft_tanh(float x) {
  const float square = x * x;
  const float large = 1.0f - 2.0f * ptx::reciprocal(ptx::exp2(x * (2.0f * kLog2E)) + 1.0f);
  const float small =
      x -
      x * square *
          (0.33333333f - square * (0.13333333f - square * (0.053968254f - square * 0.021869489f)));
  return fabsf(x) < 0.25f ? small : large;
}

// The score of a product, before masks, and the derivative of the softcap there.
struct Score {
  float value, derivative;
};

// kExact: tanh to the last digits of fp32.
template <bool kExact = false>
__device__ __forceinline__ Score modified_score(const ScoreRules& rules, float product, int32_t i,
                                                int32_t j, bool inside) {
  Score s{product * rules.scale, 1.0f};
  if (rules.softcap != 0) {
    const float x = s.value / rules.softcap, t = kExact ? tanhf(x) : soft_tanh(x);
    s = {t * rules.softcap, 1.0f - t * t};
  }
  s.value -= rules.slope * fabsf(static_cast<float>(i + static_cast<int64_t>(rules.offset) - j));
  if (rules.bias && inside) s.value = add_bias(rules, s.value, i, j);
  s.value *= kLog2E;
  return s;
}

__device__ __forceinline__ bool block_visible(const ScoreRules& rules, int32_t i, int32_t j) {
  return !rules.blocks || rules.blocks[i / rules.block_q * rules.blocks_row + j / rules.block_kv];
}

// How the block mask stands to a tile.
__device__ __forceinline__ TileKind block_kind(const ScoreRules& rules, Interval queries,
                                               Interval keys) {
  if (!rules.blocks) return TileKind::kFull;
  bool any = false, all = true;
  for (int32_t y = queries.begin / rules.block_q; y <= (queries.end - 1) / rules.block_q; ++y) {
    for (int32_t x = keys.begin / rules.block_kv; x <= (keys.end - 1) / rules.block_kv; ++x) {
      const bool on = rules.blocks[y * rules.blocks_row + x] != 0;
      any |= on;
      all &= on;
    }
  }
  return all ? TileKind::kFull : any ? TileKind::kPartial : TileKind::kEmpty;
}

// Which of a lane's eight weights of a 16 x 16 tile of accumulators are kept: bit (column half) * 4
// + (row half) * 2 + (odd column). i and j are multiples of 16.
__device__ __forceinline__ uint32_t keep_bits(const DropoutStream& stream, uint32_t threshold,
                                              int32_t i, int32_t j, int32_t lane) {
  const PhiloxWords words =
      philox4x32_10({{static_cast<uint32_t>(j) >> 4 << 5 | static_cast<uint32_t>(lane),
                      static_cast<uint32_t>(i) >> 4, stream.head, stream.offset}},
                    stream.key0, stream.key1);
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    bits |= ((words.word[w] & 0xffffu) >= threshold ? 1u : 0u) << (2 * w);
    bits |= ((words.word[w] >> 16) >= threshold ? 1u : 0u) << (2 * w + 1);
  }
  return bits;
}

// The same where rows of the accumulators are keys and columns queries: bit (row half) * 4 +
// (column half) * 2 + (odd column). All lanes of the warp call it.
__device__ __forceinline__ uint32_t keep_bits_transposed(const DropoutStream& stream,
                                                         uint32_t threshold, int32_t i, int32_t j,
                                                         int32_t lane) {
  const uint32_t bits = keep_bits(stream, threshold, i, j, lane);
  // Queries 2c and 2c + 1 are with two lanes, both halves of both indices with each.
  const int32_t from = lane % 4 * 8 + lane / 8, odd = lane / 4 % 2;
  const uint32_t even_query = __shfl_sync(~0u, bits, from) >> odd & 0x55u;
  const uint32_t odd_query = __shfl_sync(~0u, bits, from + 4) >> odd & 0x55u;
  return even_query | odd_query << 1;
}

__device__ __forceinline__ DropoutStream dropout_stream(const Problem& problem,
                                                        const flashattn_inputs& in, int32_t b,
                                                        int32_t h) {
  const uint64_t* device = in.rng_device;
  return DropoutStream::make(in.rng_seed + (device ? device[0] : 0),
                             in.rng_offset + (device ? device[1] : 0),
                             static_cast<uint32_t>(b * problem.heads_q + h));
}

}  // namespace flashattn::cuda
