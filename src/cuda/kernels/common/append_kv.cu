#include "cuda/kernels/common/append_kv.h"

#include <algorithm>
#include <cfloat>

#include "core/descale.h"
#include "cuda/host/launch.h"
#include "cuda/host/preload.h"
#include "cuda/kernels/common/append_unit.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kVector = 8;  // elements that a thread loads at once, where rows are aligned

// Moves the pairs from c on of a row: to the cache or to q_out.
template <class T, int kPairs>
__device__ __forceinline__ void move_unit(const AppendArgs& args, int64_t position, int32_t c,
                                          int32_t dim, int32_t rotary_dim, const char* from,
                                          char* to, bool is_f8, float factor) {
  Unit<kPairs> unit(args, c, dim, rotary_dim);
  const T* const in = reinterpret_cast<const T*>(from);
  T* const out = reinterpret_cast<T*>(to);
  if (!unit.turns && !is_f8) return unit.copy(in, out);
  unit.load_new(args, position, in);
  if (is_f8) {
    unit.scale(factor);
    unit.store(reinterpret_cast<ptx::E4m3*>(to));
  } else {
    unit.store(out);
  }
}

// blockIdx.x: the sequence. blockIdx.y: its tokens, tokens_per_cta at a time.
template <class T, int kPairs>
__global__ void __launch_bounds__(kMaxThreads, 1)
    append_kv_kernel(const __grid_constant__ AppendParams params) {
  const Problem& problem = params.problem;
  const AppendArgs& args = params.args;
  const Inputs& in = args.inputs;
  const int32_t b = blockIdx.x;
  const AppendRows to = append_rows(problem, args, b);
  if (params.writes_lens && blockIdx.y == 0) {
    __syncthreads();  // lens_out may be lens_kv, which all threads have read
    if (threadIdx.x == 0) args.lens_out[b] = to.end;
  }
  const int32_t own = params.by_units.quotient(threadIdx.x);  // 0 where a CTA moves one token
  if (own >= params.tokens_per_cta) return;
  const bool is_f8 = problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3;
  const int32_t cache_size = is_f8 ? 1 : static_cast<int32_t>(sizeof(T));
  for (int32_t i = blockIdx.y * params.tokens_per_cta + own; i < to.tokens;
       i += gridDim.y * params.tokens_per_cta) {
    const int64_t position = rotary_position(args, to.position, i);
    const int64_t token = to.sequence.offset_q + i;
    const bool stores = i < to.stored;
    const int32_t j = to.sequence.len.kv + i;
    const CacheIndex at = stores ? cache_index(params, to.sequence, b, j) : CacheIndex{};
    const auto factor_of = [&](const flashattn_tensor& descale, int32_t h) {
      if (!is_f8 || !descale.data) return 1.0f;
      const int32_t block = problem.descale_block > 0 ? j / problem.descale_block : 0;
      return 1.0f / *reinterpret_cast<const float*>(tensor_row(descale, 4, b, h, block));
    };
    for (int32_t unit = threadIdx.x - own * params.units; unit < params.units; unit += blockDim.x) {
      if (unit < params.units_q) {
        const int32_t h = params.by_units_qk.quotient(unit);
        const int32_t c = (unit - h * params.by_units_qk.divisor) * kPairs;
        move_unit<T, kPairs>(args, position, c, problem.dim_qk, args.rotary_dim,
                             tensor_row(in.q, sizeof(T), b, h, token),
                             tensor_row(args.q_out, sizeof(T), b, h, token), false, 1.0f);
        continue;
      }
      if (!stores) continue;
      const bool is_k = unit < params.units_q + params.units_k;
      const int32_t local = unit - params.units_q - (is_k ? 0 : params.units_k);
      const FastDivmod by = is_k ? params.by_units_qk : params.by_units_v;
      const int32_t h = by.quotient(local), c = (local - h * by.divisor) * kPairs;
      const flashattn_tensor& from = is_k ? in.k : in.v;
      const flashattn_tensor& cache = is_k ? args.k_cache : args.v_cache;
      move_unit<T, kPairs>(args, position, c, is_k ? problem.dim_qk : problem.dim_v,
                           is_k ? args.rotary_dim : 0, tensor_row(from, sizeof(T), b, h, token),
                           tensor_row(cache, cache_size, at.entry, h, at.row), is_f8,
                           factor_of(is_k ? in.descale_k : in.descale_v, h));
    }
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

// Calls body(row, c) for a warp's share of the units of rows [begin, end); c: a unit's first pair.
template <int kPairs, class Body>
__device__ __forceinline__ void for_each_unit(int64_t begin, int64_t end, FastDivmod by_units,
                                              Body body) {
  for (Walk at(threadIdx.x % 32, 32, by_units); at.quotient < end - begin; at.next()) {
    body(begin + at.quotient, at.remainder * kPairs);
  }
}

// One warp appends the new tokens of block n of a head of K or V: it makes the descale, rescales
// the tokens that the block holds if the descale grows, and stores the new ones.
template <class T, int kPairs>
__device__ void append_block(const AppendParams& params, const AppendRows& to, int32_t b, int32_t h,
                             int64_t n, bool is_k) {
  const Problem& problem = params.problem;
  const AppendArgs& args = params.args;
  const Inputs& in = args.inputs;
  const flashattn_tensor& from = is_k ? in.k : in.v;
  const flashattn_tensor& cache = is_k ? args.k_cache : args.v_cache;
  const FastDivmod by_units = is_k ? params.by_units_qk : params.by_units_v;
  const int32_t dim = is_k ? problem.dim_qk : problem.dim_v;
  const int32_t rotary_dim = is_k ? args.rotary_dim : 0;
  const int32_t before = to.sequence.len.kv, block = problem.descale_block;
  const int64_t first = n * block, last = min(first + block, int64_t{before} + to.stored);
  const auto cache_row = [&](int64_t j) {
    const CacheIndex at = cache_index(params, to.sequence, b, static_cast<int32_t>(j));
    return reinterpret_cast<ptx::E4m3*>(tensor_row(cache, 1, at.entry, h, at.row));
  };
  const auto load_new = [&](int64_t j, int32_t c) {
    const int32_t i = static_cast<int32_t>(j) - before;
    Unit<kPairs> unit(args, c, dim, rotary_dim);
    unit.load_new(
        args, rotary_position(args, to.position, i),
        reinterpret_cast<const T*>(tensor_row(from, sizeof(T), b, h, to.sequence.offset_q + i)));
    return unit;
  };
  const int64_t first_new = max(first, int64_t{before});
  float most = 0;
  for_each_unit<kPairs>(first_new, last, by_units, [&](int64_t j, int32_t c) {
    const Unit<kPairs> unit = load_new(j, c);
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
      // Neither an infinity nor a NaN counts.
      if (fabsf(unit.x[m]) <= FLT_MAX) most = fmaxf(most, fabsf(unit.x[m]));
      if (fabsf(unit.y[m]) <= FLT_MAX) most = fmaxf(most, fabsf(unit.y[m]));
    }
  });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));

  const flashattn_tensor& of = is_k ? in.descale_k : in.descale_v;
  float* const descale = reinterpret_cast<float*>(tensor_row(of, 4, b, h, n));
  const bool held = first < before;
  const float old = held ? *descale : 0.0f;
  const float made = updated_descale(most, ptx::kMaxE4m3, block, held, old);
  if (held && made != old) {
    for_each_unit<kPairs>(first, before, by_units, [&](int64_t j, int32_t c) {
      Unit<kPairs> unit(args, c, dim, rotary_dim);
      ptx::E4m3* const row = cache_row(j);
      unit.load(row);
      unit.scale(old / made);
      unit.store(row);
    });
  }
  for_each_unit<kPairs>(first_new, last, by_units, [&](int64_t j, int32_t c) {
    Unit<kPairs> unit = load_new(j, c);
    unit.scale(1.0f / made);
    unit.store(cache_row(j));
  });
  __syncwarp();  // all lanes have read it
  if (threadIdx.x % 32 == 0) *descale = made;
}

