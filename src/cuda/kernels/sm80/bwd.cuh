// The portable backward pass (FlashAttention-2, Dao 2023, algorithm 2) with mma.sync and cp.async:
// for all NVIDIA GPUs from Ampere on.
//
// A CTA holds kTileKv keys of a KV head and visits the Q tiles of all query heads of its GQA group.
// Warps form pairs over 16 kMmaM keys. The P warp computes S^T = K Q^T, P^T and dV += P^T dO; the
// dS warp computes dP^T = V dO^T, dS^T and dK += dS^T Q. P^T and dS^T stay in registers as A
// operands. Shared memory, whose bandwidth bounds mma.sync on large GPUs, carries only P from the P
// warp to the dS warp, and dS for dQ = dS K, which all warps compute and add to fp32 sums in global
// memory. With two stages, dQ of a tile is computed under the next tile, with one CTA barrier a
// tile.
//
// With large heads (dims 192 and 256) a warp has registers for dV or dK of 16 keys only, and each
// pair would read all of Q and dO for these few. So two pairs share 32 keys (kDimSplit = 2): each
// computes the scores of half of a tile's queries, and half of the columns of dV and dK. For these
// a warp reads the other pair's P or dS from shared memory. dS must not overwrite a P that is still
// read, so P has a tile of its own. A tile of 64 x 64 x 256 reads 510 KB instead of 710.
//
// fp32 (its budget is in mma_3xtf32.cuh) needs one stage only: a tile of 64 x 64 keeps the tensor
// cores busy for thousands of cycles, and its dQ is computed while the next tile arrives.
//
// Shared memory: K | V | stages of Q and dO | tiles of P, then dS | with kDimSplit: P | stages of
// lse and delta | BwdWorkTile.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/kernels/sm80/bwd_score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class BwdKernel : BwdScoreMod<Config> {
  using Base = BwdScoreMod<Config>;
  using Base::compute_p, Base::p_tile;
  using Base::kDimSplit, Base::kSlice, Base::kMmaM, Base::kTileQ, Base::score_tile;
  using Base::key_of, Base::lane_, Base::row_stats, Base::dim_split_idx, Base::pair_address,
      Base::pairs_address;
  using Base::params_, Base::work_tile_, Base::sees_some, Base::shared_, Base::warp_key_;
  using typename Base::PackedFragment;
  using typename Base::ScoreFragment;
  using typename Base::ScoreMod;
  using typename Base::ScoreTile;
  using typename Base::T;
  static constexpr int kDim = Config::kDim, kTileKv = Config::kTileKv;
  static constexpr int kAccColumns = Config::kAccColumns;  // columns of dV or dK of the warp
  static constexpr int kPWarp = 0, kDsWarp = 1;            // roles of the warps of a pair
  static constexpr int kThreads = Config::kThreads;

 public:
  __device__ __forceinline__ BwdKernel(const BackwardParams& params, BwdWorkTile& work_tile,
                                       uint32_t shared)
      : Base(params, work_tile, shared),
        role_(threadIdx.x / 32 / Config::kWarpPairs ^
              (Config::kWarps == 4 ? work_tile.roles_swapped : 0)) {}

  __device__ __forceinline__ void run() {
    const Inputs& in = params_.args.inputs;
    load_kv(0, in.k, params_.problem.dim_qk);
    load_kv(1, in.v, params_.problem.dim_v);
    Step step = next_step<Config>(params_, work_tile_,
                                  {work_tile_.heads.begin, work_tile_.tiles.begin - 1, true});
    load_q_do(q_do_source(step), 0);
    ptx::cp_async_commit();
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int n = 0; n < kAccColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_[mma_m][n][e] = 0.0f;
      }
    }
    int stage = 0;
