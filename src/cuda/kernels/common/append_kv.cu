#include "cuda/kernels/common/append_kv.h"

#include "cuda/kernels/common/append_blocks.cuh"
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

// Writes lens_out, which may be lens_kv, after the kernels above.
__global__ void __launch_bounds__(128)
    advance_lens_kernel(const __grid_constant__ AppendParams params) {
  ptx::griddep_wait();
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