constexpr int kBlockThreads = 128;

// The kernel that makes descales. blockIdx.x: the sequence. A warp takes one block of tokens of one
// head of K or V at a time.
template <class T, int kPairs>
__global__ void __launch_bounds__(kBlockThreads)
    append_blocks_kernel(const __grid_constant__ AppendParams params) {
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  const int32_t b = blockIdx.x;
  const AppendRows to = append_rows(problem, params.args, b);
  if (to.stored == 0) return;
  const int32_t before = to.sequence.len.kv, first = before / problem.descale_block;
  const int32_t blocks = (before + to.stored - 1) / problem.descale_block - first + 1;
  constexpr int kWarps = kBlockThreads / 32;
  for (Walk at(blockIdx.y * kWarps + threadIdx.x / 32, gridDim.y * kWarps, params.by_heads);
       at.quotient < blocks; at.next()) {
    const bool is_k = in.k.data && at.remainder < problem.heads_kv;
    append_block<T, kPairs>(params, to, b,
                            at.remainder - (in.k.data && !is_k ? problem.heads_kv : 0),
                            first + at.quotient, is_k);
  }
}

// Increments lens_kv after the kernels above.
__global__ void __launch_bounds__(128)
    advance_lens_kernel(const __grid_constant__ AppendParams params) {
  const int32_t b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < params.args.shape.batch) {
    params.args.lens_out[b] = append_rows(params.problem, params.args, b).end;
  }
}

template <class T>
struct AppendKernels {
  static constexpr auto kVectors = &append_kv_kernel<T, kVector>;
  static constexpr auto kElements = &append_kv_kernel<T, 1>;
  static constexpr auto kBlockVectors = &append_blocks_kernel<T, kVector>;
  static constexpr auto kBlockElements = &append_blocks_kernel<T, 1>;
};

// Calls use(AppendKernels<T>()) with the type of new tokens.
template <class Use>
auto with_append_kernels(int32_t dtype, Use use) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F16: return use(AppendKernels<__half>());
    case FLASHATTN_DTYPE_BF16: return use(AppendKernels<__nv_bfloat16>());
    default: return use(AppendKernels<float>());
  }
}

}  // namespace