#pragma unroll 1
    while (step.head < work_tile_.heads.end) {
      // Computed before the barrier, so that warps have their operands right behind it.
      const Step next = next_step<Config>(params_, work_tile_, step);
      const Interval queries = q_range<Config>(work_tile_, step);
      const bool full =
          queries.begin >= work_tile_.full.begin && queries.begin + kTileQ <= work_tile_.full.end;
      const bool seen = full || !Config::kSkipMaskedTiles || sees_some(queries);
      if constexpr (Config::kStages == 2) {
        const QDoSource source = q_do_source(next);
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile and dS of the last one have arrived; the other stage is free
        load_q_do(source, stage ^ 1);
        ptx::cp_async_commit();
        if (role_ == kDsWarp || !seen) add_dq(stage ^ 1);
        process_tile(step, queries, full, seen, stage);
        stage ^= 1;
      } else {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived
        process_tile(step, queries, full, seen, 0);
        const QDoSource source = q_do_source(next);
        __syncthreads();  // dS has arrived, and all warps have read the tile
        load_q_do(source, 0);
        ptx::cp_async_commit();
        add_dq(0);
      }
      step = next;
    }
    ptx::cp_async_wait<0>();
    if constexpr (Config::kStages == 2) {
      __syncthreads();
      add_dq(stage ^ 1);
    }
    epilogue();
  }

 private:
  __device__ __forceinline__ typename Config::QTile q_do_tile(int stage, int which) const {
    return {shared_ + 2 * Config::KvTile::kBytes + stage * Config::kStageBytes +
            which * Config::QTile::kBytes};
  }

  // Where a tile of Q and dO lies in global memory.
  struct QDoSource {
    const char *q, *dout;  // row 0 of the head
    const char* row_stat;  // the thread's value of lse2 or delta
    int32_t first, limit;  // rows of the tile; first = limit: no tile
  };

  __device__ __forceinline__ QDoSource q_do_source(Step step) const {
    const uint32_t n = no_hoist(threadIdx.x);
    const int32_t first = step.tile * kTileQ;
    const int64_t i = first + static_cast<int32_t>(n % kTileQ);
    return {work_tile_.q.of(step.head), work_tile_.dout.of(step.head),
            work_tile_.row_stats[n / kTileQ % 2].of(step.head) + i * 4, first,
            step.head < work_tile_.heads.end ? work_tile_.sequence.len.q : first};
  }

  __device__ __forceinline__ void load_q_do(const QDoSource& source, int stage) const {
    if (source.first >= source.limit) return;
    const int64_t size = sizeof(T);
    load_tokens<kThreads>(q_do_tile(stage, 0), params_.problem.dim_qk,
                          {source.q, params_.args.inputs.q.stride_seq * size}, source.first,
                          source.limit);
    load_tokens<kThreads>(q_do_tile(stage, 1), params_.problem.dim_v,
                          {source.dout, params_.dout.stride_seq * size}, source.first,
                          source.limit);
    const uint32_t n = no_hoist(threadIdx.x);
    if (n >= 2 * kTileQ) return;
    ptx::cp_async_4(row_stats(stage) + n * 4, source.row_stat,
                    source.first + static_cast<int32_t>(n % kTileQ) < source.limit);
  }

  // Starts cp.async of K (which = 0) or V (1).
  __device__ __forceinline__ void load_kv(int which, const flashattn_tensor& tensor, int dim) {
    load_tokens<kThreads>(typename Config::KvTile{shared_ + which * Config::KvTile::kBytes}, dim,
                          head_rows<sizeof(T)>(tensor, work_tile_.b, work_tile_.kv_head,
                                               work_tile_.sequence.offset_kv),
                          work_tile_.keys.begin, work_tile_.keys.end);
  }

  // Adds a tile's part to dK and dV, and stores its dS. seen: some query may see a key of the warp.
  __device__ __forceinline__ void process_tile(Step step, Interval queries, bool full, bool seen,
                                               int stage) {
    if (threadIdx.x == 0) work_tile_.steps[stage] = step;
    if (seen) {
      compute_tile(step, queries, full, stage);
    } else if (role_ == kDsWarp) {
      clear_ds(stage);
    }
  }

  // Stores dS = 0 if no query of the tile sees a key of the warp.
  __device__ __forceinline__ void clear_ds(int stage) const {
#pragma unroll
    for (int n = 0; n < kTileQ / 8; ++n) {
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) {
        PackedPair<T>::of(0.0f, 0.0f)
            .store_shared(pair_address(pairs_address(stage, 0), n, x / 2, x % 2));
      }
    }
  }

  __device__ __forceinline__ void compute_tile(Step step, Interval queries, bool full, int stage) {
    const uint32_t k_or_v = a_k_major(
        typename Config::KvTile{shared_ + role_ * Config::KvTile::kBytes}, warp_key_, lane_);
    const int split_idx = dim_split_idx();
#pragma unroll 1
    for (int begin = 0; begin < Config::kWarpTileQ; begin += kSlice) {
      const int slice = split_idx * Config::kWarpTileQ + begin;
      ScoreFragment s = {};
      PackedFragment packed;
      gemm_nt<T, kDim>(s, k_or_v, b_k_major(q_do_tile(stage, role_), slice, lane_));
      // The named barrier of the pair and slice; 0 is __syncthreads().
      const int32_t key_warp = warp_key_ / (16 * kMmaM);
      const int32_t barrier =
          1 + key_warp * kDimSplit + split_idx + begin / kSlice * Config::kWarpPairs;
      if (role_ == kPWarp) {
        compute_p(s, packed, step, queries, full, stage, slice);
        ptx::named_arrive(barrier, 64);
        // The dS warp did its part of dQ while this warp computed exponentials, and computes dS
        // now.
        if (Config::kStages == 2 && begin == 0) add_dq(stage ^ 1);
      } else {
        ptx::named_sync(barrier, 64);
        if (ScoreMod::template kHas<Dropout> && params_.dropout_threshold != 0) {
          compute_ds<true, true>(s, packed, stage, slice);
        } else if (ScoreMod::kIsPlain && full) {
          compute_ds<false, false>(s, packed, stage, slice);
        } else {
          compute_ds<false, true>(s, packed, stage, slice);
        }
      }
      accumulate(packed, stage, slice, split_idx);
      if constexpr (kDimSplit == 2) {
        ptx::named_sync(1 + Config::kPairBarriers + key_warp * 2 + role_, 64);
        const uint32_t other =
            fragment_address(role_ == kPWarp ? Config::kStages : stage, slice ^ kSlice);
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k) load_fragment(packed, other, k);
        accumulate(packed, stage, slice ^ kSlice, split_idx);
      }
    }
  }

  // dV += P^T dO, or dK += dS^T Q, over a slice of queries.
  __device__ __forceinline__ void accumulate(const PackedFragment& packed, int stage, int slice,
                                             int split_idx) {
    using Tile = typename Config::QTile;
    const uint32_t rows = b_mn_major(q_do_tile(stage, role_ ^ 1), slice, lane_);
    gemm_rs<T, kSlice / 16, kDim>(
        acc_, Tile::advance(rows, split_idx * 32 / Tile::kChunkElements),
        [&](int mma_m, int k, int x) { return acc_as_a<T>(packed[mma_m], k, x); });
  }

  // The lane's ldmatrix address of a slice of a tile of P or dS.
  __device__ __forceinline__ uint32_t fragment_address(int tile, int slice) const {
    return ScoreTile::advance(a_k_major(score_tile(tile), warp_key_, no_hoist(lane_)),
                              slice / ScoreTile::kChunkElements);
  }

  // Loads columns [16 k, 16 k + 16) of a slice.
  static __device__ __forceinline__ void load_fragment(PackedFragment& packed, uint32_t from,
                                                       int k) {
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, ScoreTile::advance(from, 2 * k) + mma_m * 16 * ScoreTile::kRowBytes);
#pragma unroll
      for (int x = 0; x < 4; ++x) packed[mma_m][2 * k + x / 2][x % 2] = {words[x]};
    }
  }

  // dS = P (dP - delta): returned packed, and stored for dQ. P comes from shared memory, times the
  // softcap's derivative, and negative where dropout drops (kHasDropout). kMasked: where P is 0, dS
  // is 0 even if dP is infinite or NaN.
  template <bool kHasDropout, bool kMasked>
  __device__ __forceinline__ void compute_ds(const ScoreFragment& dp, PackedFragment& packed,
                                             int stage, int slice) const {
    const int tile = p_tile(stage);
    const uint32_t from =
        kDimSplit == 2 ? fragment_address(tile, slice) : pairs_address(tile, slice);
    const uint32_t to = pairs_address(stage, slice);
    const uint32_t delta = row_stats(stage) + (kTileQ + slice + lane_ % 4 * 2) * 4;
    const float p_scale = Dropout::keep_scale(params_.dropout_threshold) * kPUnit<T>;
    // P and delta of the next columns are loaded while these are computed.
    PackedFragment p_fragment;
    float2 rows[2];
    const auto load = [&](int n) {
      rows[n % 2] = ptx::load_shared_pair(delta + n * 32);
      if constexpr (kDimSplit == 2) {
        if (n % 2 == 0) load_fragment(p_fragment, from, n / 2);
      } else {
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          p_fragment[x / 2][n][x % 2] =
              PackedPair<T>::load_shared(pair_address(from, n, x / 2, x % 2));
        }
      }
    };
    load(0);
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
      if (n + 1 < kSlice / 8) load(n + 1);
      const float2 row = rows[n % 2];
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const PackedPair<T> weight = p_fragment[mma_m][n][half];
          float2 p = weight.to_float2();
          float x = dp[mma_m][n][half * 2], y = dp[mma_m][n][half * 2 + 1];
          if constexpr (kHasDropout) {
            x = fmaf(__float_as_uint(p.x) >> 31 ? 0.0f : x, p_scale, -row.x);
            y = fmaf(__float_as_uint(p.y) >> 31 ? 0.0f : y, p_scale, -row.y);
            p = make_float2(fabsf(p.x), fabsf(p.y));
          } else {
            x = subtract_delta<T>(x, row.x);
            y = subtract_delta<T>(y, row.y);
          }
          PackedPair<T>& ds = packed[mma_m][n][half];
          ds = PackedPair<T>::of(p.x * x, p.y * y);
          if constexpr (kMasked) ds = ds.zero_where_zero(weight);
          ds.store_shared(pair_address(to, n, mma_m, half));
        }
      }
    }
  }

  // Adds dQ = dS K of a tile to global memory. A warp computes 32 queries, kDqColumns columns.
  __device__ __forceinline__ void add_dq(int stage) const {
    const Step step = work_tile_.steps[stage];
    if (step.head < 0) return;
    constexpr int kAccColumns = Config::kDqColumns;
    // As many columns at once as fit the registers beside dV or dK.
    constexpr int kColumnsAtOnce = kDim * sizeof(T) > 768 ? 16 : kAccColumns;
#pragma unroll 1
    for (int first_column = 0; first_column < kAccColumns; first_column += kColumnsAtOnce)
      add_dq_columns<kColumnsAtOnce>(step, stage, first_column);
    if (!params_.dq_order) return;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();
      ptx::red_add_release(dq_semaphore<Config>(params_, work_tile_, step), 1);
    }
  }

  template <int kAccColumns>
  __device__ __forceinline__ void add_dq_columns(Step step, int stage, int first_column) const {
    const int32_t warp = no_hoist(threadIdx.x) / 32, row = warp % Config::kDqRowWarps * 32;
    const int32_t column = warp / Config::kDqRowWarps * Config::kDqColumns + first_column;
    float dq[2][kAccColumns / 8][4] = {};
    gemm_tn<T, ScoreTile, typename Config::KvTile>(
        dq, a_mn_major(score_tile(stage), row, lane_),
        b_mn_major(typename Config::KvTile{shared_}, 0, lane_), column);
    if (params_.dq_order && first_column == 0) {
      if (lane_ == 0) wait_dq_semaphore<Config>(params_, work_tile_, step);
      __syncwarp();
    }
    const int32_t i = step.tile * kTileQ + row + lane_ / 4, limit = work_tile_.sequence.len.q;
    char* const to = work_tile_.dq.of(step.head);
    if (params_.problem.dim_qk == kDim && step.tile * kTileQ <= limit - kTileQ) {
      red_add_dq(dq, to, kDim, i, column, lane_, [](int, int) { return 16; });
    } else {
      const int32_t dim = params_.problem.dim_qk;
      red_add_dq(dq, to, dim, i, column, lane_,
                 [=](int x, int y) { return i + x < limit ? dim - column - y : 0; });
    }
  }

  // Adds dq to queries i, i + 8, i + 16, i + 24 from `column` on; a row has `dim` values. left(x,
  // y): the number of columns that query i + x has from column + y on; 0 or less: none.
  template <int kMmaN, class Left>
  static __device__ __forceinline__ void red_add_dq(const float (&dq)[2][kMmaN][4], char* rows,
                                                    int32_t dim, int32_t i, int32_t column,
                                                    int lane, Left left) {
    float* const to = reinterpret_cast<float*>(rows + static_cast<int64_t>(i) * (dim * 4)) + column;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
#pragma unroll
      for (int n = 0; n < kMmaN; n += 2) {
        const float *first = &dq[x / 2][n][x % 2 * 2], *second = &dq[x / 2][n + 1][x % 2 * 2];
        red_add_columns(to + x * 8 * dim + n * 8, make_float2(first[0], first[1]),
                        make_float2(second[0], second[1]), left(x * 8, n * 8), lane);
      }
    }
  }

  __device__ __forceinline__ void epilogue() const {
    const flashattn_tensor& tensor = role_ == kPWarp ? params_.args.dv : params_.args.dk;
    const int32_t dim = role_ == kPWarp ? params_.problem.dim_v : params_.problem.dim_qk;
    const float p_scale = Dropout::keep_scale(params_.dropout_threshold) * kPUnit<T>;
    const float factor = role_ == kPWarp ? p_scale : params_.problem.scale;
    const int32_t j = key_of(0, 0), rows = work_tile_.keys.end - j;
    const int32_t first = dim_split_idx() * 32;
    char* to = tensor_row(tensor, sizeof(T), work_tile_.b, work_tile_.kv_head,
                          work_tile_.sequence.offset_kv + j) +
               first * sizeof(T);
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x, to += 8 * tensor.stride_seq * sizeof(T)) {
      const int32_t columns = x * 8 < rows ? dim - first : 0;
#pragma unroll
      for (int n = 0; n < kAccColumns / 8; n += 4) {
        store_acc(x, n, factor, to + n * 8 * kDimSplit * sizeof(T), columns - n * 8 * kDimSplit);
      }
    }
  }

  // Stores 32 columns, from n8 tile n on, of accumulator row x; columns from `columns` on do not
  // exist.
  __device__ __forceinline__ void store_acc(int x, int n, float factor, char* to,
                                            int32_t columns) const {
    PackedPair<T> pairs[4];
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      const float* sums = &acc_[x / 2][n + y][x % 2 * 2];
      pairs[y] = PackedPair<T>::of(sums[0] * factor, sums[1] * factor);
    }
    store_quad(pairs, to, columns, lane_);
  }

  const int role_;  // kPWarp or kDsWarp: the warp's role in its pair
  // dV (P warp) or dK (dS warp); with kDimSplit = 2 every second range of 32 columns.
  float acc_[kMmaM][kAccColumns / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    bwd_kernel(const __grid_constant__ BackwardParams params) {
  char* const shared = ptx::dynamic_shared();
  BwdWorkTile& work_tile = *reinterpret_cast<BwdWorkTile*>(shared + Config::kWorkTileOffset);
  if (threadIdx.x == 0) work_tile = make_work_tile<Config>(params);
  __syncthreads();
  if (work_tile.keys.begin >= work_tile.keys.end) return;
  BwdKernel<Config>(params, work_tile, ptx::shared_address(shared)).run();
}

}  // namespace flashattn::cuda::sm80
