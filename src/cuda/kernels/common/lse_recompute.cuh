// The softmax of rows whose LSE is too large to hold the sum of their weights in fp32: recomputed
// before the backward pass, from scores that are summed as that pass sums them.
#pragma once

#include <type_traits>

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/mma_3xtf32.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// 16 keys and 8 queries of one head. A warp calls everything here.
template <class T>
class LseRecompute {
  static constexpr int kSize = sizeof(T);

 public:
  __device__ __forceinline__ LseRecompute(const BackwardParams& params, const SeqlenInfo& sequence,
                                          int32_t b, int32_t h)
      : params_(params), sequence_(sequence), b_(b), h_(h) {}

  // Writes base and lse2 of those rows [first, first + 32) whose bit of `far` is set, after their
  // store_lse_delta(). lse: that of row `first` + lane.
  __device__ __forceinline__ void run(int32_t first, uint32_t far, float lse) const {
    if (far == 0) return;
    __syncwarp();  // the rows' numbers are other lanes'
    if (lane() == 0) ptx::store_relaxed(params_.large_lse, params_.large_lse_stamp);
    const int64_t lse_delta_offset = params_.lse_delta_offset(sequence_, b_, h_);
#pragma unroll 1
    for (int32_t n = 0; n < 32; n += 8) {
      if (!(far >> n & 0xff)) continue;
      float top[2], sum[2];
      weigh(first + n, top, sum);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t row = n + lane() % 4 * 2 + e;
        const float own = __shfl_sync(~0u, lse, row);
        if (lane() < 4 && (far >> row & 1)) {
          put(lse_delta_offset + first + row, own, top[e], sum[e]);
        }
      }
    }
  }

 private:
  // What differences of scores are multiplied with: to units of log2(e).
  __device__ __forceinline__ float unit() const {
    return params_.wide_scores ? kWideUnit : params_.problem.scale * kLog2E;
  }

  // Maxima and sums of weights of queries i + 2 (lane % 4) + e. With a negative unit: minima.
  __device__ __forceinline__ void weigh(int32_t i, float (&top)[2], float (&sum)[2]) const {
    const Problem& problem = params_.problem;
    const MaskRule rule = problem.mask_rule();
    const Lengths len = sequence_.len;
    const float sign = unit() < 0.0f ? -1.0f : 1.0f, unit = fabsf(this->unit());
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    const Interval keys = key_span(rule, {i, min(i + 8, len.q)}, len).any;
#pragma unroll 1
    for (int32_t j = keys.begin / 16 * 16; j < keys.end; j += 16) {
      float s[4] = {};
      multiply(s, j, i);
      // One by one, in few registers: (key, query), (key, query + 1), the same of key + 8.
#pragma unroll 1
      for (int x = 0; x < 4; ++x) {
        const int32_t key = j + lane() / 4 + x / 2 * 8, query = i + lane() % 4 * 2 + x % 2;
        const float product = s[0];
        s[0] = s[1], s[1] = s[2], s[2] = s[3];
        float score = -INFINITY;
        if (query < len.q) {
          const Interval visible = visible_keys(rule, query, len);
          if (key >= visible.begin && key < visible.end) {
            score = sign * modified(product, query, key);
          }
        }
        add(score, 1.0f, unit, top[0], sum[0]);
        const float other_top = top[1], other_sum = sum[1];
        top[1] = top[0], sum[1] = sum[0];
        top[0] = other_top, sum[0] = other_sum;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float score = __shfl_xor_sync(~0u, top[e], step);
        add(score, __shfl_xor_sync(~0u, sum[e], step), unit, top[e], sum[e]);
      }
      if (problem.features & FLASHATTN_FEATURE_SINK) {
        const float sink = params_.args.inputs.sink[h_] * (kLog2E / kWideUnit);
        const float base = top[e] * (unit / kWideUnit);
        if (top[e] != -INFINITY) sum[e] += ptx::exp2((sink - base) * kWideUnit);
      }
      top[e] *= sign;
    }
  }

  // Takes `weight` at a score into a maximum and the sum of weights beside it.
  static __device__ __forceinline__ void add(float score, float weight, float unit, float& top,
                                             float& sum) {
    if (score == -INFINITY) return;
    const float before = top;
    top = fmaxf(top, score);
    if (before != -INFINITY) sum *= ptx::exp2((before - top) * unit);
    sum += weight * ptx::exp2((score - top) * unit);
  }

  // An lse of all of these keys, as far as fp32 tells, is replaced by what they add up to. That of
  // a larger attention stands: these are a part of its keys.
  __device__ __forceinline__ void put(int64_t number, float lse, float top, float sum) const {
    if (sum == 0.0f) {  // only the sink, and no key to weigh
      params_.lse2[number] = INFINITY;
      return;
    }
    const float base = top * (unit() / kWideUnit), own = lse * (kLog2E / kWideUnit);
    const float exponent = log2f(sum), beyond = own - (base + exponent / kWideUnit);
    const bool whole = fabsf(beyond) <= fabsf(own) * kLseParts;
    params_.softmax_base[number] = top;
    params_.lse2[number] = whole ? exponent : (own - base) * kWideUnit;
  }

  // A product to a score.
  __device__ __forceinline__ float modified(float s, int32_t query, int32_t key) const {
    const Problem& problem = params_.problem;
    const Inputs& in = params_.args.inputs;
    const int32_t b = no_hoist(b_), h = no_hoist(h_);  // found anew: registers are scarce
    const BlockMask blocks = BlockMask::of(problem, in, b, h);
    if (blocks.on && !blocks.on[query / blocks.block_q * blocks.row + key / blocks.block_kv]) {
      return -INFINITY;
    }
    if (!params_.wide_scores) return s;
    const ScoreSteps steps(problem);
    if (steps.capped) s = tanhf(s * steps.inner);
    s = __fmul_rn(s, steps.wide);
    if (problem.bias & FLASHATTN_BIAS_ALIBI) {
      const int32_t off = diagonal_offset(problem.mask_rule(), sequence_.len);
      s = fmaf(-slope_of(problem, in, b, h) * (kLog2E / kWideUnit),
               fabsf(static_cast<float>(query + off - key)), s);
    }
    if (!(problem.bias & FLASHATTN_BIAS_DENSE)) return s;
    const HeadBias bias = HeadBias::of(problem, in, b, h);
    const int64_t at = query * bias.row + key;
    float y = 0.0f;
    switch (bias.dtype) {
      case FLASHATTN_DTYPE_F32: y = reinterpret_cast<const float*>(bias.at)[at]; break;
      case FLASHATTN_DTYPE_F16: y = to_float(reinterpret_cast<const __half*>(bias.at)[at]); break;
      case FLASHATTN_DTYPE_BF16:
        y = to_float(reinterpret_cast<const __nv_bfloat16*>(bias.at)[at]);
        break;
      default: return bias.at[at] ? s : -INFINITY;
    }
    return fmaf(y, kLog2E / kWideUnit, s);
  }

  // s = K Q^T of keys [j, j + 16) and queries [i, i + 8), in steps of 16 elements, as the backward
  // kernels sum.
  __device__ __forceinline__ void multiply(float (&s)[4], int32_t j, int32_t i) const {
    const int32_t dim = params_.problem.dim_qk, row = lane() / 4;
    const int32_t b = no_hoist(b_), h = no_hoist(h_);
    const Rows q = head_rows<kSize>(params_.args.inputs.q, b, h, sequence_.offset_q);
    const Rows k = head_rows<kSize>(params_.args.inputs.k, b, h / params_.q_heads_per_kv_head,
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
        Fp32Left a;
        Tf32Pair b[2][2];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t column = c + step * 8 + half * 4 + lane() % 4;
            a.set(step, 2 * half, split_fp32(word(keys[0], column, dim)));
            a.set(step, 2 * half + 1, split_fp32(word(keys[1], column, dim)));
            b[step][half] = split_fp32(word(queries, column, dim));
          }
        }
        multiply_fp32(s, a, b);
      }
    }
  }

  static __device__ __forceinline__ int32_t lane() { return no_hoist(threadIdx.x) % 32; }

  // NULL: past the last.
  static __device__ __forceinline__ const char* at(const Rows& rows, int32_t n, int32_t count) {
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
