#include "cuda/kernels/common/append_kv.h"

#include <cfloat>

#include "core/descale.h"
#include "cuda/kernels/common/append_vec.cuh"
#include "cuda/kernels/common/with_type.cuh"

namespace flashattn::cuda {
namespace {

// The rows of every `step`-th token.
struct RowWalk {
  __device__ __forceinline__ RowWalk(const flashattn_tensor& x, int32_t size, int32_t b, int32_t h,
                                     int64_t token, int32_t step)
      : row(tensor_row(x, size, b, h, token)), bytes(x.stride_seq * step * size) {}

  char* row;
  int64_t bytes;
};

// A thread moves one vec of a head of q, k or v of each of its tokens.
template <class T, int kPairs>
struct VecMover {
  __device__ __forceinline__ VecMover(const AppendParams& params, int32_t b, int32_t vec,
                                      int64_t token)
      : which((vec >= params.operands[1].first_vec) + (vec >= params.operands[2].first_vec)),
        h(params.operands[which].by_vecs.quotient(vec - params.operands[which].first_vec)),
        at(params.operands[which],
           (vec - params.operands[which].first_vec - h * params.operands[which].by_vecs.divisor) *
               kPairs),
        from(params.operands[which].from, sizeof(T), b, h, token, params.slots) {
    if (vec < params.vecs && params.problem.descale_block == 0 && has_descale(params)) {
      head_factor = factor(params, b, 0);
    }
  }

  __device__ __forceinline__ bool has_descale(const AppendParams& params) const {
    return which > 0 && params.operands[which].descale.data &&
           params.problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3;
  }
  __device__ __forceinline__ float factor(const AppendParams& params, int32_t b,
                                          int32_t block) const {
    return 1.0f / *reinterpret_cast<const float*>(
                      tensor_row(params.operands[which].descale, 4, b, h, block));
  }
  __device__ __forceinline__ void load_next() {
    raw.load(at, from.row);
    from.row += from.bytes;
  }

