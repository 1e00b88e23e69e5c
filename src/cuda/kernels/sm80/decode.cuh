// The portable decode kernel: up to 64 rows, queries of a KV head's GQA group, 16-bit elements,
// scores that are only scaled, trees of drafted tokens. Its time is that of loading the KV cache,
// plus that from the last load to the last store.
//
// Four warps share a KV tile's keys. Each has all rows (or those of its row group), and row maxima,
// sums and O of its own keys, which are combined at the end. kStages tiles of K and of V are in
// flight; a buffer is refilled as soon as all warps have read it.
#pragma once

#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/vec4.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

// Shared memory: Q | stages of K | stages of V | page numbers | FwdWorkTile.
// kRowGroups: groups of four warps, which have 16 kMmaM rows each.
template <class T_, int kDimQk_, int kDimV_, int kMmaM_, int kTileKv_, int kStages_,
          int kMinCtasPerSm_, int kRowGroups_ = 1>
struct DecodeConfig {
  using T = T_;
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;  // of the tiles; smaller heads are padded
  static constexpr int kMmaM = kMmaM_, kRowGroups = kRowGroups_, kKeyGroups = 4;
  static constexpr int kWarps = kKeyGroups * kRowGroups, kThreads = 32 * kWarps;
  static constexpr int kGroupRows = 16 * kMmaM, kTileQ = kGroupRows * kRowGroups;
  static constexpr int kTileKv = kTileKv_, kWarpKv = kTileKv / kKeyGroups;
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // limits registers

  using QTile = SmemTile<kTileQ, kDimQk>;
  using KTile = SmemTile<kTileKv, kDimQk>;
  using VTile = SmemTile<kTileKv, kDimV>;
  static_assert(std::is_same<KTile, VTile>::value, "the same threads load the same rows of both");
  static constexpr int kKOffset = QTile::kBytes;
  static constexpr int kVOffset = kKOffset + kStages * KTile::kBytes;
  static constexpr int kPagesOffset = kVOffset + kStages * VTile::kBytes;
  // Page numbers, a word a thread: for the tiles in flight and for those that follow them.
  static constexpr int kPageSets = 2 * kStages;
  static_assert((kStages & (kStages - 1)) == 0, "the lowest bits of a tile's index are its stage");
  static constexpr int kWorkTileOffset = kPagesOffset + kPageSets * kThreads * 4;
  static constexpr int kSharedBytes = kWorkTileOffset + FwdWorkTile::kWords * 4;
  static_assert(kMinCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024,
                "an H100's shared memory holds the CTAs");
  // The warps' partial results use the buffers of Q, K and V: rows of O, which start at different
  // banks, then row maxima and sums.
  static constexpr int kORowBytes = kDimV * 4 + 32;
  static constexpr int kRowStatsOffset = kKeyGroups * kTileQ * kORowBytes;
  static_assert(kRowStatsOffset + kKeyGroups * kTileQ * 8 <= kPagesOffset, "partial results fit");
};

template <class Config>
class DecodeKernel : RowEpilogue {
  using T = typename Config::T;
  static constexpr int kTileKv = Config::kTileKv, kWarpKv = Config::kWarpKv;
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  static constexpr int kMmaM = Config::kMmaM;
  using ScoreFragment = float[kMmaM][kWarpKv / 8][4];

 public:
  __device__ __forceinline__ DecodeKernel(const ForwardParams& params, uint32_t shared)
      : RowEpilogue(params), shared_(shared), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  __device__ __forceinline__ bool init() { return FwdWorkTile::template init<sizeof(T)>(params_); }

  __device__ __forceinline__ void run() {
    if (params_.max_splits > 1) ptx::griddep_launch_dependents();  // the combine kernel
    if (threadIdx.x == 0) store_to_smem(shared_ + Config::kWorkTileOffset);
    mainloop();
    load_from_smem(shared_ + Config::kWorkTileOffset);
    store_partials();
    __syncthreads();
    for (int r = warp_; r < rows_; r += Config::kWarps) combine_warps(r);
  }

