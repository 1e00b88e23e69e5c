// The portable backward pass (Dao 2023, algorithm 2) on mma.sync and cp.async: every NVIDIA GPU
// from Ampere on.
//
// One block holds kTileKv keys of a KV head and sees all queries of its group pass by. Warps work
// in pairs on 16 * kStrips keys: the weights' warp computes S^T = K Q^T, P and dV += P^T dO, the
// gradients' warp dP^T = V dO^T, dS and dK += dS^T Q. The left operands of the second products
// never leave the registers; what shared memory must carry, which bounds mma.sync on large GPUs, is
// P from one warp to the other, and dS for dQ = dS K, which all warps share and add to fp32 sums in
// global memory. With two stages dQ of a tile is computed under the next one, and one barrier a
// tile serves everything.
//
// Of fp32 (see products_fp32.cuh for the budget) one stage will do: a tile of 64 x 64 keeps the
// tensor cores busy for thousands of cycles, and dQ of it is computed while the next one arrives.
//
// Shared memory: K | V | stages of Q | dO | tiles of P, then dS | stages of lse and D |
// BackwardPlace.
#pragma once

#include <type_traits>

#include "cuda/sm80/backward_place.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda::sm80 {

// kModified: as in the forward pass.
template <class T_, int kDim_, int kStrips_, int kPairs_, int kTileQ_, int kSlice_, int kStages_,
          int kMinBlocks_, bool kModified_>
struct BackwardConfig {
  using T = T_;
  static constexpr int kDim = kDim_;        // of the tiles; smaller heads are padded
  static constexpr int kStrips = kStrips_;  // of 16 keys, a pair of warps
  static constexpr int kPairs = kPairs_;
  static constexpr int kSlice = kSlice_;  // queries whose scores are held at once
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;  // on a multiprocessor, as registers allow
  static constexpr bool kModified = kModified_;
  static constexpr int kWarps = 2 * kPairs, kThreads = 32 * kWarps;
  static constexpr int kTileQ = kTileQ_, kTileKv = 16 * kStrips * kPairs;
  static constexpr bool kWide = std::is_same<T, float>::value;

  using KeyTile = SharedTile<kTileKv, kDim, sizeof(T)>;
  using QueryTile = SharedTile<kTileQ, kDim, sizeof(T)>;
  using ScoreTile = SharedTile<kTileKv, kTileQ, sizeof(T)>;  // rows are keys
  static constexpr int kNumberBytes = 2 * kTileQ * 4;
  static constexpr int kStageBytes = 2 * QueryTile::kBytes;
  static constexpr int kPlace =
      2 * KeyTile::kBytes + kStages * (kStageBytes + ScoreTile::kBytes + kNumberBytes);
  static constexpr int kSharedBytes = kPlace + sizeof(BackwardPlace);
  static_assert(kPairs * (kTileQ / kSlice) < 16, "as many barriers as there are");
  static_assert(kTileQ % 32 == 0 && 2 * kTileQ <= kThreads, "dQ: rows of warps, 32 queries each");
  static constexpr int kRowsDq = kTileQ / 32, kColumnsDq = kDim * kRowsDq / kWarps;
  static_assert(kColumnsDq % 16 == 0, "whole operands");
};

template <class Config>
class BackwardBlock {
  using T = typename Config::T;
  static constexpr int kDim = Config::kDim, kStrips = Config::kStrips, kSlice = Config::kSlice;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kThreads = Config::kThreads;
  using ScoreTile = typename Config::ScoreTile;
  using Scores = float[kStrips][kSlice / 8][4];
  using Held = Pair<T>[kStrips][kSlice / 8][2];  // of queries, rows g and g + 8

 public:
  __device__ __forceinline__ BackwardBlock(const BackwardParams& params, BackwardPlace& place,
                                           uint32_t shared)
      : params_(params),
        place_(place),
        shared_(shared),
        lane_(threadIdx.x % 32),
        gradients_(threadIdx.x / 32 / Config::kPairs ^ (Config::kWarps == 4 ? place.swapped : 0)),
        warp_key_(threadIdx.x / 32 % Config::kPairs * 16 * kStrips) {}

