// The portable backward pass (Dao 2023, algorithm 2) on mma.sync and cp.async: every NVIDIA GPU
// from Ampere on.
//
// One block holds kTileKv keys of a KV head and sees all queries of its group pass by. Warps work
// in pairs on 16 * kMmaM keys: the weights' warp computes S^T = K Q^T, P and dV += P^T dO, the
// gradients' warp dP^T = V dO^T, dS and dK += dS^T Q. The left operands of the second products
// never leave the registers; what shared memory must carry, which bounds mma.sync on large GPUs, is
// P from one warp to the other, and dS for dQ = dS K, which all warps share and add to fp32 sums in
// global memory. With two stages dQ of a tile is computed under the next one, and one barrier a
// tile serves everything.
//
// Of long rows (dims 192 and 256) a warp has registers for the sums of 16 keys only, and each pair
// would read all of Q and dO for no more than these. So two pairs share 32 keys (kHalves = 2): each
// computes the scores of half of a tile's queries, and half of the columns of dV and dK. For those
// a warp reads the other half's P or dS from shared memory; dS must not overwrite a P that is still
// read, so P has a tile of its own. A tile of 64 x 64 x 256 takes 510 KB of reads instead of 710.
//
// Of fp32 (see mma_3xtf32.cuh for the budget) one stage will do: a tile of 64 x 64 keeps the
// tensor cores busy for thousands of cycles, and dQ of it is computed while the next one arrives.
//
// Shared memory: K | V | stages of Q | dO | tiles of P, then dS | of halves: P | stages of lse and
// D | BackwardPlace.
#pragma once

#include "cuda/kernels/sm80/bwd_score_mod.cuh"
#include "cuda/ptx/barrier.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class BackwardBlock : BackwardScores<Config> {
  using Base = BackwardScores<Config>;
  using Base::key_of, Base::lane_, Base::numbers, Base::own_half, Base::pair_at, Base::pairs_at;
  using Base::kHalves, Base::kSlice, Base::kMmaM, Base::kTileQ, Base::score_tile;
  using Base::params_, Base::place_, Base::sees_some, Base::shared_, Base::warp_key_;
  using Base::weights, Base::weights_tile;
  using typename Base::Held;
  using typename Base::ScoreFragment;
  using typename Base::ScoreTile;
  using typename Base::T;
  static constexpr int kDim = Config::kDim, kTileKv = Config::kTileKv;
  static constexpr int kColumns = Config::kColumns;  // of the warp's sums
  static constexpr int kThreads = Config::kThreads;

 public:
  __device__ __forceinline__ BackwardBlock(const BackwardParams& params, BackwardPlace& place,
                                           uint32_t shared)
      : Base(params, place, shared),
        gradients_(threadIdx.x / 32 / Config::kPairs ^ (Config::kWarps == 4 ? place.swapped : 0)) {}

  __device__ __forceinline__ void run() {
    const Inputs& in = params_.args.inputs;
    load_keys(0, in.k, params_.problem.dim_qk);
    load_keys(1, in.v, params_.problem.dim_v);
    Step now =
        next_step<Config>(params_, place_, {place_.heads.begin, place_.tiles.begin - 1, true});
    load_queries(source_of(now), 0);
    ptx::cp_async_commit();
#pragma unroll
    for (int strip = 0; strip < kMmaM; ++strip) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum_[strip][n][e] = 0.0f;
      }
    }
    int stage = 0;
