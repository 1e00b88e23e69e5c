// The gradient of the dense bias: dS, summed over the dimensions along which the bias is broadcast.
// A kernel of its own, which recomputes the scores and dP, in a fixed order of summation, so that
// nothing need be cleared and the bits repeat whatever is summed.
//
// A CTA computes a tile of the gradient, or one of several ranges of its steps, see OrderedSplit. A
// step is a sequence, a head and a Q tile that are summed into the tile. The first warp finds many
// steps at a time; the CTA's threads share their addresses, which take long to compute.
//
// Budget of a step of 128 x 128 x 64, in clocks of an H200: mma.sync 1,700; shared memory
// 2,560, of which the bias takes 512; 2^x 1,024; issue slots 1,800 (14 an element); L2
// 64 KB, some 3,000 when all CTAs load at once. Larger tiles load fewer bytes per element.
//
// Shared memory: see DbiasConfig.
#pragma once

#include "cuda/device/mma_gemm.cuh"
#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/sm80/dbias_steps.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class DbiasKernel {
  using T = typename Config::T;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  static constexpr int kDim = Config::kDim, kMmaM = Config::kMmaM, kThreads = Config::kThreads;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kMmaN = Config::kWarpTileKv / 8;
  static constexpr bool kIsDense = Config::kIsDense;
  using Fragment = float[kMmaM][kMmaN][4];

 public:
  __device__ __forceinline__ DbiasKernel(const DbiasParams& params,
                                         DbiasSharedStorage<Config>& storage, uint32_t shared)
      : params_(params.common), split_(params.split), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      storage_.tile = dbias_tile<Config>(params_, storage_.cta_idx % split_.tiles);
      storage_.range = split_.range(storage_.cta_idx / split_.tiles);
      storage_.found = 0;
    }
    __syncthreads();
    Fragment acc = {};
    // Before the first step, n = -1, there are only loads.
