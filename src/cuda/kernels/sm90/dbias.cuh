// The gradient of a dense bias on Hopper: dS, summed over the sequences and heads that share the
// bias. It recomputes dS, which the backward kernel has computed before, as sm80/dbias.cuh does, so
// that the sums have a fixed order, see summand(), and nothing need be cleared.
//
// Params: those of the backward kernel, but for two fields. stream_k: tiles are 128 queries x
// kTileKv keys of the gradient; iterations are the sequences and heads that are summed into one.
// common.arrived and arrived_count: the counters of dbias_counters() follow these.
//
// Persistent CTAs. The producer, one thread, loads Q and K, dO and V of each iteration by TMA. Each
// consumer computes 64 rows of S = Q K^T and dP = dO V^T by WGMMA, and adds dS to its accumulators.
// The bias of a tile lies in shared memory for all of its iterations.
//
// Partials of a tile are added in descending order of their iterations: of two partials of a CTA
// the first is the end of a tile, and is complete when the next CTA's begins to wait for it. CTAs
// are numbered in descending order as they start, so that each waits only for CTAs before it.
//
// Budget of an iteration at D = 64, 128 x 128, in clocks: WGMMA 1,024; 2^x 1,024; shared memory
// 224 KB = 1,792; L2 64 KB, some 3,000 when all CTAs load at once.
#pragma once

#include "cuda/kernels/common/lse_delta.cuh"
#include "cuda/kernels/sm90/dbias_config.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class DbiasProducer {
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  using State = PipelineState<Config::kStages>;

 public:
  __device__ __forceinline__ DbiasProducer(const BackwardParams& params, uint32_t shared,
                                           DbiasSharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_partial<Config>(
        params_, storage_.cta_idx, [&](const DbiasTile& tile, const StreamK::Partial& partial) {
          const int32_t heads = tile.heads.end - tile.heads.begin;
#pragma unroll 1
          for (int32_t n = partial.begin; n < partial.end; ++n) {
            const int32_t x = summand(params_.stream_k, partial, n);
            load(tile, tile.batches.begin + x / heads, tile.heads.begin + x % heads);
          }
          storage_.qk.producer_acquire(state_);
          storage_.steps[state_.stage()].end = 1;
          storage_.qk.producer_commit(state_);
          state_.advance();
        });
  }

 private:
  // Loads Q, K, dO and V of a sequence and head, unless no query of the tile sees a key of the
  // tile.
  __device__ __forceinline__ void load(const DbiasTile& tile, int32_t b, int32_t h) {
    const cuda::BackwardParams& common = params_.common;
    const Problem& problem = common.problem;
    const SeqlenInfo sequence = seqlen_info(problem, common.args.shape, common.args.inputs, b);
    const Lengths len = sequence.len;
    const Interval queries{tile.query, min(tile.query + kTileQ, len.q)};
    const Interval keys{tile.key, min(tile.key + kTileKv, len.kv)};
    if (queries.begin >= queries.end) return;
    const KeySpan span = key_span(problem.mask_rule(), queries, len);
    const Interval seen = intersect(span.any, keys);
    if (seen.begin >= seen.end) return;

    storage_.qk.producer_acquire(state_);
    storage_.steps[state_.stage()] = {len,
                                      queries.end - queries.begin == kTileQ &&
                                          keys.end - keys.begin == kTileKv &&
                                          span.all.begin <= keys.begin && keys.end <= span.all.end,
                                      0};
    // Rows up to the end of the backward kernel's Q tile have statistics.
    const int32_t rows = ceil_to_box(queries.end - queries.begin);
    const int64_t row = common.lse_delta_offset(sequence, b, h) + tile.query;
    const int32_t kv_head = h / common.q_heads_per_kv_head;
    const ptx::TmaCoord q{0, static_cast<int32_t>(sequence.offset_q) + tile.query, h,
                          problem.layout & FLASHATTN_LAYOUT_VARLEN_Q ? 0 : b};
    const ptx::TmaCoord kv{0, static_cast<int32_t>(sequence.offset_kv) + tile.key, kv_head,
                           problem.layout & FLASHATTN_LAYOUT_VARLEN_KV ? 0 : b};
    {
      const uint32_t full = storage_.qk.full_barrier(state_).address();
      storage_.qk.producer_expect(state_, Config::kStageBytes + 2 * rows * 4);
      load_tiles(params_.q, q, params_.k, kv, shared_ + state_.stage() * Config::kStageBytes, full);
      load_stats(Config::kLse, common.lse2 + row, rows, full);
      load_stats(Config::kBase, common.softmax_base + row, rows, full);
    }
    {
      const uint32_t full = storage_.dov.full_barrier(dov_state_).address();
      storage_.dov.producer_acquire(dov_state_);
      storage_.dov.producer_expect(dov_state_, Config::kStageBytes + rows * 4);
      load_tiles(params_.dout, q, params_.v, kv,
                 shared_ + Config::kDo + dov_state_.stage() * Config::kStageBytes, full);
      ptx::bulk_load(shared_ + Config::kDelta + dov_state_.stage() * Config::kStatBytes,
                     common.delta + row, rows * 4, full);
    }
    state_.advance();
    dov_state_.advance();
  }

  static __device__ __forceinline__ int32_t ceil_to_box(int32_t rows) {
    return (rows + kDbiasBoxRows - 1) / kDbiasBoxRows * kDbiasBoxRows;
  }

  __device__ __forceinline__ void load_stats(int first, const float* from, int32_t rows,
                                             uint32_t full) const {
    ptx::bulk_load(shared_ + first + state_.stage() * Config::kStatBytes, from, rows * 4, full);
  }

  __device__ __forceinline__ void load_tiles(const CUtensorMap& q_map, ptx::TmaCoord q,
                                             const CUtensorMap& kv_map, ptx::TmaCoord kv,
                                             uint32_t to, uint32_t full) const {
#pragma unroll 1
    for (int p = 0; p < Config::kPanels; ++p) {
#pragma unroll
      for (int n = 0; n < Config::kConsumers; ++n) {
        ptx::tma_load(to + (p * kTileQ + n * kDbiasBoxRows) * 128, &q_map, full,
                      {p * 64, q.row + n * kDbiasBoxRows, q.head, q.batch}, ptx::kEvictNormal);
      }
      ptx::tma_load(to + Config::kQBytes + p * kTileKv * 128, &kv_map, full,
                    {p * 64, kv.row, kv.head, kv.batch}, ptx::kEvictNormal);
    }
  }

  const BackwardParams& params_;
  DbiasSharedStorage<Config>& storage_;
  const uint32_t shared_;
  State state_, dov_state_;  // the former also counts the ends of partials
};

