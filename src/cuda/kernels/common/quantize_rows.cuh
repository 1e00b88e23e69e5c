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

// The rows of a thread, one after the other, in the order (token, head).
struct RowWalk {
  const char* at;
  int64_t step, wrap;  // bytes: to the next row, and if its head is one of the next token
  int32_t head, heads, step_heads;

  RowWalk() = default;

  // The first row is that of `token` and `head`; strides are in bytes.
  __device__ __forceinline__ RowWalk(const QuantizeOperand& x, const char* base, int64_t token,
                                     int32_t first_head, int64_t stride_seq, int64_t stride_head)
      : at(base + token * stride_seq + first_head * stride_head),
        step(x.row_step * stride_seq + x.row_step_heads * stride_head),
        wrap(stride_seq - x.heads * stride_head),
        head(first_head),
        heads(x.heads),
        step_heads(x.row_step_heads) {}

  __device__ __forceinline__ void next() {
    at += step;
    head += step_heads;
    if (head < heads) return;
    head -= heads;
    at += wrap;
  }
};

// The slots of a thread in shared memory, one after the other; the last ones are used again.
struct SlotWalk {
  uint32_t at, step, end, reused;  // bytes

  __device__ __forceinline__ void next() {
    at += step;
    if (at == end) at -= reused;
  }
};

// The signs of ROTATE from `column` on, which is a multiple of 8: bit n is set where column + n is
// negated.
__device__ __forceinline__ uint32_t rotation_signs(const QuantizeArgs& args, int32_t column) {
  const PhiloxWords bits = philox4x32_7({{static_cast<uint32_t>(column / 128), 0, 0, 0}},
                                        static_cast<uint32_t>(args.rotation_seed),
                                        static_cast<uint32_t>(args.rotation_seed >> 32));
  const uint32_t low = column & 32 ? bits.word[1] : bits.word[0];
  const uint32_t high = column & 32 ? bits.word[3] : bits.word[2];
  return (column & 64 ? high : low) >> column % 32;
}

// x times the Hadamard matrix of kVector, or of `size` if that is smaller.
template <bool kWhole>
__device__ __forceinline__ void hadamard(float (&x)[kVector], int32_t size) {
#pragma unroll
  for (int step = 1; step < kVector; step *= 2) {
#pragma unroll
    for (int n = 0; n < kVector; ++n) {
      if (n & step || (!kWhole && step >= size)) continue;
      const float a = x[n], b = x[n + step];
      x[n] = a + b;
      x[n + step] = a - b;
    }
  }
}

// The step of a larger Hadamard matrix that adds columns of this lane and of another one.
__device__ __forceinline__ void hadamard_lanes(float (&x)[kVector], uint32_t lane) {
  const float sign = threadIdx.x & lane ? -1.0f : 1.0f;
#pragma unroll
  for (float& each : x) {
    each = fmaf(each, sign, __shfl_xor_sync(~0u, each, static_cast<int>(lane)));
  }
}

// Transforms the columns of a thread in fp32. The bits are those of the CPU.
class Transform {
 public:
  // column: the first one of the thread in q and k.
  __device__ __forceinline__ Transform(const QuantizeParams& params, int32_t column)
      : rotates_(params.args.transform & FLASHATTN_TRANSFORM_ROTATE),
        size_(params.problem.dim_qk & -params.problem.dim_qk),
        column_(column) {
    if (!rotates_) return;
    const float norm = static_cast<float>(1 / sqrt(static_cast<double>(size_)));
    const uint32_t signs = rotation_signs(params.args, column);
#pragma unroll
    for (int n = 0; n < kVector; ++n) norms_[n] = signs >> n & 1 ? -norm : norm;
  }

  // Loads the mean of k, where it is needed.
  __device__ __forceinline__ void start_block(const QuantizeArgs& args, const QuantizeOperand& x,
                                              int32_t b, int32_t kv_head) {
    subtracts_ = args.k_mean.data && x.is_k;
    if (subtracts_ || (args.lse_shift && x.is_q)) {
      load_mean(args, x, b, kv_head, column_, mean_);
    }
  }

  // The mean of k from `column` on.
  static __device__ __forceinline__ void load_mean(const QuantizeArgs& args,
                                                   const QuantizeOperand& x, int32_t b,
                                                   int32_t kv_head, int32_t column,
                                                   float (&mean)[kVector]) {
    const float* const from =
        reinterpret_cast<const float*>(tensor_row(args.k_mean, 4, b, kv_head, 0)) + column;
#pragma unroll
    for (int n = 0; n < kVector; ++n) mean[n] = column + n < x.dim ? from[n] : 0.0f;
  }

  // start_block() with the mean of k in shared memory; table: 0 if it is not needed.
  __device__ __forceinline__ void use_mean(uint32_t table, bool subtracts) {
    subtracts_ = table && subtracts;
    if (!table) return;
    float half[4];
#pragma unroll
    for (int n = 0; n < kVector; ++n) {
      if (n % 4 == 0) ptx::load_shared(half, table + (column_ + n) * 4);
      mean_[n] = half[n % 4];
    }
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

  // Transforms rows of q and k. kWhole: dim is a multiple of kVector.
  template <bool kWhole, int kRows>
  __device__ __forceinline__ void apply(float (&x)[kRows][kVector]) const {
    if (subtracts_) {
#pragma unroll
      for (auto& row : x) {
#pragma unroll
        for (int n = 0; n < kVector; ++n) row[n] = __fsub_rn(row[n], mean_[n]);
      }
    }
    if (!rotates_) return;
#pragma unroll
    for (auto& row : x) {
#pragma unroll
      for (int n = 0; n < kVector; ++n) row[n] = __fmul_rn(row[n], norms_[n]);
      hadamard<kWhole>(row, size_);
    }
    const uint32_t lanes = static_cast<uint32_t>(size_) / kVector;
#pragma unroll 1
    for (uint32_t lane = 1; lane < lanes; lane *= 2) {
#pragma unroll
      for (auto& row : x) hadamard_lanes(row, lane);
    }
  }

 private:
  const bool rotates_;
  bool subtracts_ = false;
  const int32_t size_, column_;
  float norms_[kVector];  // 1 / sqrt(size_), negated where ROTATE negates a column
  float mean_[kVector];
};

}  // namespace flashattn::cuda