#pragma unroll 1
    while (now.head < place_.heads.end) {
      // What can be known before a barrier: nobody has anything else to do after it.
      const Step after = next_step<Config>(params_, place_, now);
      const Interval queries = queries_of<Config>(place_, now);
      const bool full =
          queries.begin >= place_.full.begin && queries.begin + kTileQ <= place_.full.end;
      const bool seen = full || !Config::kSkips || sees_some(queries);
      if constexpr (Config::kStages == 2) {
        const Source source = source_of(after);
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is here, dS of the one before, and the other stage is free
        load_queries(source, stage ^ 1);
        ptx::cp_async_commit();
        if (gradients_ == 1 || !seen) add_dq(stage ^ 1);
        work(now, queries, full, seen, stage);
        stage ^= 1;
      } else {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is here
        work(now, queries, full, seen, 0);
        const Source source = source_of(after);
        __syncthreads();  // dS is here, and the tile's readers are done
        load_queries(source, 0);
        ptx::cp_async_commit();
        add_dq(0);
      }
      now = after;
    }
    ptx::cp_async_wait<0>();
    if constexpr (Config::kStages == 2) {
      __syncthreads();
      add_dq(stage ^ 1);
    }
    finish();
  }

 private:
  __device__ __forceinline__ typename Config::QueryTile query_tile(int stage, int which) const {
    return {shared_ + 2 * Config::KeyTile::kBytes + stage * Config::kStageBytes +
            which * Config::QueryTile::kBytes};
  }

  // Where a tile of queries comes from.
  struct Source {
    const char *q, *dout;  // row 0 of the head
    const char* number;    // the thread's own, of lse2 and D
    int32_t first, limit;  // rows of the tile; none: there is no tile
  };

  __device__ __forceinline__ Source source_of(Step step) const {
    const uint32_t n = no_hoist(threadIdx.x);
    const int32_t first = step.tile * kTileQ;
    const int64_t i = first + static_cast<int32_t>(n % kTileQ);
    return {place_.q.of(step.head), place_.dout.of(step.head),
            place_.numbers[n / kTileQ % 2].of(step.head) + i * 4, first,
            step.head < place_.heads.end ? place_.sequence.len.q : first};
  }

  __device__ __forceinline__ void load_queries(const Source& source, int stage) const {
    if (source.first >= source.limit) return;
    const int64_t size = sizeof(T);
    load_tokens<kThreads>(query_tile(stage, 0), params_.problem.dim_qk,
                          {source.q, params_.args.inputs.q.stride_seq * size}, source.first,
                          source.limit);
    load_tokens<kThreads>(query_tile(stage, 1), params_.problem.dim_v,
                          {source.dout, params_.dout.stride_seq * size}, source.first,
                          source.limit);
    const uint32_t n = no_hoist(threadIdx.x);
    if (n >= 2 * kTileQ) return;
    ptx::cp_async_4(numbers(stage) + n * 4, source.number,
                    source.first + static_cast<int32_t>(n % kTileQ) < source.limit);
  }

  // Of K or V.
  __device__ __forceinline__ void load_keys(int which, const flashattn_tensor& tensor, int dim) {
    load_tokens<kThreads>(
        typename Config::KeyTile{shared_ + which * Config::KeyTile::kBytes}, dim,
        head_rows<sizeof(T)>(tensor, place_.b, place_.kv_head, place_.sequence.offset_kv),
        place_.keys.begin, place_.keys.end);
  }

  // What a tile adds to dK and dV, and its dS to shared memory.
  __device__ __forceinline__ void work(Step step, Interval queries, bool full, bool seen,
                                       int stage) {
    if (threadIdx.x == 0) place_.steps[stage] = step;
    if (seen) {
      multiply(step, queries, full, stage);
    } else if (gradients_ == 1) {
      clear(stage);
    }
  }

  // dS of a tile whose queries see none of the warp's keys.
  __device__ __forceinline__ void clear(int stage) const {
#pragma unroll
    for (int n = 0; n < kTileQ / 8; ++n) {
#pragma unroll
      for (int x = 0; x < kMmaM * 2; ++x) {
        PackedPair<T>::of(0.0f, 0.0f).store_shared(pair_at(pairs_at(stage, 0), n, x / 2, x % 2));
      }
    }
  }

  __device__ __forceinline__ void multiply(Step step, Interval queries, bool full, int stage) {
    const uint32_t left = left_rows(
        typename Config::KeyTile{shared_ + gradients_ * Config::KeyTile::kBytes}, warp_key_, lane_);
    const int half = own_half();
#pragma unroll 1
    for (int begin = 0; begin < Config::kShare; begin += kSlice) {
      const int slice = half * Config::kShare + begin;
      ScoreFragment s = {};
      Held held;
      multiply_rows<T, kDim>(s, left, right_rows(query_tile(stage, gradients_), slice, lane_));
      // Barrier 0 is the block's.
      const int32_t keys = warp_key_ / (16 * kMmaM);
      const int32_t barrier = 1 + keys * kHalves + half + begin / kSlice * Config::kPairs;
      if (gradients_ == 0) {
        weights(s, held, step, queries, full, stage, slice);
        ptx::named_arrive(barrier, 64);
        // The other warp has done its share while this one computed exponentials, and has work now.
        if (Config::kStages == 2 && begin == 0) add_dq(stage ^ 1);
      } else {
        ptx::named_sync(barrier, 64);
        if (Config::kModified && params_.dropout_threshold != 0) {
          gradients<true, true>(s, held, stage, slice);
        } else if (!Config::kModified && full) {
          gradients<false, false>(s, held, stage, slice);
        } else {
          gradients<false, true>(s, held, stage, slice);
        }
      }
      add_products(held, stage, slice, half);
      if constexpr (kHalves == 2) {
        ptx::named_sync(1 + Config::kPairBarriers + keys * 2 + gradients_, 64);
        const uint32_t other = held_at(gradients_ == 0 ? Config::kStages : stage, slice ^ kSlice);
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k) load_held(held, other, k);
        add_products(held, stage, slice ^ kSlice, half);
      }
    }
  }

  // To dV or dK what a slice of weights or dS gives.
  __device__ __forceinline__ void add_products(const Held& held, int stage, int slice, int half) {
    using Tile = typename Config::QueryTile;
    const uint32_t rows = summed_rows(query_tile(stage, gradients_ ^ 1), slice, lane_);
    multiply_held<T, kSlice / 16, kDim>(
        sum_, Tile::advance(rows, half * 32 / Tile::kChunkElements),
        [&](int strip, int k, int x) { return held_word<T>(held[strip], k, x); });
  }

  // Where load_held reads a slice of a tile of scores.
  __device__ __forceinline__ uint32_t held_at(int tile, int slice) const {
    return ScoreTile::advance(left_rows(score_tile(tile), warp_key_, no_hoist(lane_)),
                              slice / ScoreTile::kChunkElements);
  }

  // Of it columns [16 k, 16 k + 16).
  static __device__ __forceinline__ void load_held(Held& held, uint32_t from, int k) {
#pragma unroll
    for (int strip = 0; strip < kMmaM; ++strip) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, ScoreTile::advance(from, 2 * k) + strip * 16 * ScoreTile::kRowBytes);