  int32_t which, h;
  VecPlace<kPairs> at;
  RowWalk from;
  RawVec<T, kPairs> raw;
  float head_factor = 1;
};

// Moves a vec of tokens i, i + slots, ... below end; the vec of token i has been loaded. angles:
// of tokens from `begin` on.
template <class T, int kPairs>
__device__ __forceinline__ void move_vec(const AppendParams& params, const AppendRows& to,
                                         VecMover<T, kPairs>& mover,
                                         const AngleRows<kPairs>& angles, int32_t b, int32_t begin,
                                         int32_t i, int32_t end) {
  const VecPlace<kPairs> at = mover.at;
  const AppendOperand& operand = params.operands[mover.which];
  const bool is_q = mover.which == 0;
  const bool is_f8 = !is_q && params.problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3;
  const bool is_paged = !is_q && params.args.inputs.page_table;
  const bool is_scaled_by_block = params.problem.descale_block > 0 && mover.has_descale(params);
  const int32_t size = is_f8 ? 1 : sizeof(T), end_stored = is_q ? end : min(end, to.stored);
  const int32_t before = to.sequence.len.kv;
  const CacheIndex first = is_q       ? CacheIndex{b, to.sequence.offset_q + i}
                           : is_paged ? CacheIndex{0, 0}
                                      : cache_index(params, to.sequence, b, before + i);
  RowWalk out(operand.to, size, first.entry, mover.h, first.row, params.slots);
#pragma unroll 1
  for (; i < end_stored; i += params.slots) {
    const RawVec<T, kPairs> raw = mover.raw;
    if (i + params.slots < end_stored) mover.load_next();
    if (is_paged) {
      const CacheIndex index = cache_index(params, to.sequence, b, before + i);
      out.row = tensor_row(operand.to, size, index.entry, mover.h, index.row);
    }
    if (!at.rotates && !is_f8) {
      raw.store(at, out.row);
    } else {
      Vec<kPairs> vec(raw);
      if (at.rotates) {
        vec.rotate(angles.interleaved, [&](int half) { return angles.of(i - begin, at.c, half); });
      }
      if (is_f8) {
        vec.scale(is_scaled_by_block ? mover.factor(params, b, params.by_block.quotient(before + i))
                                     : mover.head_factor);
        vec.store(at, reinterpret_cast<ptx::E4m3*>(out.row));
      } else {
        vec.store(at, reinterpret_cast<T*>(out.row));
      }
    }
    out.row += out.bytes;
  }
}

// blockIdx.x: the sequence. blockIdx.y: its tokens, tokens_per_cta at a time. blockIdx.z: a share
// of their vecs.
template <class T, int kPairs>
__global__ void __launch_bounds__(kAppendMaxThreads, sizeof(T) == 2 ? 2 : 1)
    append_kv_kernel(const __grid_constant__ AppendParams params) {
  __shared__ __align__(16) float cosines[kAppendMaxAngles], sines[kAppendMaxAngles];
  const Problem& problem = params.problem;
  const AppendArgs& args = params.args;
  const int32_t b = blockIdx.x;
  const int32_t slot = params.by_vecs.quotient(threadIdx.x);
  const int32_t first_vec = blockIdx.z * blockDim.x + threadIdx.x - slot * params.vecs;
  const int32_t end_vec = slot < params.slots ? params.vecs : 0;
  const int32_t vec_step = gridDim.z * blockDim.x;
  int32_t begin = blockIdx.y * params.tokens_per_cta;

  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  const SeqlenInfo queries = seqlen_info(problem, args.shape, args.inputs, b);
  VecMover<T, kPairs> mover(params, b, first_vec, queries.offset_q + begin + slot);
  bool is_loaded = first_vec < end_vec && begin + slot < queries.len.q;
  if (is_loaded) mover.load_next();
  // Loads of the first token start before those of the cache's lengths: they arrive together.
  asm volatile("" ::: "memory");
  const AppendRows to = append_rows(problem, args, b);
  if (params.writes_lens && blockIdx.y == 0 && blockIdx.z == 0) {
    __syncthreads();  // lens_out may be lens_kv, which all threads have read
    if (threadIdx.x == 0) args.lens_out[b] = to.end;
  }
  const AngleRows<kPairs> angles = {cosines, sines, params.pairs,
                                    args.rotary == FLASHATTN_ROTARY_INTERLEAVED};
  for (; begin < to.tokens; begin += gridDim.y * params.tokens_per_cta) {
    const int32_t end = min(begin + params.tokens_per_cta, to.tokens);
#pragma unroll 1
    for (int32_t n = threadIdx.x; n < (end - begin) * params.pairs; n += blockDim.x) {
      const int32_t row = params.by_pairs.quotient(n), pair = n - row * params.pairs;
      const int64_t position = rotary_position(args, to.position, begin + row);
      angles.set(row, pair, angle_of(args, position, pair));
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t vec = first_vec; vec < end_vec; vec += vec_step) {
      if (!is_loaded) {
        mover = {params, b, vec, to.sequence.offset_q + begin + slot};
        if (begin + slot < end) mover.load_next();
      }
      is_loaded = false;
      move_vec(params, to, mover, angles, b, begin, begin + slot, end);
    }
    __syncthreads();  // all threads have read the angles
  }
}

// The quotient and the remainder of numbers from `start` on, `step` apart, without a division for
// each.
struct Walk {
  __device__ __forceinline__ Walk(int32_t start, int32_t step, FastDivmod by)
      : quotient(by.quotient(start)),
        remainder(start - static_cast<int32_t>(quotient) * by.divisor),
        quotient_step(by.quotient(step)),
        remainder_step(step - quotient_step * by.divisor),
        divisor(by.divisor) {}
  __device__ __forceinline__ void next() {
    quotient += quotient_step;
    remainder += remainder_step;
    if (remainder < divisor) return;
    remainder -= divisor;
    ++quotient;
  }