 private:
  __device__ __forceinline__ void mainloop() {
    const Inputs& in = params_.args.inputs;
    const Problem& problem = params_.problem;
    const int32_t first = keys_.begin / kTileKv, end = (keys_.end + kTileKv - 1) / kTileKv;
    for (int n = 0; n < kStages; ++n) prefetch_pages(first + n);
    ptx::cp_async_commit();
    const typename Config::QTile q{shared_};
    if (has_uniform_stride()) {
      const RowView rows{query_row<sizeof(T)>(in.q, 0), row_bytes<sizeof(T)>(in.q)};
      load_tokens<kThreads>(q, problem.dim_qk, rows, 0, rows_);
    } else {
      load_tile<kThreads>(q, problem.dim_qk, [&](int r) -> const char* {
        return r < rows_ ? query_row<sizeof(T)>(in.q, r) : nullptr;
      });
    }
    clear();
    ptx::cp_async_wait<0>();  // page numbers have arrived; Q is in the group of the first K
    // The first kStages iterations only load.
    for (int32_t tile = first - kStages; tile < end; ++tile) {
      const int32_t stage = tile & (kStages - 1), next = tile + kStages;
      const typename Config::KTile k{shared_ + Config::kKOffset + stage * Config::KTile::kBytes};
      const typename Config::VTile v{shared_ + Config::kVOffset + stage * Config::VTile::kBytes};
      ScoreFragment s = {};
      if (tile >= first) {
        ptx::cp_async_wait<2 * kStages - 1>();
        __syncthreads();  // K has arrived
        gemm_nt<T, Config::kDimQk>(s, a_k_major(q, first_row(), lane_),
                                   b_k_major(k, key_group() * kWarpKv, lane_));
        __syncthreads();  // all warps have read K
      }
      if (next < end) {
        load_kv<kThreads>(params_, k, pages_address(next), in.k, k_, problem.dim_qk,
                          next * kTileKv);
        prefetch_pages(next + kStages);
      }
      ptx::cp_async_commit();
      if (tile >= first) {
        mask(s, tile * kTileKv + key_group() * kWarpKv);
        softmax(s);
        ptx::cp_async_wait<2 * kStages - 1>();
        __syncthreads();  // V has arrived
        gemm_rs<T, kWarpKv / 16>(
            o_, b_mn_major(v, key_group() * kWarpKv, lane_),
            [&](int mma_m, int step, int x) { return acc_as_a<T>(s[mma_m], step, x); });
        __syncthreads();  // all warps have read V
      }
      if (next < end) {
        load_kv<kThreads>(params_, v, pages_address(next), in.v, v_, problem.dim_v, next * kTileKv);
      }
      ptx::cp_async_commit();
    }
    ptx::cp_async_commit();  // Q's group, if there was no key
    ptx::cp_async_wait<0>();
    __syncthreads();  // the buffers are free, also if there was no key
  }

  // The address of the page numbers of a tile's rows.
  __device__ __forceinline__ uint32_t pages_address(int32_t tile) const {
    return shared_ + Config::kPagesOffset + (tile & (Config::kPageSets - 1)) * kThreads * 4;
  }

  __device__ __forceinline__ void prefetch_pages(int32_t tile) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return;
    const PagedRowView rows = paged_rows<sizeof(T)>(params_, params_.args.inputs.k, k_);
    PagedCopy<kThreads, typename Config::KTile>::prefetch_page_index(
        pages_address(tile), rows, tile * kTileKv, seqlen_.len.kv);
  }

  // The warp has the keys of key_group() in each tile, and rows from first_row() on.
  __device__ __forceinline__ int key_group() const { return warp_ % Config::kKeyGroups; }
  __device__ __forceinline__ int first_row() const {
    return Config::kRowGroups == 1 ? 0 : warp_ / Config::kKeyGroups * Config::kGroupRows;
  }
  __device__ __forceinline__ int32_t row_of(int mma_m, int half) const {
    return first_row() + mma_m * 16 + half * 8 + lane_ / 4;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        m_[mma_m][half] = -INFINITY;
        l_[mma_m][half] = 0.0f;
      }
