// The portable forward pass (FlashAttention-2, Dao 2023, algorithm 1) with mma.sync and cp.async:
// for all NVIDIA GPUs from Ampere on.
//
// A CTA computes kTileQ rows of a KV head's GQA group, 16 kMmaM rows a warp (or kDimSplit warps
// that share the columns of O), over KV tiles of kTileKv keys. K and V have one buffer each: V of a
// tile is loaded under Q K^T, K of the next tile under the softmax and P V; other CTAs of the
// multiprocessor hide the rest of the latency. With 3xFP16, warps split fp32 tiles into pairs of
// fp16 when they have arrived. If a value overflows, the CTA starts over.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class FwdKernel : FwdWorkTile, WarpRows<Config> {
  using WarpRows<Config>::lane_, WarpRows<Config>::warp_row_;
  using T = typename Config::T;
  using ScoreMod = typename Config::ScoreMod;
  using Operand = typename Config::Operand;
  using BlockScale = Fp32BlockScale<Config::kThreads>;
  static constexpr bool k3xFp16 = Config::k3xFp16;
  static constexpr int kMmaM = Config::kMmaM, kTileQ = Config::kTileQ;
  static constexpr int kTileKv = Config::kTileKv, kThreads = Config::kThreads;
  using ScoreFragment = float[kMmaM][kTileKv / 8][4];
  using Tiles = std::conditional_t<ScoreMod::template kHas<BlockMask>,
                                   BlockSparseTiles<ForwardParams, kTileQ, kTileKv>, DenseTiles>;

 public:
  __device__ __forceinline__ FwdKernel(const ForwardParams& params, uint32_t shared)
      : WarpRows<Config>(threadIdx.x),
        params_(params),
        q_tile_{shared},
        k_tile_{shared + Config::kQBytes},
        v_tile_{shared + Config::kQBytes + Config::KTile::kBytes},
        pages_(shared + Config::kPagesOffset),
        v_pages_(shared + Config::kVPagesOffset),
        block_scale_(shared + Config::kBlockScaleOffset),
        tiles_(params) {}

  __device__ __forceinline__ bool init() { return FwdWorkTile::template init<sizeof(T)>(params_); }

  __device__ __forceinline__ void run() {
    if (params_.max_splits > 1) ptx::griddep_launch_dependents();  // the combine kernel
    if (threadIdx.x == 0) store_to_smem(work_tile_address());
    if constexpr (k3xFp16) block_scale_.init();
    while (!mainloop()) reload_work_tile();
    epilogue();
  }

 private:
  // Computes O, the row maxima and sums. False: it must run again with smaller scales.
  __device__ __forceinline__ bool mainloop() {
    const Inputs& in = params_.args.inputs;
    int32_t tile = next_tile(keys_.begin / kTileKv);
    prefetch_pages(tile);
    ptx::cp_async_commit();
    if (has_uniform_stride()) {
      const RowView rows{query_row<sizeof(T)>(in.q, 0), row_bytes<sizeof(T)>(in.q)};
      load_tokens<kThreads>(q_tile_, params_.problem.dim_qk, rows, 0, rows_);
    } else {
      load_tile<kThreads>(q_tile_, params_.problem.dim_qk, [&](int r) -> const char* {
        return r < rows_ ? query_row<sizeof(T)>(in.q, r) : nullptr;
      });
    }
    if constexpr (k3xFp16) ptx::cp_async_commit();
    clear();
    ptx::cp_async_wait<k3xFp16 ? 1 : 0>();  // page numbers have arrived; Q is in the next group
    load_kv<kThreads>(params_, k_tile_, pages_, in.k, k_, params_.problem.dim_qk, tile * kTileKv);
    ptx::cp_async_commit();
    if constexpr (k3xFp16) {
      ptx::cp_async_wait<1>();
      block_scale_.split_q(q_tile_);
    }
    while (tile * kTileKv < keys_.end) {
      const bool block_mask_full = tiles_.full(tile);  // the block mask hides no key
      ptx::cp_async_wait<0>();
      if constexpr (k3xFp16) block_scale_.split(BlockScale::kK, k_tile_);
      __syncthreads();  // K has arrived; all warps have read V of the last tile
      reload_work_tile();
      load_kv<kThreads>(params_, v_tile_, v_pages_, in.v, v_rows(), params_.problem.dim_v,
                        tile * kTileKv);
      const int32_t next = next_tile(tile + 1);
      prefetch_pages(next);
      ptx::cp_async_commit();

      ScoreFragment s = {};
      // Warps without rows only help to load. The test costs 5 % in CTAs with many rows.
      const bool has_rows = !Config::kSkipEmptyWarps || warp_row_ < rows_;
      if (has_rows) multiply_qk(s);
      ptx::cp_async_wait<0>();
      if constexpr (k3xFp16) block_scale_.split(BlockScale::kV, v_tile_);
      __syncthreads();  // V has arrived; all warps have read K
      reload_work_tile();
      if (next * kTileKv < keys_.end) {
        load_kv<kThreads>(params_, k_tile_, pages_, in.k, k_rows(), params_.problem.dim_qk,
                          next * kTileKv);
      }
      ptx::cp_async_commit();

      if (has_rows) {
        modify(s, tile);
        mask(s, tile, block_mask_full);
        softmax(s);
        if constexpr (ScoreMod::template kHas<Dropout>) drop(s, tile);
        multiply_pv(s);
      }
      tile = next;
    }
    ptx::cp_async_wait<0>();
    return !k3xFp16 || !block_scale_.must_redo();
  }

  __device__ __forceinline__ uint32_t work_tile_address() const {
    return q_tile_.base + Config::kWorkTileOffset;
  }

  // With kReloadWorkTile no registers hold the work tile during GEMMs. Without, they do, except for
  // the members that k_rows(), v_rows() and reloaded_work_tile() read from shared memory.
  __device__ __forceinline__ void reload_work_tile() {
    if constexpr (Config::kReloadWorkTile) load_from_smem(work_tile_address());
  }
  __device__ __forceinline__ const char* k_rows() const {
    return Config::kReloadWorkTile ? k_
                                   : load_pointer(work_tile_address() + offsetof(FwdWorkTile, k_));
  }
  __device__ __forceinline__ const char* v_rows() const {
    return Config::kReloadWorkTile ? v_
                                   : load_pointer(work_tile_address() + offsetof(FwdWorkTile, v_));
  }
  __device__ __forceinline__ WarpRows<Config> warp_rows() const {
    if constexpr (k3xFp16) return WarpRows<Config>(no_hoist(threadIdx.x));
    return *this;
  }
  __device__ __forceinline__ FwdWorkTile reloaded_work_tile() const {
    FwdWorkTile tile = *this;
    if constexpr (!Config::kReloadWorkTile) tile.load_from_smem(work_tile_address());
    return tile;
  }

  // The first KV tile from `tile` on in which a query of the work tile sees a key.
  __device__ __forceinline__ int32_t next_tile(int32_t tile) {
    struct {
      int32_t b, h, query;
      Lengths len;
    } const item{b_, first_head_, queries_.begin, seqlen_.len};
    return tiles_.first_visible(item, tile, (keys_.end + kTileKv - 1) / kTileKv);
  }

  // Looks up the pages of the tile that load_kv() loads next.
  __device__ __forceinline__ void prefetch_pages(int32_t tile) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return;
    const PagedRowView rows = paged_rows<sizeof(T)>(params_, params_.args.inputs.k, k_);
    const int32_t first = tile * kTileKv, limit = seqlen_.len.kv;
    PagedCopy<kThreads, typename Config::KTile>::prefetch_page_index(pages_, rows, first, limit);
    if constexpr (!Config::kSharePages) {
      PagedCopy<kThreads, typename Config::VTile>::prefetch_page_index(v_pages_, rows, first,
                                                                       limit);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      m_[x / 2][x % 2] = -INFINITY;
      l_[x / 2][x % 2] = 0.0f;
    }
    store_row_stats();
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int n = 0; n < Config::kAccColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[mma_m][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply_qk(ScoreFragment& s) const {
    const WarpRows<Config> own = warp_rows();
    gemm_nt<Operand, Config::kDimQk>(s, a_k_major(q_tile_, own.warp_row_, own.lane_),
                                     b_k_major(k_tile_, 0, own.lane_));
  }

  __device__ __forceinline__ void multiply_pv(const ScoreFragment& p) {
    using Tile = typename Config::VOperand;
    const uint32_t rows = b_mn_major(Tile{v_tile_.base}, 0, warp_rows().lane_);
    const auto a_word = [&](int mma_m, int k, int x) { return acc_as_a<Operand>(p[mma_m], k, x); };
    if constexpr (Config::kDimSplit == 1) {
      gemm_rs<Operand, kTileKv / 16>(o_, rows, a_word);
    } else {
      const int columns = this->dim_split_idx() * 32;
      gemm_rs<Operand, kTileKv / 16, Config::kDimV>(
          o_, Tile::advance(rows, columns / Tile::kChunkElements), a_word);
    }
  }

  // Row maxima and sums lie in shared memory between softmaxes if registers are scarce.
  __device__ __forceinline__ uint32_t row_stats_address(int mma_m) const {
    return q_tile_.base + Config::kRowStatsOffset + (mma_m * kThreads + no_hoist(threadIdx.x)) * 16;
  }
  __device__ __forceinline__ void store_row_stats() const {
    if constexpr (Config::kRowStatsInSmem) {
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        ptx::store_shared(row_stats_address(mma_m), m_[mma_m][0], m_[mma_m][1], l_[mma_m][0],
                          l_[mma_m][1]);
      }
    }
  }
  __device__ __forceinline__ void load_row_stats() {
    if constexpr (Config::kRowStatsInSmem) {
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
        float x[4];
        ptx::load_shared(x, row_stats_address(mma_m));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m_[mma_m][half] = x[half];
          l_[mma_m][half] = x[2 + half];
        }
      }
    }
  }

  __device__ __forceinline__ void rescale_o(int mma_m, int half, float rescale) {
#pragma unroll
    for (int n = 0; n < Config::kAccColumns / 8; ++n) {
      o_[mma_m][n][half * 2] *= rescale;
      o_[mma_m][n][half * 2 + 1] *= rescale;
    }
  }

  __device__ __forceinline__ void modify(ScoreFragment& s, int32_t tile) const {
    const WarpRows<Config> own = warp_rows();
    modify_scores<ScoreMod, Config::kIsFp32>(
        params_, s, tile * kTileKv + own.lane_ % 4 * 2,
        [own](int mma_m, int half) { return own.row_of(mma_m, half); });
  }

  // Sets scores of hidden keys to -inf. block_mask_full: the block mask hides no key. Rows past the
  // last are not stored.
  __device__ __forceinline__ void mask(ScoreFragment& s, int32_t tile, bool block_mask_full) const {
    const Interval columns{tile * kTileKv, (tile + 1) * kTileKv};
    const WarpRows<Config> own = warp_rows();
    const int32_t first = columns.begin + own.lane_ % 4 * 2;
    if (columns.begin < full_keys_.begin || columns.end > full_keys_.end) {
      const Interval keys = intersect(columns, keys_);
      const MaskRule rule = params_.problem.mask_rule();
      if (sees_all(rule)) {
        IntervalMask{keys.begin - first, keys.end - keys.begin}.template visit_hidden<kTileKv / 8>(
            [&](int n, int e) {
#pragma unroll
              for (int x = 0; x < kMmaM * 2; ++x) s[x / 2][n][x % 2 * 2 + e] = -INFINITY;
            });
      } else {
        const FwdWorkTile work_tile = reloaded_work_tile();
#pragma unroll
        for (int x = 0; x < kMmaM * 2; ++x) {
          const int32_t i = work_tile.query_of(no_hoist(own.row_of(x / 2, x % 2)));
          const Interval visible = intersect(visible_keys(rule, i, work_tile.seqlen_.len), keys);
          IntervalMask{visible.begin - first, visible.end - visible.begin}.forward(
              SRowLayout{x % 2}, flat(s[x / 2]));
        }
      }
    }
    if constexpr (ScoreMod::template kHas<TreeMask>) {
      hide_by_bits(params_, s, columns, own.lane_,
                   [&own](int mma_m, int half) { return no_hoist(own.row_of(mma_m, half)); });
    }
    if (block_mask_full) return;
    const BlockMask blocks = BlockMask::of(params_.problem, params_.args.inputs, b_, first_head_);
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t i = query_of(min(no_hoist(own.row_of(mma_m, half)), rows_ - 1));
        blocks.shown_keys<kTileKv / 8>(i, columns.begin, keys_.end, own.lane_)
            .forward(SRowLayout{half}, flat(s[mma_m]));
      }
    }
  }

  // Online softmax: turns S into P, updates the running maxima and sums, and rescales O.
  __device__ __forceinline__ void softmax(ScoreFragment& s) {
    load_row_stats();
    float factor =
        ScoreMod::kIsPlain
            ? params_.problem.scale * kLog2E
            : WideMembers<Config::kIsFp32>::remaining_factor(params_.problem) * kWideUnit;
    if constexpr (k3xFp16) factor = block_scale_.score_factor(factor);
    constexpr int kRows = Config::kRowsAtOnce;
#pragma unroll
    for (int first = 0; first < kMmaM * 2; first += kRows) {
      float row_max[kRows];
#pragma unroll
      for (float& t : row_max) t = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
        for (int x = first; x < first + kRows; ++x) {
          const float* pair = &s[x / 2][n][x % 2 * 2];
          row_max[x - first] = fmaxf(row_max[x - first], fmaxf(pair[0], pair[1]));
        }
      }
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (float& t : row_max) t = fmaxf(t, __shfl_xor_sync(~0u, t, step));
      }
