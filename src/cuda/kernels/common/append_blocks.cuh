// New tokens of K and V into a cache of E4M3 in which a block of tokens of a head has a descale:
// the kernel makes the descales, too.
#pragma once

#include <cfloat>

#include "core/descale.h"
#include "cuda/kernels/common/append_vec.cuh"

namespace flashattn::cuda {

// Appends to blocks of tokens of sequence b, all warps of a CTA to the same block, each to a head
// of its own.
template <class T, int kPairs>
struct BlockAppender {
  const AppendParams& params;
  const AppendRows& to;
  AngleRows<kPairs> angles;
  int32_t b, angles_begin;  // angles_begin: cache row whose angles come first; -1: none are there

  // Makes the angles of the new tokens in cache rows [begin, end). CTA-wide.
  __device__ __forceinline__ void make_angles(int32_t begin, int32_t end) {
    if (params.pairs == 0 || angles_begin == begin) return;
    __syncthreads();  // all threads have read the angles
#pragma unroll 1
    for (int32_t n = threadIdx.x; n < (end - begin) * params.pairs; n += blockDim.x) {
      const int32_t row = params.by_pairs.quotient(n), pair = n - row * params.pairs;
      const int64_t position =
          rotary_position(params.args, to.position, begin + row - to.sequence.len.kv);
      angles.set(row, pair, angle_of(params.args, position, pair));
    }
    __syncthreads();
    angles_begin = begin;
  }

  // Calls body(row, at) for a warp's share of the vecs of rows [0, rows).
  template <class Body>
  static __device__ __forceinline__ void for_each_vec(const AppendOperand& operand, int32_t rows,
                                                      Body body) {
#pragma unroll 1
    for (int32_t n = threadIdx.x % 32; n < rows * operand.by_vecs.divisor; n += 32) {
      const int32_t row = operand.by_vecs.quotient(n);
      body(row, VecPlace<kPairs>(operand, (n - row * operand.by_vecs.divisor) * kPairs));
    }
  }

  // Appends the new tokens of block n of a head. The warp makes the descale, rescales the tokens
  // that the block holds if the descale grows, and stores the new ones.
  __device__ __forceinline__ void append(int32_t n, int32_t h, bool is_k, bool is_used) {
    const AppendOperand& operand = params.operands[is_k ? 1 : 2];
    const int32_t before = to.sequence.len.kv, block = params.problem.descale_block;
    const int32_t first = n * block, first_new = max(first, before);
    const int32_t last = first + min(block, before + to.stored - first);
    const bool held = first < before;
    const auto cache_row = [&](int32_t j) {
      const CacheIndex at = cache_index(params, to.sequence, b, j);
      return tensor_row(operand.to, 1, at.entry, h, at.row);
    };
    float* const descale = reinterpret_cast<float*>(tensor_row(operand.descale, 4, b, h, n));
    const float old = is_used && held ? *descale : 0.0f;
    const int32_t step = kAppendBlockAngles / max(params.pairs, 1);
    const auto for_new_vecs = [&](auto body) {
#pragma unroll 1
      for (int32_t begin = first_new; begin < last; begin += step) {
        const int32_t rows = min(step, last - begin);
        make_angles(begin, begin + rows);
        if (!is_used) continue;
        for_each_vec(operand, rows, [&](int32_t row, const VecPlace<kPairs>& at) {
          RawVec<T, kPairs> raw;
          raw.load(at, tensor_row(operand.from, sizeof(T), b, h,
                                  to.sequence.offset_q + begin + row - before));
          Vec<kPairs> vec(raw);
          if (at.rotates) {
            vec.rotate(angles.interleaved, [&](int half) { return angles.of(row, at.c, half); });
          }
          body(begin + row, at, vec);
        });
      }
    };
    float most = 0;
    for_new_vecs([&](int32_t, const VecPlace<kPairs>& at, const Vec<kPairs>& vec) {
#pragma unroll
      for (int m = 0; m < kPairs; ++m) {
        // Neither an infinity nor a NaN counts.
        if (fabsf(vec.x[m]) <= FLT_MAX) most = fmaxf(most, fabsf(vec.x[m]));
        if (at.has_second && fabsf(vec.y[m]) <= FLT_MAX) most = fmaxf(most, fabsf(vec.y[m]));
      }
    });
#pragma unroll
    for (int shift = 16; shift > 0; shift /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, shift));
    }

    const float made = updated_descale(most, ptx::kMaxE4m3, block, held, old);
    const float factor = 1.0f / made, factor_of_old = old / made;
    if (is_used && held && made != old) {
      for_each_vec(operand, before - first, [&](int32_t row, const VecPlace<kPairs>& at) {
        char* const held_row = cache_row(first + row);
        RawVec<ptx::E4m3, kPairs> raw;
        raw.load(at, held_row);
        Vec<kPairs> vec(raw);
        vec.scale(factor_of_old);
        vec.store(at, reinterpret_cast<ptx::E4m3*>(held_row));
      });
    }
    for_new_vecs([&](int32_t j, const VecPlace<kPairs>& at, Vec<kPairs>& vec) {
      vec.scale(factor);
      vec.store(at, reinterpret_cast<ptx::E4m3*>(cache_row(j)));
    });
    __syncwarp();  // all lanes have read the descale
    if (is_used && threadIdx.x % 32 == 0) *descale = made;
  }
};

// CTAs on a multiprocessor: as many as registers allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlockCtas = 6;
#else
constexpr int kBlockCtas = 8;
#endif

// blockIdx.x: the sequence. blockIdx.y: its blocks of tokens. blockIdx.z: a share of the heads of K
// and V, a warp a head.
template <class T, int kPairs>
__global__ void __launch_bounds__(kAppendBlockMaxThreads, kBlockCtas)
    append_blocks_kernel(const __grid_constant__ AppendParams params) {
  __shared__ __align__(16) float cosines[kAppendBlockAngles], sines[kAppendBlockAngles];
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  const int32_t b = blockIdx.x;
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  const AppendRows to = append_rows(problem, params.args, b);
  const int32_t before = to.sequence.len.kv, block = problem.descale_block;
  const int32_t end_block = to.stored == 0 ? 0 : (before + to.stored - 1) / block + 1;
  BlockAppender<T, kPairs> appender{
      params,
      to,
      {cosines, sines, params.pairs, params.args.rotary == FLASHATTN_ROTARY_INTERLEAVED},
      b,
      -1};
  const int32_t warps = blockDim.x / 32, heads_k = in.k.data ? problem.heads_kv : 0;
  const int32_t heads = heads_k + (in.v.data ? problem.heads_kv : 0);
#pragma unroll 1
  for (int32_t n = before / block + blockIdx.y; n < end_block; n += gridDim.y) {
#pragma unroll 1
    for (int32_t first = blockIdx.z * warps; first < heads; first += gridDim.z * warps) {
      const int32_t head = first + threadIdx.x / 32;
      const bool is_k = head < heads_k;
      appender.append(n, min(head, heads - 1) - (is_k ? 0 : heads_k), is_k, head < heads);
    }
  }
  if (params.writes_lens && blockIdx.y == 0 && blockIdx.z == 0) {
    __syncthreads();  // lens_out may be lens_kv, which all threads have read
    if (threadIdx.x == 0) params.args.lens_out[b] = to.end;
  }
}

}  // namespace flashattn::cuda
