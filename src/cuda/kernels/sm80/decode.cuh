// The portable decode kernel: up to 64 rows, queries of a KV head's GQA group, Q of 16 bits, K and
// V of as many or in E4M3, trees of drafted tokens. Its time is that of loading the KV cache, plus
// that from the last load to the last store.
//
// Four or eight warps share a KV tile's keys. Each has all rows (or those of its row group), and
// row maxima, sums and O of its own keys, which are combined at the end. kStages tiles of K and of
// V are in flight; a buffer is refilled as soon as all warps have read it.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/e4m3_cache.cuh"
#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/vec4.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

// Shared memory: Q | stages of K | stages of V | page numbers | E4m3CacheLayout | FwdWorkTile.
// Operand: the type of K and V. kRowGroups: groups of kKeyGroups warps, with 16 kMmaM rows each.
template <class Operand_, int kDimQk_, int kDimV_, int kMmaM_, int kTileKv_, int kStages_,
          int kMinCtasPerSm_, int kRowGroups_ = 1, int kKeyGroups_ = 4,
          class ScoreMod_ = ScoreModChain<>>
struct DecodeConfig {
  using Operand = Operand_;
  using ScoreMod = ScoreMod_;
  static constexpr bool kIsE4m3 = std::is_same<Operand, ptx::E4m3>::value;
  using T = std::conditional_t<kIsE4m3, __half, Operand>;  // of Q and P in products
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;   // of the tiles; smaller heads are padded
  static constexpr int kMmaM = kMmaM_, kRowGroups = kRowGroups_, kKeyGroups = kKeyGroups_;
  static constexpr int kWarps = kKeyGroups * kRowGroups, kThreads = 32 * kWarps;
  static constexpr int kGroupRows = 16 * kMmaM, kTileQ = kGroupRows * kRowGroups;
  static constexpr int kTileKv = kTileKv_, kWarpKv = kTileKv / kKeyGroups;
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // limits registers

  using QTile = SmemTile<kTileQ, kDimQk>;
  using KTile = SmemTile<kTileKv, kDimQk, sizeof(Operand)>;
  using VTile = SmemTile<kTileKv, kDimV, sizeof(Operand)>;
  static_assert(std::is_same<KTile, VTile>::value, "the same threads load the same rows of both");
  static constexpr int kQChunks = QTile::kBytes / 16;
  static constexpr int kQThreads = kQChunks < kThreads ? kQChunks : kThreads;  // that load Q
  static constexpr int kKOffset = QTile::kBytes;
  static constexpr int kVOffset = kKOffset + kStages * KTile::kBytes;
  // The warps' partial results use the buffers of Q, K and V, columns of O in kOutputSteps: rows of
  // O, which start at different banks, then row maxima and sums.
  static constexpr int kOutputSteps = kIsE4m3 ? 2 : 1, kOutputColumns = kDimV / kOutputSteps;
  static constexpr int kORowBytes = kOutputColumns * 4 + 32;
  static constexpr int kRowStatsOffset = kKeyGroups * kTileQ * kORowBytes;
  static constexpr int kPartialBytes = kRowStatsOffset + kKeyGroups * kTileQ * 8;
  static constexpr int kBufferBytes = kVOffset + kStages * VTile::kBytes;
  static_assert(kIsE4m3 || kPartialBytes <= kBufferBytes, "partial results fit");
  static constexpr int kPagesOffset = kPartialBytes > kBufferBytes ? kPartialBytes : kBufferBytes;
  // Page numbers, a word a thread: for the tiles in flight and for those that follow them.
  static constexpr int kPageSets = 2 * kStages;
  static_assert((kStages & (kStages - 1)) == 0, "the lowest bits of a tile's index are its stage");
  using CacheLayout = E4m3CacheLayout<kTileQ, kTileKv, kStages>;
  static constexpr int kCacheOffset = kPagesOffset + kPageSets * kThreads * 4;
  static constexpr int kWorkTileOffset = kCacheOffset + (kIsE4m3 ? CacheLayout::kBytes : 0);
  static constexpr int kSharedBytes = kWorkTileOffset + FwdWorkTile::kWords * 4;
  static_assert(kMinCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024,
                "an H100's shared memory holds the CTAs");
};

// In place of E4m3Cache.
struct NoCache {
  __device__ __forceinline__ NoCache(const ForwardParams&, uint32_t) {}
};

template <class Config>
class DecodeKernel : RowEpilogue {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using ScoreMod = typename Config::ScoreMod;
  using Cache = std::conditional_t<Config::kIsE4m3, E4m3Cache<Config>, NoCache>;
  static constexpr bool kIsE4m3 = Config::kIsE4m3;
  static constexpr int kTileKv = Config::kTileKv, kWarpKv = Config::kWarpKv;
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  static constexpr int kMmaM = Config::kMmaM;
  using ScoreFragment = float[kMmaM][kWarpKv / 8][4];