  int64_t quotient;
  int32_t remainder, quotient_step, remainder_step, divisor;
};

// Calls body(row, c) for a warp's share of the vecs of rows [begin, end); c: a vec's first pair.
template <int kPairs, class Body>
__device__ __forceinline__ void for_each_vec(int64_t begin, int64_t end, FastDivmod by_vecs,
                                             Body body) {
  for (Walk at(threadIdx.x % 32, 32, by_vecs); at.quotient < end - begin; at.next()) {
    body(begin + at.quotient, at.remainder * kPairs);
  }
}

// One warp appends the new tokens of block n of a head of K or V: it makes the descale, rescales
// the tokens that the block holds if the descale grows, and stores the new ones.
template <class T, int kPairs>
__device__ void append_block(const AppendParams& params, const AppendRows& to, int32_t b, int32_t h,
                             int64_t n, bool is_k) {
  const AppendArgs& args = params.args;
  const AppendOperand& operand = params.operands[is_k ? 1 : 2];
  const int32_t before = to.sequence.len.kv, block = params.problem.descale_block;
  const int64_t first = n * block, last = min(first + block, int64_t{before} + to.stored);
  const auto cache_row = [&](int64_t j) {
    const CacheIndex at = cache_index(params, to.sequence, b, static_cast<int32_t>(j));
    return tensor_row(operand.to, 1, at.entry, h, at.row);
  };
  const auto load_new = [&](int64_t j, const VecPlace<kPairs>& at) {
    const int32_t i = static_cast<int32_t>(j) - before;
    RawVec<T, kPairs> raw;
    raw.load(at, tensor_row(operand.from, sizeof(T), b, h, to.sequence.offset_q + i));
    Vec<kPairs> vec(raw);
    if (at.rotates) {
      const int64_t position = rotary_position(args, to.position, i);
      vec.rotate(args.rotary == FLASHATTN_ROTARY_INTERLEAVED, [&](int half) {
        return vec_angles<kPairs>(args, operand.pairs, position, at.c, half);
      });
    }
    return vec;
  };
  const int64_t first_new = max(first, int64_t{before});
  float most = 0;
  for_each_vec<kPairs>(first_new, last, operand.by_vecs, [&](int64_t j, int32_t c) {
    const Vec<kPairs> vec = load_new(j, {operand, c});
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
      // Neither an infinity nor a NaN counts.
      if (fabsf(vec.x[m]) <= FLT_MAX) most = fmaxf(most, fabsf(vec.x[m]));
      if (fabsf(vec.y[m]) <= FLT_MAX) most = fmaxf(most, fabsf(vec.y[m]));
    }
  });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));

  float* const descale = reinterpret_cast<float*>(tensor_row(operand.descale, 4, b, h, n));
  const bool held = first < before;
  const float old = held ? *descale : 0.0f;
  const float made = updated_descale(most, ptx::kMaxE4m3, block, held, old);
  const float factor = 1.0f / made, factor_of_old = old / made;
  if (held && made != old) {
    for_each_vec<kPairs>(first, before, operand.by_vecs, [&](int64_t j, int32_t c) {
      const VecPlace<kPairs> at(operand, c);
      char* const row = cache_row(j);
      RawVec<ptx::E4m3, kPairs> raw;
      raw.load(at, row);
      Vec<kPairs> vec(raw);
      vec.scale(factor_of_old);
      vec.store(at, reinterpret_cast<ptx::E4m3*>(row));
    });
  }
  for_each_vec<kPairs>(first_new, last, operand.by_vecs, [&](int64_t j, int32_t c) {
    const VecPlace<kPairs> at(operand, c);
    Vec<kPairs> vec = load_new(j, at);
    vec.scale(factor);
    vec.store(at, reinterpret_cast<ptx::E4m3*>(cache_row(j)));
  });
  __syncwarp();  // all lanes have read the descale
  if (threadIdx.x % 32 == 0) *descale = made;
}

// The kernel that makes descales. blockIdx.x: the sequence. A warp takes one block of tokens of one
// head of K or V at a time.
template <class T, int kPairs>
__global__ void __launch_bounds__(kAppendBlockThreads, 4)
    append_blocks_kernel(const __grid_constant__ AppendParams params) {
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  const int32_t b = blockIdx.x;
  const AppendRows to = append_rows(problem, params.args, b);
  if (to.stored == 0) return;
  const int32_t before = to.sequence.len.kv, first = before / problem.descale_block;
  const int32_t blocks = (before + to.stored - 1) / problem.descale_block - first + 1;
  constexpr int kWarps = kAppendBlockThreads / 32;
  for (Walk at(blockIdx.y * kWarps + threadIdx.x / 32, gridDim.y * kWarps, params.by_heads);
       at.quotient < blocks; at.next()) {
    const bool is_k = in.k.data && at.remainder < problem.heads_kv;
    append_block<T, kPairs>(params, to, b,
                            at.remainder - (in.k.data && !is_k ? problem.heads_kv : 0),
                            first + at.quotient, is_k);
  }
}

// Writes lens_out, which may be lens_kv, after the kernels above.
__global__ void __launch_bounds__(128)
    advance_lens_kernel(const __grid_constant__ AppendParams params) {
  const int32_t b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < params.args.shape.batch) {
    params.args.lens_out[b] = append_rows(params.problem, params.args, b).end;
  }
}

template <class T, int kPairs>
constexpr AppendKernels instance() {
  return {&append_kv_kernel<T, kPairs>, &append_blocks_kernel<T, kPairs>, &advance_lens_kernel};
}

}  // namespace

AppendKernels append_kernels(int32_t dtype, bool vectors) {
  return with_type(dtype, [vectors](auto number) {
    using T = decltype(number);
    return vectors ? instance<T, kAppendVector>() : instance<T, 1>();
  });
}

}  // namespace flashattn::cuda
