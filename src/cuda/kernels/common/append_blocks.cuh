// New tokens of K and V into a cache of E4M3 in which a block of tokens of a head has a descale:
// the kernel makes the descales, too. It also moves those of Q.
#pragma once

#include "core/descale.h"
#include "cuda/kernels/common/append_vec.cuh"

namespace flashattn::cuda {

// Moves tokens of sequence b whose cache rows are in a block, all warps of a CTA those of the same
// block, each those of a head of its own.
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

  // Calls body(j, place, vec) for a warp's share of the vecs of new tokens in cache rows [begin,
  // end), rotated. CTA-wide. end_token: the row behind the last new token of the block, which a
  // full cache may lack; q has it.
  template <class Body>
  __device__ __forceinline__ void for_each_new_vec(const AppendOperand& operand, int32_t begin,
                                                   int32_t end, int32_t end_token, int32_t h,
                                                   bool is_used, Body body) {
    const int32_t step = kAppendBlockAngles / max(params.pairs, 1);
    const int64_t token = to.sequence.offset_q - to.sequence.len.kv;  // of cache row 0
#pragma unroll 1
    for (; begin < end; begin += step) {
      const int32_t rows = min(step, end - begin);
      make_angles(begin, min(begin + step, end_token));
      if (!is_used) continue;
      for_each_vec(operand, rows, [&](int32_t row, const VecPlace<kPairs>& at) {
        RawVec<T, kPairs> raw;
        raw.load(at, tensor_row(operand.from, sizeof(T), b, h, token + begin + row));
        Vec<kPairs> vec(raw);
        if (at.rotates) {
          vec.rotate(angles.interleaved, [&](int half) { return angles.of(row, at.c, half); });
        }
        body(begin + row, at, vec);
      });
    }
  }

  // Moves the new tokens of block n of a head of q, k or v, operand `which`. The descale of k and v
  // is made in a pass of its own. CTA-wide.
  __device__ __forceinline__ void move(int32_t n, int32_t which, int32_t h, bool is_used) {
    const AppendOperand& operand = params.operands[which];
    const int32_t before = to.sequence.len.kv, block = params.problem.descale_block;
    const int32_t first_new = max(n * block, before);
    const int32_t end_token = n * block + min(block, before + to.tokens - n * block);
    const int32_t last = which ? min(end_token, before + to.stored) : end_token;
    if (last <= first_new) return;  // the cache is full
    float most = 0, factor = 1;
#pragma unroll 1
    for (bool is_known = which == 0;; is_known = true) {
      for_each_new_vec(operand, first_new, last, end_token, h, is_used,
                       [&](int32_t j, const VecPlace<kPairs>& at, Vec<kPairs>& vec) {
                         if (!is_known) {
                           most = fmaxf(most, vec.largest(at));
                           return;
                         }
                         vec.scale(factor);
                         if (which == 0) {
                           char* const row = tensor_row(operand.to, sizeof(T), b, h,
                                                        to.sequence.offset_q - before + j);
                           vec.store(at, reinterpret_cast<T*>(row));
                         } else {
                           vec.store(at, reinterpret_cast<ptx::E4m3*>(cache_row(operand, h, j)));
                         }
                       });
      if (is_known) return;
      factor = make_descale(operand, n, h, warp_max(most), is_used);
    }
  }

 private:
  __device__ __forceinline__ char* cache_row(const AppendOperand& operand, int32_t h,
                                             int32_t j) const {
    const CacheIndex at = cache_index(params, to.sequence, b, j);
    return tensor_row(operand.to, 1, at.entry, h, at.row);
  }

  static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int shift = 16; shift > 0; shift /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, shift));
    return x;
  }

  // Stores the descale of block n, whose new tokens are at most `most`, and rescales the tokens
  // that the block holds if the descale grows. Returns the factor of new tokens.
  __device__ __forceinline__ float make_descale(const AppendOperand& operand, int32_t n, int32_t h,
                                                float most, bool is_used) {
    const int32_t before = to.sequence.len.kv, block = params.problem.descale_block;
    const int32_t first = n * block;
    const bool held = first < before;
    float* const descale = reinterpret_cast<float*>(tensor_row(operand.descale, 4, b, h, n));
    const float old = is_used && held ? *descale : 0.0f;
    const float made = updated_descale(most, ptx::kMaxE4m3, block, held, old);
    __syncwarp();  // all lanes have read the descale
    if (!is_used) return 1.0f;
    if (threadIdx.x % 32 == 0) *descale = made;
    if (held && made != old) {
      const float factor_of_old = old / made;
      for_each_vec(operand, before - first, [&](int32_t row, const VecPlace<kPairs>& at) {
        char* const held_row = cache_row(operand, h, first + row);
        RawVec<ptx::E4m3, kPairs> raw;
        raw.load(at, held_row);
        Vec<kPairs> vec(raw);
        vec.scale(factor_of_old);
        vec.store(at, reinterpret_cast<ptx::E4m3*>(held_row));
      });
    }
    return 1.0f / made;
  }
};

// CTAs on a multiprocessor: as many as registers allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlockCtas = 8;
#else
constexpr int kBlockCtas = 5;
#endif

// blockIdx.x: the sequence. blockIdx.y: its blocks of tokens. blockIdx.z: a share of the groups of
// heads, those of K and V before those of Q; a warp has a head of a group.
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
  const int32_t end_block = to.tokens == 0 ? 0 : (before + to.tokens - 1) / block + 1;
  BlockAppender<T, kPairs> appender{
      params,
      to,
      {cosines, sines, params.pairs, params.args.rotary == FLASHATTN_ROTARY_INTERLEAVED},
      b,
      -1};
#pragma unroll 1
  for (int32_t n = before / block + blockIdx.y; n < end_block; n += gridDim.y) {
#pragma unroll 1
    for (int32_t group = blockIdx.z; group < params.groups; group += gridDim.z) {
      const bool is_q = group >= params.groups_kv;
      const int32_t heads_k = in.k.data ? problem.heads_kv : 0;
      const int32_t heads = is_q ? problem.heads_q : heads_k + (in.v.data ? problem.heads_kv : 0);
      const int32_t head =
          (group - (is_q ? params.groups_kv : 0)) * (blockDim.x / 32) + threadIdx.x / 32;
      const int32_t h = min(head, heads - 1), which = is_q ? 0 : h < heads_k ? 1 : 2;
      appender.move(n, which, which == 2 ? h - heads_k : h, head < heads);
    }
  }
  if (params.writes_lens && blockIdx.y == 0 && blockIdx.z == 0) {
    __syncthreads();  // lens_out may be lens_kv, which all threads have read
    if (threadIdx.x == 0) params.args.lens_out[b] = to.end;
  }
}

}  // namespace flashattn::cuda