template <class Config>
class DbiasMainloop {
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  using State = PipelineState<Config::kStages>;
  // This lane's elements: 4 n + 2 h + e is query row() + 8 h and key 8 n + 2 (lane % 4) + e.
  using Fragment = float[kTileKv / 2];
  static constexpr float kLog2EWide = kLog2E / kWideUnit;

 public:
  __device__ __forceinline__ DbiasMainloop(const BackwardParams& params, uint32_t shared,
                                           DbiasSharedStorage<Config>& storage, int32_t consumer)
      : params_(params), storage_(storage), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    for_each_partial<Config>(params_, storage_.cta_idx,
                             [&](const DbiasTile& tile, const StreamK::Partial& partial) {
                               __syncwarp();  // all lanes have read the last partial
                               if (lane() == 0) {
                                 storage_.tiles[warp()] = tile;
                                 storage_.partials[warp()] = partial;
                               }
                               __syncwarp();
                               Fragment acc;
                               load_bias(acc);
#pragma unroll
                               for (float& x : acc) x = 0.0f;
#pragma unroll 1
                               for (;;) {
                                 storage_.qk.consumer_wait(state_);
                                 if (step().end) break;
                                 accumulate(acc);
                               }
                               release(storage_.qk, state_);
                               state_.advance();
                               finish(acc);
                             });
  }

 private:
  // Volatile: fields are read from shared memory at each use, which saves registers.
  __device__ __forceinline__ const volatile DbiasTile& tile() const {
    return storage_.tiles[warp()];
  }
  // The producer has written this for the iteration at state_.
  __device__ __forceinline__ const volatile DbiasStep& step() const {
    return storage_.steps[state_.stage()];
  }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return no_hoist(threadIdx.x) / 32 - 4; }
  // The first of this lane's two rows of the tile; the other is row() + 8.
  __device__ __forceinline__ int32_t row() const { return warp() * 16 + lane() / 4; }
  // This lane's first query and key.
  __device__ __forceinline__ int32_t query() const { return tile().query + row(); }
  __device__ __forceinline__ int32_t key() const { return tile().key + lane() % 4 * 2; }

  // Stores this thread's part of the bias, in units of the scores, for its own use. acc: for
  // scratch.
  __device__ __forceinline__ void load_bias(Fragment& acc) const {
    const cuda::BackwardParams& common = params_.common;
    const Inputs& in = common.args.inputs;
    const DenseBias bias =
        DenseBias::of(common.problem, in, tile().batches.begin, tile().heads.begin);
#pragma unroll
    for (float& x : acc) x = 0.0f;
    DenseBiasTile<true>{bias,
                        query(),
                        key(),
                        common.args.shape.seqlen_q - query(),
                        common.args.shape.seqlen_kv - key(),
                        kLog2EWide,
                        DenseBiasTile<true>::can_pair(bias, in)}
        .forward(SLayout(), acc, 1.0f);
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
      ptx::store_shared(bias_address(n), acc[4 * n], acc[4 * n + 1], acc[4 * n + 2],
                        acc[4 * n + 3]);
    }
  }

  __device__ __forceinline__ uint32_t bias_address(int n) const {
    return shared_ + Config::kBias + (n * Config::kConsumers * 128 + threadIdx.x - 128) * 16;
  }

  // x = this consumer's rows of the Q tile, times the KV tile transposed.
  __device__ __forceinline__ void gemm(Fragment& x, uint32_t stage) const {
    const auto q = ptx::SmemDescriptor::at(stage + consumer_ * kDbiasBoxRows * 128, 0),
               kv = ptx::SmemDescriptor::at(stage + Config::kQBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < Config::kDim / 16; ++n) {
      ptx::wgmma_ss<T, 0, 0>(x, q.advance(n / 4 * kTileQ * 128 + n % 4 * 32).descriptor(),
                             kv.advance(n / 4 * kTileKv * 128 + n % 4 * 32).descriptor(), n > 0);
    }
    ptx::wgmma_commit();
  }

  // Each warp releases for itself: another may not have read its row statistics yet.
  __device__ __forceinline__ void release(Pipeline<Config::kStages>& pipeline, State at) const {
    __syncwarp();
    if (lane() == 0) pipeline.consumer_release(at);
  }

  __device__ __forceinline__ float load_stat(int first, State at, int half) const {
    return __uint_as_float(ptx::load_shared(shared_ + first + at.stage() * Config::kStatBytes +
                                            (row() + half * 8) * 4));
  }

  // Adds dS of a sequence and head, whose Q and K have arrived.
  __device__ __forceinline__ void accumulate(Fragment& acc) {
    Fragment s, dp;
    gemm(s, shared_ + state_.stage() * Config::kStageBytes);
    const bool full = step().full;
    const Lengths len{step().len.q, step().len.kv};
    float lse2[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse2[half] = load_stat(Config::kLse, state_, half) + kPExponent<T>;
      base[half] = load_stat(Config::kBase, state_, half);
      // Rows past the last have no lse and base; their scores are -inf.
      if (query() + half * 8 >= len.q) {
        lse2[half] = 0.0f;
        base[half] = NAN;
      }
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    release(storage_.qk, state_);
    state_.advance();
    if (full) {
      add_ds<false>(acc, s, dp, lse2, base, len);
    } else {
      add_ds<true>(acc, s, dp, lse2, base, len);
    }
  }

  // Turns products into scores, in the order of operations of lse_recompute.cuh.
  template <bool kMasked>
  __device__ __forceinline__ void modify(Fragment& s, const float (&base)[2], Lengths len) const {
    const float factor = params_.common.problem.scale * kLog2EWide;
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
      float bias[4];
      ptx::load_shared(bias, bias_address(n));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * n + e] = fmaf(s[4 * n + e], factor, bias[e]);
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = query() + half * 8;
        Interval seen{0, 0};
        if (i < len.q) seen = visible_keys(params_.common.problem.mask_rule(), i, len);
        IntervalMask{seen.begin - key(), seen.end - seen.begin}.forward(SRowLayout{half}, s);
      }
    }
    const bool has_base = base[0] == base[0] || base[1] == base[1];
    if (__any_sync(~0u, has_base)) {
      const RowBase rows[2] = {RowBase(base[0]), RowBase(base[1])};
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) s[i] = rows[i / 2 % 2].subtract_from(s[i]);
    }
  }

  // Adds P (dP - delta). Where P is 0, as masked elements are, dP may be NaN.
  template <bool kMasked>
  __device__ __forceinline__ void add_ds(Fragment& acc, Fragment& s, Fragment& dp,
                                         const float (&lse2)[2], const float (&base)[2],
                                         Lengths len) {
    modify<kMasked>(s, base, len);
    // Not before: registers do not hold dP beside the bias. The exponentials overlap it.
    storage_.dov.consumer_wait(dov_state_);
    gemm(dp, shared_ + Config::kDo + dov_state_.stage() * Config::kStageBytes);
    Fragment& p = s;
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) p[i] = ptx::exp2(fmaf(s[i], kWideUnit, -lse2[i / 2 % 2]));
    ptx::reg_fence(p);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(dp);
    const float delta[2] = {load_stat(Config::kDelta, dov_state_, 0) / kPUnit<T>,
                            load_stat(Config::kDelta, dov_state_, 1) / kPUnit<T>};
    release(storage_.dov, dov_state_);
    dov_state_.advance();
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      const float sum = fmaf(p[i], dp[i] - delta[i / 2 % 2], acc[i]);
      acc[i] = kMasked && p[i] == 0.0f ? acc[i] : sum;
    }
  }

  // Stores the sums of a whole tile, or adds those of a partial when it is its turn.
  __device__ __forceinline__ void finish(Fragment& acc) const {
    const volatile StreamK::Partial& partial = storage_.partials[warp()];
    if (partial.count == 1) return store(false, acc);
    const int32_t before = partial.first + partial.count - 1 - partial.index;
    int32_t* const added =
        dbias_counters(params_) + 1 + partial.split_tile * (Config::kConsumers * 4) + warp();
    if (lane() == 0) {
      while (ptx::load_acquire(added) != before) __nanosleep(20);
    }
    __syncwarp();
    store(before > 0, acc);
    __syncwarp();
    if (lane() == 0) ptx::red_add_release(added, 1);
  }

  __device__ __forceinline__ void store(bool adds, Fragment& acc) const {
    const BackwardArgs& args = params_.common.args;
    // A gradient per sequence ends where the sequence does.
    Lengths end{args.shape.seqlen_q, args.shape.seqlen_kv};
    if (args.dbias_stride_batch != 0) {
      end = seqlen_info(params_.common.problem, args.shape, args.inputs, tile().batches.begin).len;
    }
    const int32_t i = query(), j = key();
    float* const to = args.dbias + tile().batches.begin * args.dbias_stride_batch +
                      tile().heads.begin * args.dbias_stride_head + i * args.dbias_stride_row + j;
    const int64_t strides =
        args.dbias_stride_batch | args.dbias_stride_head | args.dbias_stride_row;
    const bool pairs = strides % 2 == 0 && reinterpret_cast<uintptr_t>(args.dbias) % 8 == 0;
    // Calls visit(element, pointer) for the elements of the gradient that the lane has.
    const auto visit = [&](auto pair, auto single) {
#pragma unroll
      for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const at = to + half * 8 * args.dbias_stride_row + n * 8;
          float* const x = &acc[4 * n + 2 * half];
          const int32_t keys = i + half * 8 < end.q ? end.kv - j - n * 8 : 0;
          if (pairs && keys >= 2) {
            pair(x, reinterpret_cast<float2*>(at));
          } else {
            if (keys > 0) single(x[0], at[0]);
            if (keys > 1) single(x[1], at[1]);
          }
        }
      }
    };
    if (adds) {
      visit(
          [](float* x, const float2* at) {
            const float2 sum = *at;
            x[0] += sum.x;
            x[1] += sum.y;
          },
          [](float& x, float sum) { x += sum; });
    }
    visit([](const float* x, float2* at) { *at = make_float2(x[0], x[1]); },
          [](float x, float& at) { at = x; });
  }

  const BackwardParams& params_;
  DbiasSharedStorage<Config>& storage_;
  const uint32_t shared_;
  const int32_t consumer_;   // warp-uniform
  State state_, dov_state_;  // the former also counts the ends of partials
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dbias_kernel(const __grid_constant__ BackwardParams params) {
  static_assert(kDbiasSharedBytes<Config> <= 227 * 1024, "shared memory of a CTA");
  char* const shared = ptx::dynamic_shared();
  auto& storage = *reinterpret_cast<DbiasSharedStorage<Config>*>(shared + Config::kMainBytes);
  // Warp-uniform, so that descriptors stay in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    storage.qk.init(1, Config::kConsumers * 4);  // warps
    storage.dov.init(1, Config::kConsumers * 4);
    ptx::fence_mbarrier_init();
    for (const CUtensorMap* map : {&params.q, &params.k, &params.dout, &params.v})
      ptx::tma_prefetch(map);
    storage.cta_idx = static_cast<int32_t>(blockIdx.x);
    if (params.stream_k.tiles_split() > 0) {
      storage.cta_idx = static_cast<int32_t>(gridDim.x) - 1 - atomicAdd(dbias_counters(params), 1);
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 0 && ptx::elect())
      DbiasProducer<Config>(params, ptx::shared_address(shared), storage).run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    DbiasMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1).run();
  }
}

}  // namespace flashattn::cuda::sm90
