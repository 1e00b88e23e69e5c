// The portable forward pass (Dao 2023, algorithm 1) on mma.sync and cp.async: every NVIDIA GPU from
// Ampere on.
//
// One block works on kTileQ rows of a KV head's group, 16 * kStrips rows a warp, against tiles of
// kTileKv keys. K and V have one buffer each: V of a tile arrives under Q K^T, K of the
// next under the softmax and P V, and further blocks on the same multiprocessor fill what is left.
#pragma once

#include <type_traits>

#include "cuda/sm80/forward_config.cuh"
#include "cuda/tile/blocks.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/tile/products.cuh"
#include "cuda/tile/scores.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class ForwardBlock : BlockPlace {
  using T = typename Config::T;
  static constexpr int kStrips = Config::kStrips, kOwn = Config::kOwn, kTileQ = Config::kTileQ;
  static constexpr bool kShared = Config::kShare > 1;
  static constexpr int kColumns = Config::kDimV / Config::kShare;  // of O, a warp
  static constexpr int kTileKv = Config::kTileKv, kThreads = Config::kThreads;
  using Scores = float[kStrips][kTileKv / 8][4];
  using Tiles =
      std::conditional_t<Config::kModified, BlockTiles<ForwardParams, kTileQ, kTileKv>, AllTiles>;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardParams& params, uint32_t shared)
      : params_(params),
        q_tile_{shared},
        k_tile_{shared + Config::kQBytes},
        v_tile_{shared + Config::kQBytes + Config::KTile::kBytes},
        pages_(shared + Config::kPages),
        lane_(threadIdx.x % 32),
        warp_row_(threadIdx.x / 32 * 16 * kOwn),
        pair_(shared + Config::kExchange, threadIdx.x / 32, lane_),
        tiles_(params) {}

  __device__ __forceinline__ bool locate() { return BlockPlace::locate(params_); }

  __device__ __forceinline__ void run() {
    const flashattn_inputs& in = params_.args.inputs;
    int32_t tile = next_tile(keys_.begin / kTileKv);
    look_up_pages(tile);
    ptx::cp_async_commit();
    load_tile<kThreads>(q_tile_, params_.problem.dim_qk, [&](int r) -> const char* {
      if (r >= rows_) return nullptr;
      return tensor_row(in.q, sizeof(T), b_, first_head_ + r / count_,
                        sequence_.first_q + queries_.begin + r % count_);
    });
    clear();
    if (kShared && threadIdx.x == 0) store(place_address());
    ptx::cp_async_wait<0>();  // page numbers; Q is in the next group
    load_keys<kThreads>(params_, k_tile_, pages_, in.k, params_.problem.dim_qk, tile * kTileKv);
    ptx::cp_async_commit();
    while (tile * kTileKv < keys_.end) {
      const bool shown = tiles_.full(tile);  // the block mask hides nothing
      ptx::cp_async_wait<0>();
      __syncthreads();  // K is here, and V's last readers are done
      recall();
      load_keys<kThreads>(params_, v_tile_, pages_ + kThreads * 4, in.v, params_.problem.dim_v,
                          tile * kTileKv);
      const int32_t next = next_tile(tile + 1);
      look_up_pages(next);
      ptx::cp_async_commit();

      Scores s = {};
      // Warps beyond a short block's rows only help to copy. Where blocks are long the test costs 5
      // %.
      const bool has_rows = !Config::kShort || warp_row_ < rows_;
      if (has_rows) multiply_qk(s);
      if constexpr (kShared) pair_.hand_over_sums(s);
      ptx::cp_async_wait<0>();
      __syncthreads();  // V is here, and K's readers are done
      recall();
      if (next * kTileKv < keys_.end) {
        load_keys<kThreads>(params_, k_tile_, pages_, in.k, params_.problem.dim_qk, next * kTileKv);
      }
      ptx::cp_async_commit();

      if constexpr (kShared) pair_.add_sums(s);
      if (has_rows) {
        modify(s, tile);
        mask(s, tile, shown);
        softmax(s);
        if constexpr (Config::kModified) drop(s, tile);
        if constexpr (kShared) {
          pair_.hand_over_weights(s);
          float partner[4];
          pair_.exchange(partner, shrink_);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            shrink_output(0, half, shrink_[half]);
            shrink_output(1, half, partner[half]);
          }
        }
        multiply_pv(s);
      }
      tile = next;
    }
    ptx::cp_async_wait<0>();
    finish();
  }

 private:
  __device__ __forceinline__ uint32_t place_address() const {
    return q_tile_.base + Config::kPlace;
  }

  // Pairs have no registers to spare for what a block works on while they multiply.
  __device__ __forceinline__ void recall() {
    if constexpr (kShared) load(place_address());
  }

  // Row of the block that accumulator row `half` (0: g, 1: g + 8) of a strip stands for. Of a
  // pair's strips the first is the warp's own.
  __device__ __forceinline__ int32_t row_of(int strip, int half) const {
    const int32_t first = kShared ? warp_row_ ^ strip * 16 : warp_row_ + strip * 16;
    return first + half * 8 + lane_ / 4;
  }

  // Which half of the head dimension is the warp's, of a pair.
  __device__ __forceinline__ int32_t place() const { return kShared ? warp_row_ / 16 % 2 : 0; }

  // The query and the head that row r stands for.
  __device__ __forceinline__ int32_t query_of(int32_t r) const {
    return queries_.begin + (Config::kModified && heads_ == 1 ? r : r % count_);
  }
  __device__ __forceinline__ int32_t head_of(int32_t r) const {
    return heads_ == 1 ? first_head_ : first_head_ + min(r / count_, heads_ - 1);
  }

  // The first tile from `tile` on in which a query of the block sees a key.
  __device__ __forceinline__ int32_t next_tile(int32_t tile) {
    struct {
      int32_t b, h, query;
      Lengths len;
    } const item{b_, first_head_, queries_.begin, sequence_.len};
    return tiles_.up(item, tile, (keys_.end + kTileKv - 1) / kTileKv);
  }

  // For the next tile that load_keys is called for.
  __device__ __forceinline__ void look_up_pages(int32_t tile) const {
    const Rows rows = rows_of<sizeof(T)>(params_, params_.args.inputs.k);
    if (!rows.pages) return;
    const int32_t first = tile * kTileKv;
    PagedCopy<kThreads, typename Config::KTile>::look_up(pages_, rows, first, sequence_.len.kv);
    PagedCopy<kThreads, typename Config::VTile>::look_up(pages_ + kThreads * 4, rows, first,
                                                         sequence_.len.kv);
  }

  __device__ __forceinline__ void clear() {
    const Problem& problem = params_.problem;
#pragma unroll
    for (int strip = 0; strip < kOwn; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t r = row_of(strip, half);
        float sink = -INFINITY;
        if ((problem.features & FLASHATTN_FEATURE_SINK) && part_ == 0 && r < rows_) {
          sink = params_.args.inputs.sink[first_head_ + r / count_] * kLog2E;
        }
        m_[strip][half] = sink;
        // Every lane of a quad sums its own columns: one of them counts the sink. Where registers
        // are scarce, whether it does is not kept for finish().
        const int lane = kStrips > 1 ? opaque(lane_) : lane_;
        l_[strip][half] = sink == -INFINITY || lane % 4 != 0 ? 0.0f : 1.0f;
      }
    }
    put_statistics();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[strip][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    const uint32_t left = left_rows(q_tile_, warp_row_, lane_);
    if constexpr (kShared) {
      const uint32_t right = right_eight_rows(k_tile_, 0, lane_);
      constexpr int kTerms = Config::kDimQk / 2, kStrip = 16 * Config::kDimQk * 4;
      const uint32_t from = place() * kTerms * 4;
      multiply_some_columns<Config::kDimQk, kTerms>(s, left + from, right + from,
                                                    place() == 0 ? kStrip : -kStrip);
    } else {
      multiply_rows<T, Config::kDimQk>(s, left, right_rows(k_tile_, 0, lane_));
    }
  }

  __device__ __forceinline__ void multiply_pv(Scores& p) {
    const uint32_t summed = summed_rows(v_tile_, 0, lane_);
    if constexpr (kShared) {
#pragma unroll
      for (int step = 0; step < kTileKv / 16; ++step) {
#pragma unroll
        for (int n = 2 * step; n < 2 * step + 2; ++n) pair_.take_weights(p[1][n], n);
        multiply_held<T, 1, Config::kDimV>(
            o_, summed + place() * kColumns * 4 + step * 16 * Config::VTile::kRowBytes,
            [&](int strip, int k, int x) { return held_word<T>(p[strip], 2 * step + k, x); });
      }
    } else {
      multiply_held<T, kTileKv / 16>(
          o_, summed, [&](int strip, int k, int x) { return held_word<T>(p[strip], k, x); });
    }
  }

  // A pair's maxima and sums, which only the softmax needs, lie in shared memory.
  __device__ __forceinline__ void put_statistics() const {
    if constexpr (kShared) pair_.keep({m_[0][0], m_[0][1], l_[0][0], l_[0][1]});
  }
  __device__ __forceinline__ void take_statistics(int strip, const float (&x)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m_[strip][half] = x[half];
      l_[strip][half] = x[2 + half];
    }
  }
  __device__ __forceinline__ void take_statistics() {
    if constexpr (kShared) {
      float x[4];
      pair_.take_kept(x);
      take_statistics(0, x);
    }
  }

  __device__ __forceinline__ void shrink_output(int strip, int half, float shrink) {
    // After the first tiles maxima rarely rise.
    if (__all_sync(~0u, shrink == 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      o_[strip][n][half * 2] *= shrink;
      o_[strip][n][half * 2 + 1] *= shrink;
    }
  }

  // Products to scores, but for factor().
  __device__ __forceinline__ void modify(Scores& s, int32_t tile) const {
    if constexpr (Config::kModified) {
      const Problem& problem = params_.problem;
      const ScoreSteps steps(problem);
      if (steps.capped) {
#pragma unroll
        for (int strip = 0; strip < kOwn; ++strip) cap<Config::kWide>(s[strip], steps.inner);
      }
      const bool dense = problem.bias & FLASHATTN_BIAS_DENSE;
      if (!steps.sloped && !dense) return;
      const int32_t first = tile * kTileKv + lane_ % 4 * 2;
#pragma unroll
      for (int strip = 0; strip < kOwn; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Heads that share a block differ in their biases.
          const int32_t r = opaque(row_of(strip, half)), i = query_of(r), h = head_of(r);
          if (steps.sloped) {
            const int32_t at = i + diagonal_offset(problem.mask_rule(), sequence_.len);
            add_slope(s[strip], half, steps.outer,
                      slope_of(problem, params_.args.inputs, b_, h) * kLog2E,
                      static_cast<float>(first - at));
          }
          if (dense) {
            HeadBias::of(problem, params_.args.inputs, b_, h)
                .add_row(s[strip], half, steps.sloped ? 1.0f : steps.outer, i, first,
                         r < rows_ ? sequence_.len.kv - first : 0);
          }
        }
      }
    }
  }

  // -inf where a key is not visible. shown: the block mask hides nothing.
  __device__ __forceinline__ void mask(Scores& s, int32_t tile, bool shown) const {
    const Interval columns{tile * kTileKv, (tile + 1) * kTileKv};
    const int32_t first = columns.begin + lane_ % 4 * 2;
    if (columns.begin < full_.begin || columns.end > full_.end) {
      const Interval keys = intersect(columns, keys_);
      const MaskRule rule = params_.problem.mask_rule();
#pragma unroll
      for (int strip = 0; strip < kOwn; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t r = opaque(row_of(strip, half));
          Interval visible = intersect(visible_keys(rule, query_of(r), sequence_.len), keys);
          if (r >= rows_) visible.end = visible.begin;
          visit_outside<kTileKv / 8>(visible.begin - first, visible.end - visible.begin,
                                     [&](int n, int e) { s[strip][n][half * 2 + e] = -INFINITY; });
        }
      }
    }
    if (shown) return;
    const HeadBlocks blocks = HeadBlocks::of(params_.problem, params_.args.inputs, b_, first_head_);