#pragma unroll
      for (int x = 0; x < 4; ++x) held[strip][2 * k + x / 2][x % 2] = {words[x]};
    }
  }

  // dP and the other warp's weights to dS: as operands, and for dQ.
  // kHidden: some may be hidden, which must not turn an infinite gradient into NaN.
  template <bool kDropped, bool kHidden>
  __device__ __forceinline__ void gradients(const ScoreFragment& dp, Held& held, int stage,
                                            int slice) const {
    const int tile = weights_tile(stage);
    const uint32_t from = kHalves == 2 ? held_at(tile, slice) : pairs_at(tile, slice);
    const uint32_t to = pairs_at(stage, slice);
    const uint32_t delta = numbers(stage) + (kTileQ + slice + lane_ % 4 * 2) * 4;
    const float kept = 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
    // Those of the next columns are on their way while some are worked on.
    Held weights;
    float2 rows[2];
    const auto load = [&](int n) {
      rows[n % 2] = ptx::load_shared_pair(delta + n * 32);
      if constexpr (kHalves == 2) {
        if (n % 2 == 0) load_held(weights, from, n / 2);
      } else {
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          weights[x / 2][n][x % 2] = PackedPair<T>::load_shared(pair_at(from, n, x / 2, x % 2));
        }
      }
    };
    load(0);
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
      if (n + 1 < kSlice / 8) load(n + 1);
      const float2 row = rows[n % 2];