#pragma unroll
      for (int x = first; x < first + kRows; ++x) {
        online_softmax_row(s[x / 2], x / 2, x % 2, row_max[x - first], factor);
      }
    }
    store_row_stats();
  }

  // softmax() of rows g (half 0) or g + 8 (half 1). row_max: of this tile. factor: converts scores
  // to units of log2(e).
  __device__ __forceinline__ void online_softmax_row(float (&s)[kTileKv / 8][4], int mma_m,
                                                     int half, float row_max, float factor) {
    const float wide = factor * (1.0f / kWideUnit);
    const float old_max = m_[mma_m][half], m = fmaxf(old_max, row_max * wide);
    // A row that has seen no key has P = 0, not NaN.
    const float base = m == -INFINITY ? 0.0f : m;
    const float rescale = ptx::exp2((old_max - base) * kWideUnit);
    float offset = base * kWideUnit;
    const bool large_base = fabsf(base) > kLargeScore / kWideUnit;
    // After the first tiles, maxima rarely increase.
    if (!__all_sync(~0u, m == old_max && !large_base)) {
      rescale_o(mma_m, half, rescale);
      if (__any_sync(~0u, large_base)) {
#pragma unroll
        for (int x = 0; x < kTileKv / 4; ++x) {
          float& score = s[x / 2][half * 2 + x % 2];
          score = __fsub_rn(__fmul_rn(score, wide), base);
        }
        factor = kWideUnit;
        offset = 0.0f;
      }
    }
    float total = 0.0f;
#pragma unroll
    for (int x = 0; x < kTileKv / 4; ++x) {
      float& weight = s[x / 2][half * 2 + x % 2];
      weight = ptx::exp2(fmaf(weight, factor, -offset));
      total += weight;
    }
    m_[mma_m][half] = m;
    l_[mma_m][half] = l_[mma_m][half] * rescale + total;
  }

  // Sets P to 0 where dropout drops it.
  __device__ __forceinline__ void drop(ScoreFragment& p, int32_t tile) const {
    if (params_.dropout_threshold == 0) return;
    const Dropout dropout = Dropout::of(params_.problem, params_.args.inputs, b_, first_head_);
    const WarpRows<Config> own = warp_rows();
    dropout.visit_dropped<kMmaM, kTileKv / 8, false>(
        params_.dropout_threshold, queries_.begin + own.warp_row_, tile * kTileKv, own.lane_,
        [&](int mma_m, int n, int x) { p[mma_m][n][x] = 0.0f; });
  }

  __device__ __forceinline__ void epilogue() {
    __syncthreads();  // all warps have read Q, whose buffer O uses
    load_row_stats();
    const FwdEpilogue<Config> epilogue(params_, q_tile_.base);
    float o_scale = 1.0f;
    if constexpr (k3xFp16) o_scale = block_scale_.output_factor();
    epilogue.store(o_, m_, l_, o_scale);
  }

  const ForwardParams& params_;
  const typename Config::QTile q_tile_;
  const typename Config::KTile k_tile_;
  const typename Config::VTile v_tile_;
  const uint32_t pages_, v_pages_;
  const BlockScale block_scale_;
  Tiles tiles_;
  // Row maxima in units of kWideUnit log2(e); row sums over this lane's columns.
  float m_[kMmaM][2], l_[kMmaM][2];
  float o_[kMmaM][Config::kAccColumns / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    fwd_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  FwdKernel<Config> kernel(params, ptx::shared_address(shared));
  if (kernel.init()) kernel.run();
}

}  // namespace flashattn::cuda::sm80
