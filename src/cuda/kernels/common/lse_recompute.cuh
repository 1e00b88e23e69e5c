// Recomputes the softmax statistics of rows whose lse is too large to hold the sum of their weights
// in fp32. Runs before the backward pass, and sums scores in the same order.
#pragma once

#include <type_traits>

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/mma_3xtf32.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// Works on 16 keys and 8 queries of one head at a time. All lanes of a warp call its functions.
template <class T>
class LseRecompute {
  static constexpr int kSize = sizeof(T);

 public:
  __device__ __forceinline__ LseRecompute(const BackwardParams& params, const SeqlenInfo& sequence,
                                          int32_t b, int32_t h)
      : params_(params), sequence_(sequence), b_(b), h_(h) {}

  // Stores base and lse2 of the rows of [first, first + 32) whose bit in `large` is set, after
  // their store_lse_delta(). lse: of row `first` + lane.
  __device__ __forceinline__ void run(int32_t first, uint32_t large, float lse) const {
    if (large == 0) return;
    __syncwarp();  // other lanes have stored the rows' statistics
    if (lane() == 0) ptx::store_relaxed(params_.large_lse, params_.large_lse_stamp);
    const int64_t lse_delta_offset = params_.lse_delta_offset(sequence_, b_, h_);
#pragma unroll 1
    for (int32_t n = 0; n < 32; n += 8) {
      if (!(large >> n & 0xff)) continue;
      float row_max[2], sum[2];
      row_max_and_sum(first + n, row_max, sum);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t row = n + lane() % 4 * 2 + e;
        const float own = __shfl_sync(~0u, lse, row);
        if (lane() < 4 && (large >> row & 1)) {
          store(lse_delta_offset + first + row, own, row_max[e], sum[e]);
        }
      }
    }
  }

 private:
  // Converts differences of scores to units of log2(e).
  __device__ __forceinline__ float unit() const {
    return params_.wide_scores ? kWideUnit : params_.problem.scale * kLog2E;
  }

  // The maximum score and sum of weights of query i + 2 (lane % 4) + e. With a negative unit: the
  // minimum.
  __device__ __forceinline__ void row_max_and_sum(int32_t i, float (&row_max)[2],
                                                  float (&sum)[2]) const {
    const Problem& problem = params_.problem;
    const MaskRule rule = problem.mask_rule();
    const Lengths len = sequence_.len;
    const float sign = unit() < 0.0f ? -1.0f : 1.0f, unit = fabsf(this->unit());
    row_max[0] = row_max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    const Interval keys = key_span(rule, {i, min(i + 8, len.q)}, len).any;
#pragma unroll 1
    for (int32_t j = keys.begin / 16 * 16; j < keys.end; j += 16) {
      float s[4] = {};
      compute_s(s, j, i);
      // One score at a time, to save registers: (key, query), (key, query + 1), then both of key
      // + 8.
#pragma unroll 1
      for (int x = 0; x < 4; ++x) {
        const int32_t key = j + lane() / 4 + x / 2 * 8, query = i + lane() % 4 * 2 + x % 2;
        const float product = s[0];
        s[0] = s[1], s[1] = s[2], s[2] = s[3];
        float score = -INFINITY;
        if (query < len.q) {
          const Interval visible = visible_keys(rule, query, len);
          if (key >= visible.begin && key < visible.end) {
            score = sign * apply_score_mod(product, query, key);
          }
        }
        accumulate(score, 1.0f, unit, row_max[0], sum[0]);
        const float other_max = row_max[1], other_sum = sum[1];
        row_max[1] = row_max[0], sum[1] = sum[0];
        row_max[0] = other_max, sum[0] = other_sum;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float score = __shfl_xor_sync(~0u, row_max[e], step);
        accumulate(score, __shfl_xor_sync(~0u, sum[e], step), unit, row_max[e], sum[e]);
      }
      if (problem.features & FLASHATTN_FEATURE_SINK) {
        const float sink = params_.args.inputs.sink[h_] * (kLog2E / kWideUnit);
        const float base = row_max[e] * (unit / kWideUnit);
        if (row_max[e] != -INFINITY) sum[e] += ptx::exp2((sink - base) * kWideUnit);
      }
      row_max[e] *= sign;
    }
  }

  // Adds `weight` at `score` to an online softmax.
  static __device__ __forceinline__ void accumulate(float score, float weight, float unit,
                                                    float& row_max, float& sum) {
    if (score == -INFINITY) return;
    const float old_max = row_max;
    row_max = fmaxf(row_max, score);
    if (old_max != -INFINITY) sum *= ptx::exp2((old_max - row_max) * unit);
    sum += weight * ptx::exp2((score - row_max) * unit);
  }

  // If the given lse is that of all keys seen here, as far as fp32 tells, the recomputed sum
  // replaces it. Otherwise it counts further keys, as when devices share them, and is kept,
  // relative to the new base.
  __device__ __forceinline__ void store(int64_t index, float lse, float row_max, float sum) const {
    if (sum == 0.0f) {  // only the sink has weight
      params_.lse2[index] = INFINITY;
      return;
    }
    const float base = row_max * (unit() / kWideUnit), own = lse * (kLog2E / kWideUnit);
    const float exponent = log2f(sum), excess = own - (base + exponent / kWideUnit);
    const bool all_keys = fabsf(excess) <= fabsf(own) * kLseParts;
    params_.softmax_base[index] = row_max;
    params_.lse2[index] = (all_keys ? exponent : (own - base) * kWideUnit) - kPExponent<T>;
  }

  // Turns a product of q and k into a score.
  __device__ __forceinline__ float apply_score_mod(float s, int32_t query, int32_t key) const {
    const Problem& problem = params_.problem;
    const Inputs& in = params_.args.inputs;
    const int32_t b = no_hoist(b_), h = no_hoist(h_);  // recomputed, as registers are scarce
    if (!BlockMask::of(problem, in, b, h).shows(query, key)) return -INFINITY;
    if (!params_.wide_scores) return s;
    const WideMembers<true> members{problem, in, b, h, sequence_.len, query, key, query + 1};
    float score[1] = {s};
    RuntimeScoreMod::forward_stage<ScoreStage::kProduct>(SingleLayout(), score, 1.0f, problem,
                                                         members);
    score[0] = __fmul_rn(score[0], members.product_factor(problem));
    RuntimeScoreMod::add_biases(SingleLayout(), score, problem, members);
    return score[0];
  }

  // s = K Q^T of keys [j, j + 16) and queries [i, i + 8), in k16 steps like the backward kernels.
  __device__ __forceinline__ void compute_s(float (&s)[4], int32_t j, int32_t i) const {
    const int32_t dim = params_.problem.dim_qk, row = lane() / 4;
    const int32_t b = no_hoist(b_), h = no_hoist(h_);
    const RowView q = head_rows<kSize>(params_.args.inputs.q, b, h, sequence_.offset_q);
    const RowView k = head_rows<kSize>(params_.args.inputs.k, b, h / params_.q_heads_per_kv_head,
                                       sequence_.offset_kv);
    const char* const keys[2] = {at(k, j + row, sequence_.len.kv),
                                 at(k, j + row + 8, sequence_.len.kv)};
    const char* const queries = at(q, i + row, sequence_.len.q);
#pragma unroll 1
    for (int32_t c = 0; c < dim; c += 16) {
      if constexpr (kSize == 2) {
        const int32_t column = c + lane() % 4 * 2;
        const uint32_t a[4] = {word(keys[0], column, dim), word(keys[1], column, dim),
                               word(keys[0], column + 8, dim), word(keys[1], column + 8, dim)};
        ptx::mma_16x8x16<T>(s, a, word(queries, column, dim), word(queries, column + 8, dim));
      } else {
        Tf32PairA a;
        Tf32Pair b[2][2];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t column = c + step * 8 + half * 4 + lane() % 4;
            a.set(step, 2 * half, split_tf32(word(keys[0], column, dim)));
            a.set(step, 2 * half + 1, split_tf32(word(keys[1], column, dim)));
            b[step][half] = split_tf32(word(queries, column, dim));
          }
        }
        mma_3xtf32(s, a, b);
      }
    }
  }

  static __device__ __forceinline__ int32_t lane() { return no_hoist(threadIdx.x) % 32; }

  // NULL if the row does not exist.
  static __device__ __forceinline__ const char* at(const RowView& rows, int32_t n, int32_t count) {
    return n < count ? rows.base + n * rows.row_bytes : nullptr;
  }
  static __device__ __forceinline__ uint32_t word(const char* row, int32_t column, int32_t dim) {
    if (!row || column >= dim) return 0;
    return *reinterpret_cast<const uint32_t*>(row + column * kSize);
  }

  const BackwardParams& params_;
  const SeqlenInfo& sequence_;
  const int32_t b_, h_;
};

}  // namespace flashattn::cuda