cudaError_t preload_append_kernels(const Problem& problem) {
  cudaError_t error = preload(&advance_lens_kernel);
  for (const int32_t dtype : {FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16}) {
    if (problem.dtype != FLASHATTN_DTYPE_F8E4M3 && problem.dtype != dtype) continue;
    with_append_kernels(dtype, [&](auto of) {
      if (error == cudaSuccess) error = preload(of.kVectors, of.kElements);
      if (error == cudaSuccess && problem.has_f8_cache() && problem.descale_block > 0) {
        error = preload(of.kBlockVectors, of.kBlockElements);
      }
    });
  }
  return error;
}

cudaError_t launch_append_kv(const Problem& problem, const AppendArgs& args, bool vectors,
                             int32_t multiprocessors, cudaStream_t stream) {
  const Shape& shape = args.shape;
  const int32_t pairs = vectors ? kVector : 1;
  const auto row_units = [pairs](int32_t dim) {
    return static_cast<int32_t>(ceil_div(dim, 2 * pairs));
  };
  AppendParams p{};
  p.problem = problem;
  p.args = args;
  p.by_units_qk = FastDivmod::of(row_units(problem.dim_qk));
  p.by_units_v = FastDivmod::of(row_units(problem.dim_v));
  p.by_page = FastDivmod::of(std::max(problem.page_size, 1));
  const bool updates = args.update_descales && shape.batch > 0 && shape.seqlen_q > 0 &&
                       (args.inputs.k.data || args.inputs.v.data);
  if (updates) {
    const auto kernel = with_append_kernels(
        args.dtype, [vectors](auto of) { return vectors ? of.kBlockVectors : of.kBlockElements; });
    const int32_t heads = problem.heads_kv * (args.inputs.k.data && args.inputs.v.data ? 2 : 1);
    p.by_heads = FastDivmod::of(heads);
    const int64_t blocks = ceil_div(shape.seqlen_q, problem.descale_block) + 1;
    const int64_t ctas = ceil_div(blocks * heads, kBlockThreads / 32);
    const dim3 grid(static_cast<unsigned>(shape.batch),
                    static_cast<unsigned>(std::min<int64_t>(ctas, 65535)));
    const cudaError_t error = launch_kernel(kernel, grid, kBlockThreads, 0, p, stream);
    if (error != cudaSuccess) return error;
    p.args.inputs.k = p.args.inputs.v = {};  // what follows moves q alone
  }
  const Inputs& in = p.args.inputs;
  p.units_q = in.q.data ? problem.heads_q * row_units(problem.dim_qk) : 0;
  p.units_k = in.k.data ? problem.heads_kv * row_units(problem.dim_qk) : 0;
  const int32_t units_v = in.v.data ? problem.heads_kv * row_units(problem.dim_v) : 0;
  p.units = p.units_q + p.units_k + units_v;
  const bool in_place = args.lens_out && args.lens_out == in.lens_kv;
  const auto advance_lens = [&] {
    return launch_kernel(&advance_lens_kernel,
                         dim3(static_cast<unsigned>(ceil_div(shape.batch, 128))), 128, 0, p,
                         stream);
  };
  if (p.units == 0 || shape.seqlen_q == 0) {
    return args.lens_out && (updates || !in_place) ? advance_lens() : cudaSuccess;
  }
  // Decoding launches one CTA a sequence, with as many threads as a token has units.
  int32_t threads = static_cast<int32_t>(ceil_div(p.units, ceil_div(p.units, kMaxThreads)));
  p.tokens_per_cta = std::max(std::min(kMaxThreads / 2 / p.units, shape.seqlen_q), 1);
  if (p.tokens_per_cta > 1) threads = p.units * p.tokens_per_cta;
  threads = static_cast<int32_t>(ceil_div(threads, 32)) * 32;
  p.by_units = FastDivmod::of(p.units <= threads ? p.units : kMaxThreads);

  int64_t ctas = ceil_div(shape.seqlen_q, p.tokens_per_cta);
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_Q) {
    // Most sequences may be shorter: few CTAs without a token.
    const int64_t mean = ceil_div(ceil_div(shape.total_q, shape.batch), p.tokens_per_cta);
    ctas = std::min(ctas, std::max(4 * mean, ceil_div(16 * int64_t{multiprocessors}, shape.batch)));
  }
  if (in_place && ctas <= 2) ctas = 1;  // sooner done than a second launch
  // The grid's limit; and tokens stay countable one step past the last.
  ctas = std::max<int64_t>(std::min<int64_t>(ctas, 65535 / p.tokens_per_cta), 1);
  p.writes_lens = args.lens_out && !(in_place && ctas > 1);
  const dim3 grid(static_cast<unsigned>(shape.batch), static_cast<unsigned>(ctas));
  const auto kernel = with_append_kernels(
      args.dtype, [vectors](auto of) { return vectors ? of.kVectors : of.kElements; });
  const cudaError_t error = launch_kernel(kernel, grid, threads, 0, p, stream);
  if (error != cudaSuccess || !in_place || p.writes_lens) return error;
  return advance_lens();
}

}  // namespace flashattn::cuda
