// The portable forward pass (Dao 2023, algorithm 1) on mma.sync and cp.async: every NVIDIA GPU from
// Ampere on.
//
// One block works on kTileQ rows of a KV head's group, 16 * kMmaM rows a warp, against tiles of
// kTileKv keys. K and V have one buffer each: V of a tile arrives under Q K^T, K of the
// next under the softmax and P V, and other blocks on the same multiprocessor fill what is left.
// Tiles of fp32 are split into halves when they have arrived, if at all; where numbers prove too
// large for that, the block begins anew.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/block_mask.cuh"
#include "cuda/device/dropout.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class ForwardBlock : BlockPlace, WarpRows<Config> {
  using WarpRows<Config>::lane_, WarpRows<Config>::warp_row_;
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using Factors = BlockFactors<Config::kThreads>;
  static constexpr bool kHalves = Config::kHalves;
  static constexpr int kMmaM = Config::kMmaM, kTileQ = Config::kTileQ;
  static constexpr int kTileKv = Config::kTileKv, kThreads = Config::kThreads;
  using ScoreFragment = float[kMmaM][kTileKv / 8][4];
  using Tiles = std::conditional_t<Config::kModified,
                                   BlockSparseTiles<ForwardParams, kTileQ, kTileKv>, DenseTiles>;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardParams& params, uint32_t shared)
      : WarpRows<Config>(threadIdx.x),
        params_(params),
        q_tile_{shared},
        k_tile_{shared + Config::kQBytes},
        v_tile_{shared + Config::kQBytes + Config::KTile::kBytes},
        pages_(shared + Config::kPages),
        v_pages_(shared + Config::kVPages),
        factors_(shared + Config::kFactors),
        tiles_(params) {}

  __device__ __forceinline__ bool locate() {
    return BlockPlace::template locate<sizeof(T)>(params_);
  }

  __device__ __forceinline__ void run() {
    if (params_.parts > 1) ptx::griddep_launch_dependents();  // who merges them
    if (threadIdx.x == 0) store(place_address());
    if constexpr (kHalves) factors_.start();
    while (!visit_keys()) recall();
    finish();
  }

 private:
  // False: once more.
  __device__ __forceinline__ bool visit_keys() {
    const Inputs& in = params_.args.inputs;
    int32_t tile = next_tile(keys_.begin / kTileKv);
    look_up_pages(tile);
    ptx::cp_async_commit();
    if (even()) {
      const Rows rows{query_row<sizeof(T)>(in.q, 0), row_bytes<sizeof(T)>(in.q)};
      load_tokens<kThreads>(q_tile_, params_.problem.dim_qk, rows, 0, rows_);
    } else {
      load_tile<kThreads>(q_tile_, params_.problem.dim_qk, [&](int r) -> const char* {
        return r < rows_ ? query_row<sizeof(T)>(in.q, r) : nullptr;
      });
    }
    if constexpr (kHalves) ptx::cp_async_commit();
    clear();
    ptx::cp_async_wait<kHalves ? 1 : 0>();  // page numbers; Q is in the next group
    load_keys<kThreads>(params_, k_tile_, pages_, in.k, k_, params_.problem.dim_qk, tile * kTileKv);
    ptx::cp_async_commit();
    if constexpr (kHalves) {
      ptx::cp_async_wait<1>();
      factors_.split_queries(q_tile_);
    }
    while (tile * kTileKv < keys_.end) {
      const bool shown = tiles_.full(tile);  // the block mask hides nothing
      ptx::cp_async_wait<0>();
      if constexpr (kHalves) factors_.split(Factors::kK, k_tile_);
      __syncthreads();  // K is here, and V's last readers are done
      recall();
      load_keys<kThreads>(params_, v_tile_, v_pages_, in.v, v_base(), params_.problem.dim_v,
                          tile * kTileKv);
      const int32_t next = next_tile(tile + 1);
      look_up_pages(next);
      ptx::cp_async_commit();

      ScoreFragment s = {};
      // Warps beyond a short block's rows only help to copy. Where blocks are long the test costs 5
      // %.
      const bool has_rows = !Config::kShort || warp_row_ < rows_;
      if (has_rows) multiply_qk(s);
      ptx::cp_async_wait<0>();
      if constexpr (kHalves) factors_.split(Factors::kV, v_tile_);
      __syncthreads();  // V is here, and K's readers are done
      recall();
      if (next * kTileKv < keys_.end) {
        load_keys<kThreads>(params_, k_tile_, pages_, in.k, k_base(), params_.problem.dim_qk,
                            next * kTileKv);
      }
      ptx::cp_async_commit();

      if (has_rows) {
        modify(s, tile);
        mask(s, tile, shown);
        softmax(s);
        if constexpr (Config::kModified) drop(s, tile);
        multiply_pv(s);
      }
      tile = next;
    }
    ptx::cp_async_wait<0>();
    return !kHalves || !factors_.again();
  }

  __device__ __forceinline__ uint32_t place_address() const {
    return q_tile_.base + Config::kPlace;
  }

  // Some have no registers to spare for what a block works on while they multiply, others none for
  // what they rarely need.
  __device__ __forceinline__ void recall() {
    if constexpr (Config::kLean) load(place_address());
  }
  __device__ __forceinline__ const char* k_base() const {
    return Config::kLean ? k_ : load_pointer(place_address() + offsetof(BlockPlace, k_));
  }
  __device__ __forceinline__ const char* v_base() const {
    return Config::kLean ? v_ : load_pointer(place_address() + offsetof(BlockPlace, v_));
  }
  __device__ __forceinline__ WarpRows<Config> place_of_warp() const {
    if constexpr (kHalves) return WarpRows<Config>(no_hoist(threadIdx.x));
    return *this;
  }
  __device__ __forceinline__ BlockPlace recalled() const {
    BlockPlace block = *this;
    if constexpr (!Config::kLean) block.load(place_address());
    return block;
  }

  // The first tile from `tile` on in which a query of the block sees a key.
  __device__ __forceinline__ int32_t next_tile(int32_t tile) {
    struct {
      int32_t b, h, query;
      Lengths len;
    } const item{b_, first_head_, queries_.begin, sequence_.len};
    return tiles_.first_visible(item, tile, (keys_.end + kTileKv - 1) / kTileKv);
  }

  // For the next tile that load_keys is called for.
  __device__ __forceinline__ void look_up_pages(int32_t tile) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return;
    const PagedRows rows = paged_rows<sizeof(T)>(params_, params_.args.inputs.k, k_);
    const int32_t first = tile * kTileKv, limit = sequence_.len.kv;
    PagedCopy<kThreads, typename Config::KTile>::look_up(pages_, rows, first, limit);
    if constexpr (!Config::kSamePages) {
      PagedCopy<kThreads, typename Config::VTile>::look_up(v_pages_, rows, first, limit);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      m_[x / 2][x % 2] = -INFINITY;
      l_[x / 2][x % 2] = 0.0f;
    }
    put_statistics();
