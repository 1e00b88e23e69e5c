// The rows that a thread of flashattn_quantize has: where they lie, and what becomes of its
// columns.
#pragma once

#include <cfloat>
#include <cstring>

#include "core/philox.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/common/quantize.h"

namespace flashattn::cuda {

using quantize::kVector;

template <class T, bool kWhole>
__device__ __forceinline__ void load_columns(const T* from, int32_t count, float (&x)[kVector]) {
  if constexpr (kWhole) {
    load_elements(from, x);
  } else {
#pragma unroll
    for (int n = 0; n < kVector; ++n) x[n] = n < count ? to_float(from[n]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store_columns(char* to, int32_t count, bool vectors,
                                              const float (&x)[kVector]) {
  T* const out = reinterpret_cast<T*>(to);
  if (vectors) return store_elements(out, x);
#pragma unroll
  for (int n = 0; n < kVector; ++n) {
    if (n < count) store_elements(out + n, {x[n]});
  }
}

// The largest magnitude that is finite; 0: there is none.
__device__ __forceinline__ float largest_finite(const float (&x)[kVector]) {
  float most = 0;
#pragma unroll
  for (const float each : x) most = fmaxf(most, fabsf(each));
  if (most <= FLT_MAX) return most;  // NaN is passed over
  most = 0;
#pragma unroll
  for (const float each : x) most = fabsf(each) <= FLT_MAX ? fmaxf(most, fabsf(each)) : most;
  return most;
}

__device__ __forceinline__ double shuffle_xor(double x, int step) {
  uint32_t words[2];
  memcpy(words, &x, sizeof x);
  for (uint32_t& word : words) word = __shfl_xor_sync(~0u, word, step);
  memcpy(&x, words, sizeof x);
  return x;
}

// The rows of a block that a CTA has, in the order (token, head). Neighbouring lanes have a row.
struct Share {
  int64_t token;      // token of the first row, from the start of the array
  int32_t head;       // head of the first row
  int32_t rows, own;  // rows of the CTA; this thread's first one
};

// The rows of a thread, one after the other: where they lie in an array, in units of the strides.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const QuantizeOperand& x, const Share& share,
                                     int64_t stride_seq, int64_t stride_head)
      : step_(x.row_step * stride_seq + x.row_step_heads * stride_head),
        wrap_(stride_seq - x.heads * stride_head),
        heads_(x.heads),
        step_heads_(x.row_step_heads) {
    const int32_t first = share.head + share.own, tokens = first / x.heads;
    head_ = first - tokens * x.heads;
    at = (share.token + tokens) * stride_seq + head_ * stride_head;
  }

  __device__ __forceinline__ void next() {
    at += step_;
    head_ += step_heads_;
    if (head_ < heads_) return;
    head_ -= heads_;
    at += wrap_;
  }

  int64_t at;

 private:
  const int64_t step_, wrap_;
  const int32_t heads_, step_heads_;
  int32_t head_;
};

// The slots of a thread in shared memory, one after the other; the last ones are used again.
struct SlotWalk {
  uint32_t at, step, end, reused;  // bytes

  __device__ __forceinline__ void next() {
    at += step;
    if (at == end) at -= reused;
  }
};

// Transforms the columns of a thread in fp32. The bits are those of the CPU.
class Transform {
 public:
  __device__ __forceinline__ Transform(const QuantizeParams& params, const QuantizeOperand& x,
                                       int32_t b, int32_t kv_head, int32_t column)
      : rotates_((x.is_q || x.is_k) && params.args.transform & FLASHATTN_TRANSFORM_ROTATE),
        size_(x.dim & -x.dim),
        column_(column) {
    const QuantizeArgs& args = params.args;
    has_mean_ = args.k_mean.data && (x.is_k || (x.is_q && args.lse_shift));
    subtracts_ = has_mean_ && x.is_k;
    if (has_mean_) {
      const float* const mean =
          reinterpret_cast<const float*>(tensor_row(args.k_mean, 4, b, kv_head, 0));
#pragma unroll
      for (int n = 0; n < kVector; ++n) mean_[n] = column + n < x.dim ? mean[column + n] : 0.0f;
    }
    if (!rotates_) return;
    norm_ = static_cast<float>(1 / sqrt(static_cast<double>(size_)));
    const PhiloxWords bits = philox4x32_7({{static_cast<uint32_t>(column / 128), 0, 0, 0}},
                                          static_cast<uint32_t>(args.rotation_seed),
                                          static_cast<uint32_t>(args.rotation_seed >> 32));
    const uint32_t low = column & 32 ? bits.word[1] : bits.word[0];
    const uint32_t high = column & 32 ? bits.word[3] : bits.word[2];
    signs_ = (column & 64 ? high : low) >> column % 32;
  }

  // The dot product of the untransformed row with the mean of k, in all lanes of the row. is_row:
  // this lane has columns of a row.
  __device__ __forceinline__ double mean_product(const float (&x)[kVector], bool is_row,
                                                 int32_t lanes) const {
    double sum = 0;
#pragma unroll
    for (int n = 0; n < kVector; ++n) sum += is_row ? static_cast<double>(x[n]) * mean_[n] : 0.0;
    for (int32_t step = 1; step < lanes; step *= 2) sum += shuffle_xor(sum, step);
    return sum;
  }

  __device__ __forceinline__ void apply(float (&x)[kVector]) const {
    if (subtracts_) {
#pragma unroll
      for (int n = 0; n < kVector; ++n) x[n] = __fsub_rn(x[n], mean_[n]);
    }
    if (!rotates_) return;
#pragma unroll
    for (int n = 0; n < kVector; ++n) {
      const float product = __fmul_rn(x[n], norm_);
      x[n] = __uint_as_float(__float_as_uint(product) ^ (signs_ >> n) << 31);
    }
#pragma unroll
    for (int step = 1; step < kVector; step *= 2) {
      if (step >= size_) return;
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        if (n & step) continue;
        const float a = x[n], b = x[n + step];
        x[n] = a + b;
        x[n + step] = a - b;
      }
    }
    for (int32_t step = kVector; step < size_; step *= 2) {
      const bool high = column_ & step;
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        const float other = __shfl_xor_sync(~0u, x[n], step / kVector);
        x[n] = other + (high ? -x[n] : x[n]);
      }
    }
  }

 private:
  const bool rotates_;
  bool has_mean_, subtracts_;
  const int32_t size_, column_;
  float norm_ = 0;
  uint32_t signs_ = 0;  // bit n: column n is negated
  float mean_[kVector];
};

}  // namespace flashattn::cuda