  __device__ __forceinline__ void run() {
    const flashattn_inputs& in = params_.args.inputs;
    load_tokens<kThreads>(typename Config::KeyTile{shared_}, params_.problem.dim_qk,
                          rows_of(in.k, place_.kv_head, place_.sequence.first_kv),
                          place_.keys.begin, place_.keys.end);
    load_tokens<kThreads>(typename Config::KeyTile{shared_ + Config::KeyTile::kBytes},
                          params_.problem.dim_v,
                          rows_of(in.v, place_.kv_head, place_.sequence.first_kv),
                          place_.keys.begin, place_.keys.end);
    Step now = next_step<Config>(params_, place_, {place_.heads.begin, place_.tiles.begin - 1});
    load_queries(now, 0);
    ptx::cp_async_commit();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum_[strip][n][e] = 0.0f;
      }
    }
    int stage = 0;
#pragma unroll 1
    while (now.head < place_.heads.end) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the tile is here, dS of the one before, and the other stage is free
      const Step after = next_step<Config>(params_, place_, now);
      if constexpr (Config::kStages == 2) {
        load_queries(after, stage ^ 1);
        ptx::cp_async_commit();
        if (gradients_ == 1) add_dq(stage ^ 1);
        multiply(now, stage);
        stage ^= 1;
      } else {
        multiply(now, 0);
        __syncthreads();  // dS is here, and the tile's readers are done
        load_queries(after, 0);
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

  __device__ __forceinline__ ScoreTile score_tile(int stage) const {
    return {shared_ + 2 * Config::KeyTile::kBytes + Config::kStages * Config::kStageBytes +
            stage * ScoreTile::kBytes};
  }

  // Of the stage's lse; D follows.
  __device__ __forceinline__ uint32_t numbers(int stage) const {
    return shared_ + 2 * Config::KeyTile::kBytes +
           Config::kStages * (Config::kStageBytes + ScoreTile::kBytes) +
           stage * Config::kNumberBytes;
  }

  __device__ __forceinline__ void load_queries(Step step, int stage) const {
    if (step.head >= place_.heads.end) return;
    const int32_t first = step.tile * kTileQ;
    load_tokens<kThreads>(query_tile(stage, 0), params_.problem.dim_qk,
                          rows_of(params_.args.inputs.q, step.head, place_.sequence.first_q), first,
                          place_.sequence.len.q);
    load_tokens<kThreads>(query_tile(stage, 1), params_.problem.dim_v,
                          rows_of(params_.dout, step.head, place_.sequence.first_q), first,
                          place_.sequence.len.q);
    const int32_t n = opaque(threadIdx.x), i = first + n % kTileQ;
    if (n >= 2 * kTileQ) return;
    const float* from = n < kTileQ ? params_.lse2 : params_.delta;
    ptx::cp_async_4(numbers(stage) + n * 4,
                    from + params_.row(opaque(place_.b), step.head, place_.sequence.first_q + i),
                    i < place_.sequence.len.q);
  }

  __device__ __forceinline__ Rows rows_of(const flashattn_tensor& tensor, int32_t head,
                                          int64_t first) const {
    return head_rows<sizeof(T)>(tensor, opaque(place_.b), head, first);
  }

  // What a tile adds to dK and dV, and its dS to shared memory.
  __device__ __forceinline__ void multiply(Step step, int stage) {
    if (threadIdx.x == 0) place_.steps[stage] = step;
    const uint32_t left = left_rows(
        typename Config::KeyTile{shared_ + gradients_ * Config::KeyTile::kBytes}, warp_key_, lane_);
    const Interval queries = queries_of<Config>(place_, step);
    const bool full =
        queries.begin >= place_.full.begin && queries.begin + kTileQ <= place_.full.end;
#pragma unroll 1
    for (int slice = 0; slice < kTileQ; slice += kSlice) {
      Scores s = {};
      Held held;
      multiply_rows<T, kDim>(s, left, right_rows(query_tile(stage, gradients_), slice, lane_));
      // Barrier 0 is the block's.
      const int32_t barrier = 1 + warp_key_ / (16 * kStrips) + slice / kSlice * Config::kPairs;
      if (gradients_ == 0) {
        weights(s, held, step, queries, full, stage, slice);
        ptx::barrier_arrive<64>(barrier);
        // The other warp has done its share while this one computed exponentials, and has work now.
        if (Config::kStages == 2 && slice == 0) add_dq(stage ^ 1);
      } else {
        ptx::barrier_sync<64>(barrier);
        gradients(s, held, stage, slice);
      }
      multiply_held<T, kSlice / 16>(
          sum_, summed_rows(query_tile(stage, gradients_ ^ 1), slice, lane_),
          [&](int strip, int k, int x) { return held_word<T>(held[strip], k, x); });
    }
  }

  // Where the lane's pairs of queries from column `slice` on lie in a tile of scores, for row 0 of
  // the warp.
  __device__ __forceinline__ uint32_t pairs_at(int stage, int slice) const {
    return ScoreTile::further(score_tile(stage).element(warp_key_ + lane_ / 4, lane_ % 4 * 2),
                              slice / ScoreTile::kChunkElements);
  }

  // From there to the pair 8 n columns further in row `half` (0: g, 1: g + 8) of a strip.
  static __device__ __forceinline__ uint32_t pair_at(uint32_t pairs, int n, int strip, int half) {
    return ScoreTile::further(pairs, n * 8 / ScoreTile::kChunkElements) +
           (strip * 16 + half * 8) * ScoreTile::kRowBytes;
  }

  // The key that accumulator row `half` (0: g, 1: g + 8) of a strip stands for.
  __device__ __forceinline__ int32_t key_of(int strip, int half) const {
    return place_.keys.begin + warp_key_ + strip * 16 + half * 8 + lane_ / 4;
  }

  // Products to weights: as operands, and for the other warp. That one gets them times the
  // derivative of the softcap, and negative where the dropout drops.
  __device__ __forceinline__ void weights(Scores& s, Held& held, Step step, Interval queries,
                                          bool full, int stage, int slice) const {
    const uint32_t lse = numbers(stage) + (slice + lane_ % 4 * 2) * 4;
    const uint32_t to = pairs_at(stage, slice);
    if constexpr (Config::kModified) {
      modify(s, held, step, queries, lse, to, slice);
      return;
    }
    if (!full) mask(s, queries, slice);
    const float factor = params_.problem.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
      const float2 row = ptx::load_shared_pair(lse + n * 32);
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = &s[strip][n][half * 2];
          held[strip][n][half] = Pair<T>::of(ptx::exp2(fmaf(x[0], factor, -row.x)),
                                             ptx::exp2(fmaf(x[1], factor, -row.y)));
          held[strip][n][half].store_shared(pair_at(to, n, strip, half));
        }
      }
    }
  }

  // -inf where a key is not visible.
  __device__ __forceinline__ void mask(Scores& s, Interval queries, int slice) const {
    const MaskRule rule = params_.problem.mask_rule();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t j = opaque(key_of(strip, half));
        Interval seen = visible_queries(rule, j, place_.sequence.len);
        if (j >= place_.keys.end) seen.end = seen.begin;
        const int32_t first = queries.begin + slice + lane_ % 4 * 2;
        seen = {seen.begin - first, seen.end - first};
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const bool inside = n * 8 + e >= seen.begin && n * 8 + e < seen.end;
            if (!inside) s[strip][n][half * 2 + e] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void modify(Scores& s, Held& held, Step step, Interval queries,
                                         uint32_t lse, uint32_t to, int slice) const {
    const ScoreRules rules =
        score_rules(params_.problem, params_.args.inputs, place_.b, step.head, place_.sequence.len);
    const MaskRule rule = params_.problem.mask_rule();
    const uint32_t threshold = params_.dropout_threshold;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      uint32_t keep[kSlice / 16];
#pragma unroll
      for (int n = 0; n < kSlice / 16; ++n) keep[n] = 0xff;
      if (threshold != 0) {
        const DropoutStream stream =
            dropout_stream(params_.problem, params_.args.inputs, place_.b, step.head);
#pragma unroll
        for (int n = 0; n < kSlice / 16; ++n) {
          keep[n] = keep_bits_transposed(stream, threshold, queries.begin + slice + n * 16,
                                         place_.keys.begin + warp_key_ + strip * 16, lane_);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t j = opaque(key_of(strip, half));
        Interval seen = intersect(visible_queries(rule, j, place_.sequence.len), queries);
        if (j >= place_.keys.end) seen.end = seen.begin;
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
          const float2 row = ptx::load_shared_pair(lse + n * 32);
          float own[2], other[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int32_t i = queries.begin + slice + n * 8 + lane_ % 4 * 2 + e;
            const bool inside = i >= seen.begin && i < seen.end;
            const Score score =
                modified_score<Config::kWide>(rules, s[strip][n][half * 2 + e], i, j, inside);
            const bool hidden = !inside || !block_visible(rules, i, j);
            const float p = hidden ? 0.0f : ptx::exp2(score.value - (e == 0 ? row.x : row.y));
            const bool kept = keep[n / 2] >> (half * 4 + n % 2 * 2 + e) & 1;
            own[e] = kept ? p : 0.0f;
            other[e] = kept ? p * score.derivative : -p * score.derivative;
          }
          held[strip][n][half] = Pair<T>::of(own[0], own[1]);
          Pair<T>::of(other[0], other[1]).store_shared(pair_at(to, n, strip, half));
        }
      }
    }
  }

  // dP and the other warp's weights to dS: as operands, and where the weights lay.
  __device__ __forceinline__ void gradients(const Scores& dp, Held& held, int stage,
                                            int slice) const {
    const uint32_t at = pairs_at(stage, slice);
    const uint32_t delta = numbers(stage) + (kTileQ + slice + lane_ % 4 * 2) * 4;
    const float kept = 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
#pragma unroll
    for (int n = 0; n < kSlice / 8; ++n) {
      const float2 row = ptx::load_shared_pair(delta + n * 32);
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t address = pair_at(at, n, strip, half);
          float2 p = Pair<T>::load_shared(address).numbers();
          float x = dp[strip][n][half * 2], y = dp[strip][n][half * 2 + 1];
          if constexpr (Config::kModified) {
            x = __float_as_uint(p.x) >> 31 ? 0.0f : x * kept;
            y = __float_as_uint(p.y) >> 31 ? 0.0f : y * kept;
            p = make_float2(fabsf(p.x), fabsf(p.y));
          }
          // Hidden keys must not turn an infinite gradient into NaN.
          held[strip][n][half] = Pair<T>::of(p.x == 0.0f ? 0.0f : p.x * (x - row.x),
                                             p.y == 0.0f ? 0.0f : p.y * (y - row.y));
          held[strip][n][half].store_shared(address);
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
    constexpr int kPass = kColumns > 48 || kDim * sizeof(T) > 768 ? kColumns / 2 : kColumns;
#pragma unroll 1
    for (int pass = 0; pass < kColumns; pass += kPass) add_dq_columns<kPass>(step, stage, pass);
    if (!params_.turns) return;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();
      ptx::add_release(turn_of<Config>(params_, place_, step), 1);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void add_dq_columns(Step step, int stage, int pass) const {
    const int32_t warp = threadIdx.x / 32, row = warp % Config::kRowsDq * 32;
    const int32_t column = warp / Config::kRowsDq * Config::kColumnsDq + pass;
    float dq[2][kColumns / 8][4] = {};
    multiply_turned<T, ScoreTile, typename Config::KeyTile>(
        dq, turned_rows(score_tile(stage), row, lane_),
        summed_rows(typename Config::KeyTile{shared_}, 0, lane_), column);
    if (params_.turns && pass == 0) {
      if (lane_ == 0) await_turn<Config>(params_, place_, step);
      __syncwarp();
    }
    const int32_t dim = params_.problem.dim_qk;
    const int32_t i = step.tile * kTileQ + row + lane_ / 4, at = column + lane_ % 4 * 2;
    float* to =
        params_.dq + params_.row(place_.b, step.head, place_.sequence.first_q + i) * dim + at;
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half, to += 8 * dim) {
        if (i + strip * 16 + half * 8 >= place_.sequence.len.q) continue;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          if (at + n * 8 >= dim) continue;
          ptx::add_pair(to + n * 8, dq[strip][n][half * 2], dq[strip][n][half * 2 + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish() const {
    const flashattn_tensor& tensor = gradients_ == 0 ? params_.args.dv : params_.args.dk;
    const int32_t dim = gradients_ == 0 ? params_.problem.dim_v : params_.problem.dim_qk;
    const float kept = 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
    const float factor = gradients_ == 0 ? kept : params_.problem.scale;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t j = key_of(strip, half);
        if (j >= place_.keys.end) continue;
        char* to =
            tensor_row(tensor, sizeof(T), place_.b, place_.kv_head, place_.sequence.first_kv + j) +
            lane_ % 4 * 2 * sizeof(T);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (n * 8 >= dim) continue;
          const float* x = &sum_[strip][n][half * 2];
          Pair<T>::of(x[0] * factor, x[1] * factor).store(to + n * 8 * sizeof(T));
        }
      }
    }
  }

  const BackwardParams& params_;
  BackwardPlace& place_;
  const uint32_t shared_;
  const int lane_;
  const int gradients_;  // 0: the weights' warp of its pair, 1: the gradients'
  const int warp_key_;
  float sum_[kStrips][kDim / 8][4];  // dV or dK
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  char* const shared = ptx::dynamic_shared();
  BackwardPlace& place = *reinterpret_cast<BackwardPlace*>(shared + Config::kPlace);
  if (threadIdx.x == 0) place = find_place<Config>(params);
  __syncthreads();
  if (place.keys.begin >= place.keys.end) return;
  BackwardBlock<Config>(params, place, ptx::shared_address(shared)).run();
}

}  // namespace flashattn::cuda::sm80