#pragma unroll 1
    for (int32_t n = -1; n < storage_.found; ++n) {
      const int stage = Config::kStages == 2 ? n & 1 : 0;
      ptx::cp_async_wait<0>();
      __syncthreads();  // step n has arrived, and all warps have computed the last one
      if (n + 1 == storage_.found && storage_.range.begin < storage_.range.end) {
        __syncthreads();  // all warps have read `found`
        if (warp() == 0) find_steps<Config>(params_, storage_, lane());
        __syncthreads();
      }
      Fragment p = {};
      if (Config::kStages == 1 && n >= 0) {
        load_dout_v(n, 0);
        ptx::cp_async_commit();
      }
      if (n >= 0) compute_s(p, stage);
      if constexpr (Config::kStages == 2) {  // while tensor cores compute S
        load_qk(n + 1, stage ^ 1);
        load_dout_v(n + 1, stage ^ 1);
        ptx::cp_async_commit();
      }
      if (n >= 0) compute_p(p, n, stage);
      if constexpr (Config::kStages == 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // dO and V have arrived, and all warps have read Q and K
        load_qk(n + 1, 0);
        ptx::cp_async_commit();
      }
      if (n >= 0) {
        add_ds(acc, p, n, stage);
      } else if constexpr (kIsDense) {
        load_bias(p);
      }
    }
    finish(acc);
  }

 private:
  // Volatile: fields are read at each use, which saves registers.
  __device__ __forceinline__ const volatile DbiasTile& tile() const { return storage_.tile; }
  __device__ __forceinline__ const volatile DbiasStep& step(int32_t n) const {
    return storage_.steps[n % (2 * Config::kStepsAtOnce)];
  }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return no_hoist(threadIdx.x) / 32; }
  // The warp's first row and column in the tile, and the lane's.
  __device__ __forceinline__ int32_t warp_row() const {
    return warp() / Config::kKeyWarps * 16 * kMmaM;
  }
  __device__ __forceinline__ int32_t warp_column() const {
    return warp() % Config::kKeyWarps * Config::kWarpTileKv;
  }
  __device__ __forceinline__ int32_t row() const { return warp_row() + lane() / 4; }
  __device__ __forceinline__ int32_t column() const { return warp_column() + lane() % 4 * 2; }

  __device__ __forceinline__ uint32_t bias_address(int i) const {
    return shared_ + Config::kBias + (i * kThreads + no_hoist(threadIdx.x)) * 16;
  }
  __device__ __forceinline__ uint32_t stats(int stage, int which) const {
    return shared_ + Config::kStats + (stage * 3 + which) * Config::kStatBytes;
  }

  // Stores this thread's part of the bias, in the units of the scores, for its own use. p: zeros.
  __device__ __forceinline__ void load_bias(Fragment& p) const {
    const Inputs& in = params_.args.inputs;
    const DenseBias bias =
        DenseBias::of(params_.problem, in, tile().batches.begin, tile().heads.begin);
    const int32_t j = tile().key + column();
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      const int32_t i = tile().query + row() + m * 16;
      float (&x)[kMmaN * 4] = flat(p[m]);
      DenseBiasTile<true>{bias,
                          i,
                          j,
                          params_.args.shape.seqlen_q - i,
                          params_.args.shape.seqlen_kv - j,
                          kLog2E / kWideUnit,
                          DenseBiasTile<true>::can_pair(bias, in)}
          .forward(SLayout(), x, 1.0f);
#pragma unroll
      for (int n = 0; n < kMmaN; ++n) {
        ptx::store_shared(bias_address(m * kMmaN + n), x[4 * n], x[4 * n + 1], x[4 * n + 2],
                          x[4 * n + 3]);
      }
    }
  }

  // Start cp.async of Q and K, or dO and V, and of row statistics, unless there is no step n. Rows
  // past the last are filled with zeros.
  __device__ __forceinline__ void load_qk(int32_t n, int stage) const {
    if (n >= storage_.found) return;
    const volatile DbiasStep& s = step(n);
    const uint32_t to = shared_ + stage * Config::kStageBytes;
    const Inputs& in = params_.args.inputs;
    load(to, {s.q, in.q.stride_seq}, {s.k, in.k.stride_seq}, params_.problem.dim_qk, s);
    load_stats(stats(stage, 0), params_.lse2, s);
    load_stats(stats(stage, 1), params_.softmax_base, s);
  }
  __device__ __forceinline__ void load_dout_v(int32_t n, int stage) const {
    if (n >= storage_.found) return;
    const volatile DbiasStep& s = step(n);
    const uint32_t to = shared_ + stage * Config::kStageBytes + Config::kDout;
    load(to, {s.dout, params_.dout.stride_seq}, {s.v, params_.args.inputs.v.stride_seq},
         params_.problem.dim_v, s);
    load_stats(stats(stage, 2), params_.delta, s);
  }
  static __device__ __forceinline__ void load(uint32_t to, RowView q, RowView kv, int32_t dim,
                                              const volatile DbiasStep& s) {
    q.row_bytes *= sizeof(T);
    kv.row_bytes *= sizeof(T);
    load_tokens<kThreads>(QTile{to}, dim, q, 0, s.queries.end - s.queries.begin);
    load_tokens<kThreads>(KvTile{to + QTile::kBytes}, dim, kv, 0, s.keys);
  }
  static __device__ __forceinline__ void load_stats(uint32_t to, const float* from,
                                                    const volatile DbiasStep& s) {
    const int32_t rows = s.queries.end - s.queries.begin;
#pragma unroll
    for (int first = 0; first < kTileQ; first += kThreads) {
      const int32_t i = first + no_hoist(threadIdx.x);
      if (i < kTileQ) ptx::cp_async_4(to + i * 4, from + s.row_stats + i, i < rows);
    }
  }
  __device__ __forceinline__ float load_stat(int stage, int which, int m, int half) const {
    return __uint_as_float(ptx::load_shared(stats(stage, which) + (row() + m * 16 + half * 8) * 4));
  }

  __device__ __forceinline__ void compute_s(Fragment& s, int stage) const {
    const uint32_t q = shared_ + stage * Config::kStageBytes;
    gemm_nt<T, kDim>(s, a_k_major(QTile{q}, warp_row(), lane()),
                     b_k_major(KvTile{q + QTile::kBytes}, warp_column(), lane()));
  }

  // Turns Q K^T into P = 2^(s - lse2).
  __device__ __forceinline__ void compute_p(Fragment& p, int32_t n, int stage) const {
    modify(p, n);
    if (!step(n).full) hide(p, n);
    float base[kMmaM][2];
    bool has_base = false;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        base[m][half] = load_stat(stage, 1, m, half);
        has_base |= base[m][half] == base[m][half];
      }
    }
    if (__any_sync(~0u, has_base)) {
#pragma unroll
      for (int x = 0; x < kMmaM * kMmaN * 4; ++x) {
        const RowBase row_base(base[x / (kMmaN * 4)][x / 2 % 2]);
        flat(p)[x] = row_base.subtract_from(flat(p)[x]);
      }
    }
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lse2 = load_stat(stage, 0, m, half) + kPExponent<T>;
#pragma unroll
        for (int x = 0; x < kMmaN * 2; ++x) {
          float& s = p[m][x / 2][half * 2 + x % 2];
          s = ptx::exp2(fmaf(s, kWideUnit, -lse2));
        }
      }
    }
  }

  // Turns Q K^T into scores in units of kWideUnit log2(e), in the order of operations of
  // lse_recompute.cuh.
  __device__ __forceinline__ void modify(Fragment& s, int32_t n) const {
    const Problem& problem = params_.problem;
    if constexpr (kIsDense) {
      const float factor = problem.scale * (kLog2E / kWideUnit);
#pragma unroll
      for (int i = 0; i < kMmaM * kMmaN; ++i) {
        float bias[4];
        ptx::load_shared(bias, bias_address(i));
#pragma unroll
        for (int e = 0; e < 4; ++e) flat(s)[4 * i + e] = fmaf(flat(s)[4 * i + e], factor, bias[e]);
      }
    } else {
      using Members = WideMembers<sizeof(T) == 4>;
      using ScoreMod = typename Config::ScoreMod;
      const volatile DbiasStep& at = step(n);
      const float factor = Members::product_factor(problem);
      const auto members = [&](int m, int half) {
        return Members{problem,
                       params_.args.inputs,
                       at.b,
                       at.h,
                       {at.len.q, at.len.kv},
                       at.queries.begin + row() + m * 16 + half * 8,
                       tile().key + column(),
                       at.queries.end};
      };
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        ScoreMod::template forward_stage<ScoreStage::kProduct>(SLayout(), flat(s[m]), factor,
                                                               problem, members(m, 0));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ScoreMod::template forward_stage<ScoreStage::kBias>(SRowLayout{half}, flat(s[m]), factor,
                                                              problem, members(m, half));
        }
      }
    }
  }

  // Sets hidden scores to -inf, and those of rows past the last.
  __device__ __forceinline__ void hide(Fragment& s, int32_t n) const {
    const volatile DbiasStep& at = step(n);
    const Lengths len{at.len.q, at.len.kv};
    const int32_t first = tile().key + column(), end = at.queries.end;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = at.queries.begin + row() + m * 16 + half * 8;
        Interval seen{0, 0};
        if (i < end) seen = visible_keys(params_.problem.mask_rule(), i, len);
        IntervalMask{seen.begin - first, seen.end - seen.begin}.forward(SRowLayout{half},
                                                                        flat(s[m]));
        if (!kIsDense && !at.block_mask_full) {
          BlockMask::of(params_.problem, params_.args.inputs, at.b, at.h)
              .template shown_keys<kMmaN>(min(i, end - 1), tile().key + warp_column(), len.kv,
                                          lane())
              .forward(SRowLayout{half}, flat(s[m]));
        }
      }
    }
  }

  // acc += p (dP - delta). Where p is 0, as hidden elements are, dP may be NaN.
  __device__ __forceinline__ void add_ds(Fragment& acc, const Fragment& p, int32_t n,
                                         int stage) const {
    const uint32_t dout = shared_ + stage * Config::kStageBytes + Config::kDout;
    Fragment dp = {};
    gemm_nt<T, kDim>(dp, a_k_major(QTile{dout}, warp_row(), lane()),
                     b_k_major(KvTile{dout + QTile::kBytes}, warp_column(), lane()));
    if constexpr (!kIsDense) apply_dropout(dp, n);
    const auto add = [&](auto keep) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float delta = load_stat(stage, 2, m, half) / kPUnit<T>;
#pragma unroll
          for (int x = 0; x < kMmaN * 2; ++x) {
            const int at = half * 2 + x % 2;
            float& sum = acc[m][x / 2][at];
            const float weight = p[m][x / 2][at];
            sum = keep(weight, sum, fmaf(weight, dp[m][x / 2][at] - delta, sum));
          }
        }
      }
    };
    if (kIsDense && step(n).full) {
      add([](float, float, float sum) { return sum; });
    } else {
      add([](float weight, float old, float sum) { return weight == 0.0f ? old : sum; });
    }
  }

  __device__ __forceinline__ void apply_dropout(Fragment& dp, int32_t n) const {
    const uint32_t threshold = params_.dropout_threshold;
    if (threshold == 0) return;
    static_assert(kIsDense || kMmaM == 1, "one range of 16 rows");
    const volatile DbiasStep& at = step(n);
    const Dropout dropout = Dropout::of(params_.problem, params_.args.inputs, at.b, at.h);
    const float keep_scale = Dropout::keep_scale(threshold);
#pragma unroll
    for (float& x : flat(dp)) x *= keep_scale;
    dropout.visit_dropped<1, kMmaN, false>(threshold, at.queries.begin + warp_row(),
                                           tile().key + warp_column(), lane(),
                                           [&](int, int n, int x) { dp[0][n][x] = 0.0f; });
  }

  // Stores the sums, or adds them once the CTAs of the tile with earlier steps have done so.
  __device__ __forceinline__ void finish(Fragment& acc) const {
    if (split_.splits == 1) return store(acc, false);
    const int32_t own = storage_.cta_idx / split_.tiles;
    int32_t* const added = params_.arrived + 1 + storage_.cta_idx % split_.tiles;
    if (threadIdx.x == 0) {
      while (ptx::load_acquire(added) != own) __nanosleep(20);
    }
    __syncthreads();
    store(acc, own > 0);
    __syncthreads();
    if (threadIdx.x == 0) ptx::red_add_release(added, 1);
  }

  __device__ __forceinline__ void store(Fragment& acc, bool adds) const {
    const BackwardArgs& args = params_.args;
    // A gradient per sequence ends where the sequence does.
    Lengths end{args.shape.seqlen_q, args.shape.seqlen_kv};
    if (args.dbias_stride_batch != 0) {
      end = seqlen_info(params_.problem, args.shape, args.inputs, tile().batches.begin).len;
    }
    const int32_t i = tile().query + row(), j = tile().key + column();
    float* const to = args.dbias + tile().batches.begin * args.dbias_stride_batch +
                      tile().heads.begin * args.dbias_stride_head + j;
    if constexpr (!kIsDense) {
      if (args.dbias_stride_row == 0) return store_column_sums(acc, to - column(), end, adds);
    }
    const int64_t strides =
        args.dbias_stride_batch | args.dbias_stride_head | args.dbias_stride_row;
    const bool pairs = strides % 2 == 0 && reinterpret_cast<uintptr_t>(args.dbias) % 8 == 0;
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      float* const at = to + static_cast<int64_t>(i + x * 8) * args.dbias_stride_row;
      const int32_t keys = i + x * 8 < end.q ? end.kv - j : 0;
      if (adds) {
#pragma unroll
        for (int n = 0; n < kMmaN; ++n) {
          float* const sum = &acc[x / 2][n][x % 2 * 2];
          if (pairs && n * 8 + 1 < keys) {
            const float2 old = *reinterpret_cast<const float2*>(at + n * 8);
            sum[0] += old.x;
            sum[1] += old.y;
          } else {
            if (n * 8 < keys) sum[0] += at[n * 8];
            if (n * 8 + 1 < keys) sum[1] += at[n * 8 + 1];
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kMmaN; ++n) {
        const float* const sum = &acc[x / 2][n][x % 2 * 2];
        if (pairs && n * 8 + 1 < keys) {
          *reinterpret_cast<float2*>(at + n * 8) = make_float2(sum[0], sum[1]);
        } else {
          if (n * 8 < keys) at[n * 8] = sum[0];
          if (n * 8 + 1 < keys) at[n * 8 + 1] = sum[1];
        }
      }
    }
  }

  // Stores the sums over all rows of the tile, if the bias is broadcast along queries.
  __device__ __forceinline__ void store_column_sums(Fragment& acc, float* to, Lengths end,
                                                    bool adds) const {
    __syncthreads();  // all warps have read the tiles, which (warp, column) overwrites
#pragma unroll
    for (int n = 0; n < kMmaN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = acc[0][n][e] + acc[0][n][2 + e];
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (lane() >= 4) continue;
        ptx::store_shared(shared_ + (warp() * kTileKv + n * 8 + lane() * 2 + e) * 4,
                          __float_as_uint(x));
      }
    }
    __syncthreads();
    const int32_t own = threadIdx.x;
    if (own >= kTileKv || tile().key + own >= end.kv) return;
    float x = adds ? to[own] : 0.0f;
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      x += __uint_as_float(ptx::load_shared(shared_ + (warp * kTileKv + own) * 4));
    }
    to[own] = x;
  }

  const BackwardParams& params_;
  const OrderedSplit& split_;
  DbiasSharedStorage<Config>& storage_;
  const uint32_t shared_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    dbias_kernel(const __grid_constant__ DbiasParams params) {
  char* const shared = ptx::dynamic_shared();
  auto& storage = *reinterpret_cast<DbiasSharedStorage<Config>*>(shared + Config::kSteps);
  if (threadIdx.x == 0) {
    // A CTA waits only for CTAs that have started before it.
    storage.cta_idx = static_cast<int32_t>(blockIdx.x);
    if (params.split.splits > 1) storage.cta_idx = atomicAdd(params.common.arrived, 1);
  }
  __syncthreads();
  DbiasKernel<Config>(params, storage, ptx::shared_address(shared)).run();
}

}  // namespace flashattn::cuda::sm80