 public:
  __device__ __forceinline__ DecodeKernel(const ForwardParams& params, uint32_t shared)
      : RowEpilogue(params),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        cache_(params, shared + Config::kCacheOffset) {}

  __device__ __forceinline__ bool init() {
    return FwdWorkTile::template init<sizeof(Operand)>(params_);
  }

  __device__ __forceinline__ void run() {
    if (params_.max_splits > 1) ptx::griddep_launch_dependents();  // the combine kernel
    if (threadIdx.x == 0) store_to_smem(shared_ + Config::kWorkTileOffset);
    mainloop();
    load_from_smem(shared_ + Config::kWorkTileOffset);
#pragma unroll
    for (int step = 0; step < Config::kOutputSteps; ++step) {
      if (step > 0) __syncthreads();
      store_partials(step);
      __syncthreads();
      for (int r = warp_; r < rows_; r += Config::kWarps) combine_warps(r, step);
    }
  }

 private:
  __device__ __forceinline__ void mainloop() {
    const Inputs& in = params_.args.inputs;
    const Problem& problem = params_.problem;
    const int32_t first = keys_.begin / kTileKv, end = (keys_.end + kTileKv - 1) / kTileKv;
    for (int n = 0; n < kStages; ++n) prefetch_pages(first + n);
    ptx::cp_async_commit();
    const typename Config::QTile q{shared_};
    if (Config::kQThreads == kThreads || threadIdx.x < Config::kQThreads) load_q(q);
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
        if constexpr (kIsE4m3) {
          if (tile == first) {
            cache_.prepare_q(q, *this);
            __syncthreads();
          }
        }
        if (has_rows()) {
          gemm_nt<Operand, Config::kDimQk>(s, a_k_major(q, first_row(), lane_),
                                           b_k_major(k, key_group() * kWarpKv, lane_));
          if constexpr (kIsE4m3) cache_.scale_scores(s, stage, first_key(), rows_of_lane());
        }
        __syncthreads();  // all warps have read K
      }
      if (next < end) {
        load_kv<kThreads>(params_, k, pages_address(next), in.k, k_, problem.dim_qk,
                          next * kTileKv);
        if constexpr (kIsE4m3) cache_.prefetch(Cache::kK, stage, *this, next * kTileKv);
        prefetch_pages(next + kStages);
      }
      ptx::cp_async_commit();
      if (tile >= first) {
        if (has_rows()) {
          modify_scores<ScoreMod, false>(params_, s, tile * kTileKv + first_key(), rows_of_lane());
          mask(s, tile * kTileKv + key_group() * kWarpKv);
          softmax(s);
        }
        ptx::cp_async_wait<2 * kStages - 1>();
        __syncthreads();  // V has arrived
        if (has_rows()) {
          if constexpr (kIsE4m3) {
            cache_.scale_weights(s, o_, stage, first_key(), key_group() * kWarpKv, lane_);
          }
          gemm_rs<Operand, kWarpKv / 16>(
              o_, b_mn_major(v, key_group() * kWarpKv, lane_),
              [&](int mma_m, int step, int x) { return acc_as_a<T>(s[mma_m], step, x); });
        }
        __syncthreads();  // all warps have read V
      }
      if (next < end) {
        load_kv<kThreads>(params_, v, pages_address(next), in.v, v_, problem.dim_v, next * kTileKv);
        if constexpr (kIsE4m3) cache_.prefetch(Cache::kV, stage, *this, next * kTileKv);
      }
      ptx::cp_async_commit();
    }
    ptx::cp_async_commit();  // Q's group, if there was no key
    ptx::cp_async_wait<0>();
    __syncthreads();  // the buffers are free, also if there was no key
  }

  __device__ __forceinline__ void load_q(typename Config::QTile q) const {
    const Inputs& in = params_.args.inputs;
    const int32_t dim = params_.problem.dim_qk;
    if (has_uniform_stride()) {
      const RowView rows{query_row<sizeof(T)>(in.q, 0), row_bytes<sizeof(T)>(in.q)};
      load_tokens<Config::kQThreads>(q, dim, rows, 0, rows_);
    } else {
      load_tile<Config::kQThreads>(q, dim, [&](int r) -> const char* {
        return r < rows_ ? query_row<sizeof(T)>(in.q, r) : nullptr;
      });
    }
  }

  // The address of the page numbers of a tile's rows.
  __device__ __forceinline__ uint32_t pages_address(int32_t tile) const {
    return shared_ + Config::kPagesOffset + (tile & (Config::kPageSets - 1)) * kThreads * 4;
  }

  __device__ __forceinline__ void prefetch_pages(int32_t tile) const {
    if (!(params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV)) return;
    const PagedRowView rows = paged_rows<sizeof(Operand)>(params_, params_.args.inputs.k, k_);
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
  __device__ __forceinline__ auto rows_of_lane() const {
    return [this](int mma_m, int second) { return row_of(mma_m, second); };
  }
  // Whether the warp has rows. Others only help to load.
  __device__ __forceinline__ bool has_rows() const {
    return !kIsE4m3 || Config::kRowGroups == 1 || first_row() < rows_;
  }
  // The lane's first key in a tile.
  __device__ __forceinline__ int first_key() const { return key_group() * kWarpKv + lane_ % 4 * 2; }

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
    const auto row = rows_of_lane();
    hide_by_bits(params_, s, columns, lane_, row);
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
    const float wide = ScoreMod::kIsPlain ? params_.problem.scale * (kLog2E / kWideUnit)
                                          : WideMembers<false>::remaining_factor(params_.problem);
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

  // Stores columns [step, step + 1) kOutputColumns.
  __device__ __forceinline__ void store_partials(int step) const {
    float factor = 1.0f;
    if constexpr (kIsE4m3) factor = cache_.output_factor(*this);
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
      const auto& o = o_[mma_m];
      if constexpr (kIsE4m3) {  // even and odd columns, see mma_e4m3.cuh
        const uint32_t to = o_address(key_group(), r) + lane_ % 4 * 16;
        const float by = sum == 0.0f ? 0.0f : factor;  // no key has that descale
#pragma unroll
        for (int n = 0; n < Config::kOutputColumns / 8; n += 2) {
          const float* even = &o[step * Config::kOutputColumns / 8 + n][half * 2];
          const float* odd = &o[step * Config::kOutputColumns / 8 + n + 1][half * 2];
          ptx::store_shared(to + n * 32, even[0] * by, odd[0] * by, even[1] * by, odd[1] * by);
        }
      } else {
        const uint32_t to = o_address(key_group(), r) + lane_ % 4 * 8;
#pragma unroll
        for (int n = 0; n < Config::kDimV / 8; ++n) {
          ptx::store_shared_pair(to + n * 32, {o[n][half * 2], o[n][half * 2 + 1]});
        }
      }
    }
  }

  // Combines the partial results of row r, of the columns of a step, in the order of the key
  // groups. One warp calls this.
  __device__ __forceinline__ void combine_warps(int32_t r, int step) const {
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
    if (lane_ == 0 && step == 0) store_lse(r, row_max, sum);
    const float factor = sum == 0.0f ? 0.0f : rescale / sum;
#pragma unroll
    for (int x = lane_ * 4; x - lane_ * 4 < Config::kOutputColumns; x += 128) {
      const int column = step * Config::kOutputColumns + x;
      if (column >= params_.problem.dim_v) return;
      if (Config::kOutputColumns % 128 != 0 && x >= Config::kOutputColumns) return;
      float o[4] = {};
#pragma unroll
      for (int w = 0; w < kKeyGroups; ++w) {
        float part[4];
        ptx::load_shared(part, o_address(w, r) + x * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(part[e], weights[w], o[e]);
      }
#pragma unroll
      for (float& element : o) element *= factor;
      if (single_kv >= 0) {
        const float4 value = load_value(single_kv, column);
        o[0] = value.x, o[1] = value.y, o[2] = value.z, o[3] = value.w;
      }
      store_output(r, column, o);
    }
  }

  __device__ __forceinline__ float4 load_value(int32_t key, int column) const {
    const Operand* const from = reinterpret_cast<const Operand*>(value_of<sizeof(Operand)>(key));
    if constexpr (kIsE4m3) {
      return cache_.value(*this, key, from + column);
    } else {
      return load_vec4<true>(from + column);
    }
  }

  __device__ __forceinline__ void store_output(int32_t r, int column, const float (&o)[4]) const {
    if (is_fp32()) {
      store_vec4<true>(fp32_row(r) + column, o);
    } else if (kIsE4m3 && params_.problem.dtype_o == FLASHATTN_DTYPE_BF16) {
      store_vec4<true>(reinterpret_cast<__nv_bfloat16*>(query_row<2>(params_.args.o, r)) + column,
                       o);
    } else {
      store_vec4<true>(reinterpret_cast<T*>(query_row<2>(params_.args.o, r)) + column, o);
    }
  }

  const uint32_t shared_;
  const int lane_, warp_;
  Cache cache_;
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