#pragma unroll
    for (int strip = 0; strip < kMmaM; ++strip) {
#pragma unroll
      for (int n = 0; n < Config::kDimV / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[strip][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply_qk(ScoreFragment& s) const {
    const WarpRows<Config> at = place_of_warp();
    multiply_rows<Operand, Config::kDimQk>(s, left_rows(q_tile_, at.warp_row_, at.lane_),
                                           right_rows(k_tile_, 0, at.lane_));
  }

  __device__ __forceinline__ void multiply_pv(const ScoreFragment& p) {
    const typename Config::VOperand tile{v_tile_.base};
    multiply_held<Operand, kTileKv / 16>(
        o_, summed_rows(tile, 0, place_of_warp().lane_),
        [&](int strip, int k, int x) { return held_word<Operand>(p[strip], k, x); });
  }

  // Maxima and sums, which only the softmax needs.
  __device__ __forceinline__ uint32_t statistics_at(int strip) const {
    return q_tile_.base + Config::kStatistics + (strip * kThreads + no_hoist(threadIdx.x)) * 16;
  }
  __device__ __forceinline__ void put_statistics() const {
    if constexpr (Config::kStatisticsApart) {
#pragma unroll
      for (int strip = 0; strip < kMmaM; ++strip) {
        ptx::store_shared(statistics_at(strip), m_[strip][0], m_[strip][1], l_[strip][0],
                          l_[strip][1]);
      }
    }
  }
  __device__ __forceinline__ void take_statistics() {
    if constexpr (Config::kStatisticsApart) {
#pragma unroll
      for (int strip = 0; strip < kMmaM; ++strip) {
        float x[4];
        ptx::load_shared(x, statistics_at(strip));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m_[strip][half] = x[half];
          l_[strip][half] = x[2 + half];
        }
      }
    }
  }

  __device__ __forceinline__ void shrink_output(int strip, int half, float shrink) {
#pragma unroll
    for (int n = 0; n < Config::kDimV / 8; ++n) {
      o_[strip][n][half * 2] *= shrink;
      o_[strip][n][half * 2 + 1] *= shrink;
    }
  }

  // Products to scores, but for the factor.
  __device__ __forceinline__ void modify(ScoreFragment& s, int32_t tile) const {
    if constexpr (Config::kModified) {
      const Problem& problem = params_.problem;
      const ScoreSteps steps(problem);
      if (steps.capped) {
#pragma unroll
        for (int strip = 0; strip < kMmaM; ++strip) cap<Config::kWide>(s[strip], steps.inner);
      }
      const bool dense = problem.bias & FLASHATTN_BIAS_DENSE;
      if (!steps.sloped && !dense) return;
      const WarpRows<Config> own = place_of_warp();
      const int32_t first = tile * kTileKv + own.lane_ % 4 * 2;
#pragma unroll
      for (int strip = 0; strip < kMmaM; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Heads that share a block differ in their biases. Past the last row: as that.
          const Row at = row(min(no_hoist(own.row_of(strip, half)), rows_ - 1));
          const int32_t i = queries_.begin + at.query, h = first_head_ + at.head;
          if (steps.sloped) {
            const int32_t last = i + diagonal_offset(problem.mask_rule(), sequence_.len);
            add_slope(s[strip], half, steps.wide,
                      slope_of(problem, params_.args.inputs, b_, h) * (kLog2E / kWideUnit),
                      static_cast<float>(first - last));
          }
          if (dense) {
            HeadBias::of(problem, params_.args.inputs, b_, h)
                .add_row(s[strip], half, steps.sloped ? 1.0f : steps.wide, i, first,
                         sequence_.len.kv - first);
          }
        }
      }
    }
  }

  // -inf where a key is not visible. shown: the block mask hides nothing. Nobody asks for what
  // becomes of rows past the last.
  __device__ __forceinline__ void mask(ScoreFragment& s, int32_t tile, bool shown) const {
    const Interval columns{tile * kTileKv, (tile + 1) * kTileKv};
    const WarpRows<Config> own = place_of_warp();
    const int32_t first = columns.begin + own.lane_ % 4 * 2;
    if (columns.begin < full_.begin || columns.end > full_.end) {
      const Interval keys = intersect(columns, keys_);
      const MaskRule rule = params_.problem.mask_rule();
      if (sees_all(rule)) {
        visit_outside<kTileKv / 8>(keys.begin - first, keys.end - keys.begin, [&](int n, int e) {
#pragma unroll
          for (int x = 0; x < kMmaM * 2; ++x) s[x / 2][n][x % 2 * 2 + e] = -INFINITY;
        });
      } else {
        const BlockPlace block = recalled();
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          const int32_t i = block.query_of(no_hoist(own.row_of(x / 2, x % 2)));
          const Interval visible = intersect(visible_keys(rule, i, block.sequence_.len), keys);
          visit_outside<kTileKv / 8>(visible.begin - first, visible.end - visible.begin,
                                     [&](int n, int e) { s[x / 2][n][x % 2 * 2 + e] = -INFINITY; });
        }
      }
    }
    if (shown) return;
    const BlockMask blocks = BlockMask::of(params_.problem, params_.args.inputs, b_, first_head_);
#pragma unroll
    for (int strip = 0; strip < kMmaM; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = query_of(min(no_hoist(own.row_of(strip, half)), rows_ - 1));
        visit_unset<kTileKv / 8>(
            blocks.shown_keys<kTileKv / 8>(i, columns.begin, keys_.end, own.lane_),
            [&](int n, int e) { s[strip][n][half * 2 + e] = -INFINITY; });
      }
    }
  }

  // Scores to weights; the running maximum and sum; O to the new maximum's scale.
  __device__ __forceinline__ void softmax(ScoreFragment& s) {
    take_statistics();
    float factor =
        Config::kModified ? ScoreSteps(params_.problem).factor() : params_.problem.scale * kLog2E;
    if constexpr (kHalves) factor = factors_.of_scores(factor);
    constexpr int kRows = Config::kRowsAtOnce;
#pragma unroll
    for (int first = 0; first < kMmaM * 2; first += kRows) {
      float top[kRows];
#pragma unroll
      for (float& t : top) t = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
        for (int x = first; x < first + kRows; ++x) {
          const float* pair = &s[x / 2][n][x % 2 * 2];
          top[x - first] = fmaxf(top[x - first], fmaxf(pair[0], pair[1]));
        }
      }
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (float& t : top) t = fmaxf(t, __shfl_xor_sync(~0u, t, step));
      }