#pragma unroll
      for (int strip = 0; strip < kMmaM; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const PackedPair<T> weight = weights[strip][n][half];
          float2 p = weight.numbers();
          float x = dp[strip][n][half * 2], y = dp[strip][n][half * 2 + 1];
          if constexpr (kDropped) {
            x = fmaf(__float_as_uint(p.x) >> 31 ? 0.0f : x, kept, -row.x);
            y = fmaf(__float_as_uint(p.y) >> 31 ? 0.0f : y, kept, -row.y);
            p = make_float2(fabsf(p.x), fabsf(p.y));
          } else {
            x -= row.x;
            y -= row.y;
          }
          PackedPair<T>& ds = held[strip][n][half];
          ds = PackedPair<T>::of(p.x * x, p.y * y);
          if constexpr (kHidden) ds = ds.where(weight);
          ds.store_shared(pair_at(to, n, strip, half));
        }
      }
    }
  }

  // dQ of a tile from its dS. Each warp computes 32 queries and its share of the columns.
  __device__ __forceinline__ void add_dq(int stage) const {
    const Step step = place_.steps[stage];
    if (step.head < 0) return;
    constexpr int kColumns = Config::kColumnsDq;
    // As many at a time as there are registers for beside the sums.
    constexpr int kPass = kDim * sizeof(T) > 768 ? 16 : kColumns;
#pragma unroll 1
    for (int pass = 0; pass < kColumns; pass += kPass) add_dq_columns<kPass>(step, stage, pass);
    if (!params_.dq_order) return;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();
      ptx::add_release(turn_of<Config>(params_, place_, step), 1);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void add_dq_columns(Step step, int stage, int pass) const {
    const int32_t warp = no_hoist(threadIdx.x) / 32, row = warp % Config::kRowsDq * 32;
    const int32_t column = warp / Config::kRowsDq * Config::kColumnsDq + pass;
    float dq[2][kColumns / 8][4] = {};
    multiply_transposed<T, ScoreTile, typename Config::KeyTile>(
        dq, transposed_rows(score_tile(stage), row, lane_),
        summed_rows(typename Config::KeyTile{shared_}, 0, lane_), column);
    if (params_.dq_order && pass == 0) {
      if (lane_ == 0) await_turn<Config>(params_, place_, step);
      __syncwarp();
    }
    const int32_t i = step.tile * kTileQ + row + lane_ / 4, limit = place_.sequence.len.q;
    char* const to = place_.dq.of(step.head);
    if (params_.problem.dim_qk == kDim && step.tile * kTileQ <= limit - kTileQ) {
      add_sums(dq, to, kDim, i, column, lane_, [](int, int) { return 16; });
    } else {
      const int32_t dim = params_.problem.dim_qk;
      add_sums(dq, to, dim, i, column, lane_,
               [=](int x, int y) { return i + x < limit ? dim - column - y : 0; });
    }
  }

  // To query i of rows of `dim` numbers, from `column` on. left(x, y): how many columns query i + x
  // has from column + y on.
  template <int kGroups, class Left>
  static __device__ __forceinline__ void add_sums(const float (&dq)[2][kGroups][4], char* rows,
                                                  int32_t dim, int32_t i, int32_t column, int lane,
                                                  Left left) {
    float* const to = reinterpret_cast<float*>(rows + static_cast<int64_t>(i) * (dim * 4)) + column;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
#pragma unroll
      for (int n = 0; n < kGroups; n += 2) {
        const float *first = &dq[x / 2][n][x % 2 * 2], *second = &dq[x / 2][n + 1][x % 2 * 2];
        add_columns(to + x * 8 * dim + n * 8, make_float2(first[0], first[1]),
                    make_float2(second[0], second[1]), left(x * 8, n * 8), lane);
      }
    }
  }

  __device__ __forceinline__ void finish() const {
    const flashattn_tensor& tensor = gradients_ == 0 ? params_.args.dv : params_.args.dk;
    const int32_t dim = gradients_ == 0 ? params_.problem.dim_v : params_.problem.dim_qk;
    const float kept = 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
    const float factor = gradients_ == 0 ? kept : params_.problem.scale;
    const int32_t j = key_of(0, 0), rows = place_.keys.end - j;
    const int32_t first = own_half() * 32;
    char* to =
        tensor_row(tensor, sizeof(T), place_.b, place_.kv_head, place_.sequence.offset_kv + j) +
        first * sizeof(T);
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x, to += 8 * tensor.stride_seq * sizeof(T)) {
      const int32_t columns = x * 8 < rows ? dim - first : 0;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 4) {
        store_columns(x, n, factor, to + n * 8 * kHalves * sizeof(T), columns - n * 8 * kHalves);
      }
    }
  }

  // Of row x of the strips 32 sums, from group n on, as far as there are columns.
  __device__ __forceinline__ void store_columns(int x, int n, float factor, char* to,
                                                int32_t columns) const {
    PackedPair<T> pairs[4];
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      const float* sums = &sum_[x / 2][n + y][x % 2 * 2];
      pairs[y] = PackedPair<T>::of(sums[0] * factor, sums[1] * factor);
    }
    store_quad(pairs, to, columns, lane_);
  }

  const int gradients_;  // 0: the weights' warp of its pair, 1: the gradients'
  // dV or dK; of halves every second 32 columns.
  float sum_[kMmaM][kColumns / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  char* const shared = ptx::dynamic_shared();
  BackwardPlace& place = *reinterpret_cast<BackwardPlace*>(shared + Config::kPlace);
  if (threadIdx.x == 0) place = find_place<Config>(params);
  __syncthreads();
  if (place.keys.begin >= place.keys.end) return;
  BackwardBlock<Config>(params, place, ptx::shared_address(shared)).run();
}

}  // namespace flashattn::cuda::sm80