#pragma unroll
      for (auto& columns : o_[mma_m]) {
#pragma unroll
        for (float& x : columns) x = 0.0f;
      }
    }
  }

  // Sets scores of hidden keys to -inf. begin: the warp's first key.
  __device__ __forceinline__ void mask(ScoreFragment& s, int32_t begin) const {
    const Interval columns{begin, begin + kWarpKv};
    const auto row = [this](int mma_m, int half) { return row_of(mma_m, half); };
    hide_by_tree(params_, s, columns, lane_, row);
    if (columns.begin >= full_keys_.begin && columns.end <= full_keys_.end) return;
    const Interval keys = intersect(columns, keys_);
    const int32_t first = begin + lane_ % 4 * 2;
    const MaskRule rule = params_.problem.mask_rule();
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      // Rows past the last are not stored.
      const Interval visible =
          sees_all(rule)
              ? keys
              : intersect(visible_keys(rule, query_of(row(x / 2, x % 2)), seqlen_.len), keys);
      IntervalMask{visible.begin - first, visible.end - visible.begin}.forward(SRowLayout{x % 2},
                                                                               flat(s[x / 2]));
    }
  }

  __device__ __forceinline__ void softmax(ScoreFragment& s) {
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaM; ++mma_m) {
      online_softmax(s[mma_m], m_[mma_m], l_[mma_m], o_[mma_m]);
    }
  }

  // Turns S of 16 rows into P, updates the running maxima and sums, and rescales O.
  __device__ __forceinline__ void online_softmax(float (&s)[kWarpKv / 8][4], float (&row_maxima)[2],
                                                 float (&row_sums)[2],
                                                 float (&o)[Config::kDimV / 8][4]) const {
    const float wide = params_.problem.scale * (kLog2E / kWideUnit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = -INFINITY;
#pragma unroll
      for (const auto& x : s) row_max = fmaxf(row_max, fmaxf(x[half * 2], x[half * 2 + 1]));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
      const float old_max = row_maxima[half], m = fmaxf(old_max, row_max * wide);
      // A row that has seen no key has P = 0, not NaN.
      const float base = m == -INFINITY ? 0.0f : m;
      const float rescale = ptx::exp2((old_max - base) * kWideUnit);
      float factor = wide * kWideUnit, offset = base * kWideUnit;
      const bool large_base = fabsf(base) > kLargeScore / kWideUnit;
      // After the first tiles, maxima rarely increase.
      if (!__all_sync(~0u, m == old_max && !large_base)) {
#pragma unroll
        for (auto& columns : o) {
          columns[half * 2] *= rescale;
          columns[half * 2 + 1] *= rescale;
        }
        if (__any_sync(~0u, large_base)) {
#pragma unroll
          for (auto& x : s) {
#pragma unroll
            for (int e = half * 2; e < half * 2 + 2; ++e) {
              x[e] = __fsub_rn(__fmul_rn(x[e], wide), base);
            }
          }
          factor = kWideUnit;
          offset = 0.0f;
        }
      }
      float total = 0.0f;
#pragma unroll
      for (auto& x : s) {
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          x[e] = ptx::exp2(fmaf(x[e], factor, -offset));
          total += x[e];
        }
      }
      row_maxima[half] = m;
      row_sums[half] = row_sums[half] * rescale + total;
    }
  }

  // The addresses of a partial row of O, and of its row maximum and sum, by key group.
  __device__ __forceinline__ uint32_t o_address(int group, int32_t r) const {
    return shared_ + (group * Config::kTileQ + r) * Config::kORowBytes;
  }
  __device__ __forceinline__ uint32_t row_stats_address(int group, int32_t r) const {
    return shared_ + Config::kRowStatsOffset + (group * Config::kTileQ + r) * 8;
  }

  __device__ __forceinline__ void store_partials() const {
#pragma unroll
    for (int x = 0; x < kMmaM * 2; ++x) {
      const int mma_m = x / 2, half = x % 2;
      float sum = l_[mma_m][half];  // over the lane's columns
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t r = row_of(mma_m, half);
      if (r >= rows_) continue;
      if (lane_ % 4 == 0) {
        ptx::store_shared_pair(row_stats_address(key_group(), r), {m_[mma_m][half], sum});
      }
      const uint32_t to = o_address(key_group(), r) + lane_ % 4 * 8;
#pragma unroll
      for (int n = 0; n < Config::kDimV / 8; ++n) {
        ptx::store_shared_pair(to + n * 32, {o_[mma_m][n][half * 2], o_[mma_m][n][half * 2 + 1]});
      }
    }
  }

  // Combines the partial results of row r, in the order of the key groups. One warp calls this.
  __device__ __forceinline__ void combine_warps(int32_t r) const {
    constexpr int kKeyGroups = Config::kKeyGroups;
    float2 row_stats[kKeyGroups];
    float weights[kKeyGroups], row_max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeyGroups; ++w) {
      row_stats[w] = ptx::load_shared_pair(row_stats_address(w, r));
      row_max = fmaxf(row_max, row_stats[w].x);
    }
#pragma unroll
    for (int w = 0; w < kKeyGroups; ++w) {
      weights[w] = row_max == -INFINITY ? 0.0f : ptx::exp2((row_stats[w].x - row_max) * kWideUnit);
      sum += row_stats[w].y * weights[w];
    }
    const int32_t single_kv = is_fp32() ? single_key(r, sum) : -1;
    if (single_kv >= 0) sum = 1.0f;
    const float rescale = add_sink(r, row_max, sum);
    if (lane_ == 0) store_lse(r, row_max, sum);
    const float factor = sum == 0.0f ? 0.0f : rescale / sum;
#pragma unroll
    for (int column = lane_ * 4; column - lane_ * 4 < Config::kDimV; column += 128) {
      if (column >= params_.problem.dim_v) return;
      float o[4] = {};
#pragma unroll
      for (int w = 0; w < kKeyGroups; ++w) {
        float x[4];
        ptx::load_shared(x, o_address(w, r) + column * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(x[e], weights[w], o[e]);
      }
#pragma unroll
      for (float& x : o) x *= factor;
      if (single_kv >= 0) {
        const float4 value =
            load_vec4<true>(reinterpret_cast<const T*>(value_of<sizeof(T)>(single_kv)) + column);
        o[0] = value.x, o[1] = value.y, o[2] = value.z, o[3] = value.w;
      }
      if (is_fp32()) {
        store_vec4<true>(fp32_row(r) + column, o);
      } else {
        store_vec4<true>(reinterpret_cast<T*>(query_row<2>(params_.args.o, r)) + column, o);
      }
    }
  }

  const uint32_t shared_;
  const int lane_, warp_;
  // Row maxima in units of kWideUnit log2(e); row sums over this lane's columns.
  float m_[kMmaM][2], l_[kMmaM][2];
  float o_[kMmaM][Config::kDimV / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  DecodeKernel<Config> kernel(params, ptx::shared_address(shared));
  if (kernel.init()) kernel.run();
}

}  // namespace flashattn::cuda::sm80