#pragma unroll
      for (int x = first; x < first + kRows; ++x) {
        weigh(s[x / 2], x / 2, x % 2, top[x - first], factor);
      }
    }
    put_statistics();
  }

  // The same for one half of a strip's rows, with this maximum, times factor in units of log2(e).
  __device__ __forceinline__ void weigh(float (&s)[kTileKv / 8][4], int strip, int half, float top,
                                        float factor) {
    const float wide = factor * (1.0f / kWideUnit);
    const float before = m_[strip][half], m = fmaxf(before, top * wide);
    // A row that has seen nothing: weights of 0, not NaN.
    const float base = m == -INFINITY ? 0.0f : m;
    const float shrink = ptx::exp2((before - base) * kWideUnit);
    float subtracted = base * kWideUnit;
    const bool far = fabsf(base) > kLargeScore / kWideUnit;
    // After the first tiles maxima rarely rise.
    if (!__all_sync(~0u, m == before && !far)) {
      shrink_output(strip, half, shrink);
      if (__any_sync(~0u, far)) {
#pragma unroll
        for (int x = 0; x < kTileKv / 4; ++x) {
          float& score = s[x / 2][half * 2 + x % 2];
          score = __fsub_rn(__fmul_rn(score, wide), base);
        }
        factor = kWideUnit;
        subtracted = 0.0f;
      }
    }
    float total = 0.0f;
#pragma unroll
    for (int x = 0; x < kTileKv / 4; ++x) {
      float& weight = s[x / 2][half * 2 + x % 2];
      weight = ptx::exp2(fmaf(weight, factor, -subtracted));
      total += weight;
    }
    m_[strip][half] = m;
    l_[strip][half] = l_[strip][half] * shrink + total;
  }

  // Clears the weights that the dropout drops.
  __device__ __forceinline__ void drop(ScoreFragment& p, int32_t tile) const {
    if (params_.dropout_threshold == 0) return;
    const DropoutStream stream =
        dropout_stream(params_.problem, params_.args.inputs, b_, first_head_);
    const WarpRows<Config> own = place_of_warp();
    visit_dropped<kMmaM, kTileKv / 8, false>(
        stream, params_.dropout_threshold, queries_.begin + own.warp_row_, tile * kTileKv,
        own.lane_, [&](int strip, int n, int x) { p[strip][n][x] = 0.0f; });
  }

  __device__ __forceinline__ void finish() {
    __syncthreads();  // Q's readers are done
    take_statistics();
    const ForwardOutput<Config> output(params_, q_tile_.base);
    float unit = 1.0f;
    if constexpr (kHalves) unit = factors_.of_output();
    output.finish(o_, m_, l_, unit);
  }

  const ForwardParams& params_;
  const typename Config::QTile q_tile_;
  const typename Config::KTile k_tile_;
  const typename Config::VTile v_tile_;
  const uint32_t pages_, v_pages_;
  const Factors factors_;
  Tiles tiles_;
  // Maxima in units of kWideUnit log2(e); the sums are of this lane's columns.
  float m_[kMmaM][2], l_[kMmaM][2];
  float o_[kMmaM][Config::kDimV / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  ForwardBlock<Config> block(params, ptx::shared_address(shared));
  if (block.locate()) block.run();
}

}  // namespace flashattn::cuda::sm80