#pragma unroll
    for (int strip = 0; strip < kOwn; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = query_of(min(opaque(row_of(strip, half)), rows_ - 1));
        visit_unset<kTileKv / 8>(blocks.shown_keys<kTileKv / 8>(i, columns.begin, keys_.end, lane_),
                                 [&](int n, int e) { s[strip][n][half * 2 + e] = -INFINITY; });
      }
    }
  }

  // Scores to weights; the running maximum and sum; O to the new maximum's scale, but a pair's.
  __device__ __forceinline__ void softmax(Scores& s) {
    take_statistics();
    const float factor =
        Config::kModified ? ScoreSteps(params_.problem).factor() : params_.problem.scale * kLog2E;
#pragma unroll
    for (int strip = 0; strip < kOwn; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kTileKv / 8; ++n) {
          top = fmaxf(top, fmaxf(s[strip][n][half * 2], s[strip][n][half * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float before = m_[strip][half], m = fmaxf(before, top * factor);
        // A row that has seen nothing: weights of 0, not NaN.
        const float reference = m == -INFINITY ? 0.0f : m;
        const float shrink = ptx::exp2(before - reference);
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[strip][n][half * 2 + e];
            x = ptx::exp2(fmaf(x, factor, -reference));
            total += x;
          }
        }
        m_[strip][half] = m;
        l_[strip][half] = l_[strip][half] * shrink + total;
        if constexpr (kShared) {
          shrink_[half] = shrink;
        } else {
          shrink_output(strip, half, shrink);
        }
      }
    }
    put_statistics();
  }

  // Clears the weights that the dropout drops.
  __device__ __forceinline__ void drop(Scores& p, int32_t tile) const {
    if (params_.dropout_threshold == 0) return;
    const DropoutStream stream =
        dropout_stream(params_.problem, params_.args.inputs, b_, first_head_);
    visit_dropped<kOwn, kTileKv / 8, false>(
        stream, params_.dropout_threshold, queries_.begin + warp_row_, tile * kTileKv, lane_,
        [&](int strip, int n, int x) { p[strip][n][x] = 0.0f; });
  }

  __device__ __forceinline__ void finish() {
    locate();  // once more: registers for it were better used in the main loop
    const flashattn_forward_args& args = params_.args;
    const float kept = 65536.0f / (65536.0f - static_cast<float>(params_.dropout_threshold));
    const RowLayout layout = row_layout(params_.problem, args.shape);
    const bool to_fp32 =
        Config::kWide || parts_ > 1 || params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    typename Config::OTile staged{q_tile_.base};
    __syncthreads();  // Q's readers are done
    if constexpr (kShared) {
      take_statistics();
      float x[4];
      pair_.exchange(x, {m_[0][0], m_[0][1], l_[0][0], l_[0][1]});
      take_statistics(1, x);
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t r = row_of(strip, half), h = first_head_ + r / count_;
        const int32_t i = queries_.begin + r % count_;
        float l = l_[strip][half];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        const float factor = l == 0.0f ? 0.0f : (parts_ > 1 ? 1.0f : kept) / l;
        const float lse = l == 0.0f ? -INFINITY : (m_[strip][half] + log2f(l)) * kLn2;
        float* out = nullptr;  // a row of fp32
        if (r < rows_) {
          if (parts_ > 1) {
            const int64_t row = params_.partial_row(part_, b_, h, i);
            out = params_.partial_o + row * params_.problem.dim_v;
            if (lane_ % 4 == 0 && strip < kOwn) params_.partial_lse[row] = lse;
          } else {
            out = reinterpret_cast<float*>(tensor_row(args.o, 4, b_, h, sequence_.first_q + i));
            if (lane_ % 4 == 0 && strip < kOwn && args.lse) {
              args.lse[b_ * layout.batch_stride + h * layout.head_stride + sequence_.first_q + i] =
                  lse;
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = place() * kColumns + n * 8 + lane_ % 4 * 2;
          const float x = o_[strip][n][half * 2] * factor, y = o_[strip][n][half * 2 + 1] * factor;
          if (to_fp32) {
            if (out && column < params_.problem.dim_v) {
              *reinterpret_cast<float2*>(out + column) = make_float2(x, y);
            }
          } else if constexpr (!Config::kWide) {
            const uint32_t at =
                staged.chunk(warp_row_ + strip * 16 + half * 8 + lane_ / 4, n) + lane_ % 4 * 4;
            ptx::store_shared(at, ptx::pack<T>(x, y));
          }
        }
      }
    }
    if (to_fp32) return;
    __syncthreads();
    for (int n = threadIdx.x; n < kTileQ * Config::OTile::kChunks; n += kThreads) {
      const int r = n / Config::OTile::kChunks, index = n % Config::OTile::kChunks;
      if (r >= rows_ || index * 8 >= params_.problem.dim_v) continue;
      char* to = tensor_row(args.o, 2, b_, first_head_ + r / count_,
                            sequence_.first_q + queries_.begin + r % count_);
      *reinterpret_cast<int4*>(to + index * 16) = ptx::load_shared_16(staged.chunk(r, index));
    }
  }

  const ForwardParams& params_;
  const typename Config::QTile q_tile_;
  const typename Config::KTile k_tile_;
  const typename Config::VTile v_tile_;
  const uint32_t pages_;
  const int lane_, warp_row_;
  const PairExchange<kTileKv / 8> pair_;
  Tiles tiles_;
  // In log2 units; the sums are of this lane's columns. Of a pair the partner's come in finish().
  float m_[kStrips][2], l_[kStrips][2];
  float shrink_[4] = {};  // of a pair: what O is still to be scaled with, two halves
  float o_[kStrips][kColumns / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  ForwardBlock<Config> block(params, ptx::shared_address(shared));
  if (block.locate()) block.run();
}

}  // namespace flashattn::cuda::sm80
