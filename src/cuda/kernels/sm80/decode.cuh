// The portable decode kernel: up to 64 rows, queries of a KV head's GQA group, Q of 16 bits, K and
// V of as many or in E4M3, trees of drafted tokens. Its time is that of loading the KV cache, plus
// that from the last load to the last store.
//
// Four or eight warps share a KV tile's keys. Each has all rows (or those of its row group), and
// row maxima, sums and O of its own keys, which are combined at the end. kStages tiles of K and of
// V are in flight; a buffer is refilled once all warps have read it.
//
// E4M3: kDimSplit warps may share rows and keys. Each converts its range of K's and of V's columns:
// it sums Q K^T over that range, and has those columns of O. They exchange the sums.
#pragma once

#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/kernels/sm80/decode_config.cuh"
#include "cuda/kernels/sm80/decode_softmax.cuh"
#include "cuda/kernels/sm80/e4m3_cache.cuh"
#include "cuda/kernels/sm80/fwd_epilogue.cuh"
#include "cuda/device/vec4.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/page_runs.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

// In place of E4m3Cache.
struct NoCache {
  static __device__ __forceinline__ float weight_shift() { return 0.0f; }
  __device__ __forceinline__ NoCache(const ForwardParams&, uint32_t) {}
};

template <class Config>
class DecodeKernel : RowEpilogue, DecodeSoftmax<Config> {
  using Softmax = DecodeSoftmax<Config>;
  using Softmax::m_, Softmax::l_, Softmax::o_, Softmax::clear, Softmax::update;
  using typename Softmax::ScoreFragment;
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using ScoreMod = typename Config::ScoreMod;
  using Cache = std::conditional_t<Config::kIsE4m3, E4m3Cache<Config>, NoCache>;
  static constexpr bool kIsE4m3 = Config::kIsE4m3;
  static constexpr int kTileKv = Config::kTileKv, kWarpKv = Config::kWarpKv;
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  static constexpr int kMmaM = Config::kMmaM;
  // Groups of cp.async behind that of the K or V that is waited for. E4M3: a buffer is refilled
  // behind the next barrier that there is anyway, half a tile later.
  static constexpr int kPending = 2 * kStages - (kIsE4m3 ? 2 : 1);
  static constexpr int kDimSplit = Config::kDimSplit, kWarpDimV = Config::kWarpDimV;

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
    const int32_t first = keys_.begin / kTileKv, end = (keys_.end + kTileKv - 1) / kTileKv;
    for (int n = 0; n < kStages; ++n) prefetch_pages(first + n);
    ptx::cp_async_commit();
    const typename Config::QTile q{shared_};
    if (Config::kQThreads == kThreads || threadIdx.x < Config::kQThreads) load_q(q);
    clear();
    ptx::cp_async_wait<0>();  // page numbers have arrived; Q is in the group of the first K
    // The first kStages iterations only load.
    for (int32_t tile = first - kStages; tile < end; ++tile) {
      const int32_t stage = tile & (kStages - 1);
      const auto k = k_tile(tile);
      const auto v = v_tile(tile);
      ScoreFragment s = {};
      if (tile >= first) {
        ptx::cp_async_wait<kPending>();
        __syncthreads();  // K has arrived; all warps have read the V before
      }
      if constexpr (kIsE4m3) refill_v(tile - 1, first, end);
      if (tile >= first) {
        if constexpr (kIsE4m3) {
          if (tile == first) {
            cache_.prepare_q(q, *this);
            __syncthreads();
          }
        }
        if (has_rows()) {
          multiply_q_k(s, q, k);
          if constexpr (kIsE4m3) cache_.scale_scores(s, stage, first_key(), rows_of_lane());
        }
        if constexpr (!kIsE4m3) __syncthreads();  // all warps have read K
      }
      if constexpr (!kIsE4m3) refill_k(tile, end);
      if (tile >= first) {
        if (has_rows()) {
          modify_scores<ScoreMod, false>(params_, s, tile * kTileKv + first_key(), rows_of_lane());
          mask(s, tile * kTileKv + key_group() * kWarpKv);
          softmax(s);
        }
        ptx::cp_async_wait<kPending>();
        __syncthreads();  // V has arrived; all warps have read K
      }
      if constexpr (kIsE4m3) refill_k(tile, end);
      if (tile >= first) {
        if (has_rows()) {
          if constexpr (kIsE4m3) {
            cache_.scale_weights(s, o_, stage, first_key(), key_group() * kWarpKv, lane_);
          }
          multiply_p_v(s, v);
        }
        if constexpr (!kIsE4m3) __syncthreads();  // all warps have read V
      }
      if constexpr (!kIsE4m3) refill_v(tile, first, end);
    }
    ptx::cp_async_commit();  // Q's group, if there was no key
    ptx::cp_async_wait<0>();
    __syncthreads();  // the buffers are free, also if there was no key
  }

  __device__ __forceinline__ auto k_tile(int32_t tile) const {
    const int stage = tile & (kStages - 1);
    return typename Config::KTile{shared_ + Config::kKOffset + stage * Config::KTile::kBytes};
  }
  __device__ __forceinline__ auto v_tile(int32_t tile) const {
    const int stage = tile & (kStages - 1);
    return typename Config::VTile{shared_ + Config::kVOffset + stage * Config::VTile::kBytes};
  }

  // Starts loading the tile that takes the buffer of a tile. Every call is a group of cp.async.
  __device__ __forceinline__ void refill_k(int32_t tile, int32_t end) const {
    const int32_t next = tile + kStages;
    if (next < end) {
      load_tile(k_tile(tile), params_.args.inputs.k, k_, params_.problem.dim_qk, next);
      if constexpr (kIsE4m3) {
        cache_.prefetch(Cache::kK, tile & (kStages - 1), *this, next * kTileKv);
      }
      prefetch_pages(next + kStages);
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void refill_v(int32_t tile, int32_t first, int32_t end) const {
    const int32_t next = tile + kStages;
    if (next < end && (!kIsE4m3 || next >= first)) {
      load_tile(v_tile(tile), params_.args.inputs.v, v_, params_.problem.dim_v, next);
      if constexpr (kIsE4m3) {
        cache_.prefetch(Cache::kV, tile & (kStages - 1), *this, next * kTileKv);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void multiply_q_k(ScoreFragment& s, typename Config::QTile q,
                                               typename Config::KTile k) const {
    const uint32_t a = a_k_major(q, first_row(), lane_);
    const uint32_t b = b_k_major(k, key_group() * kWarpKv, lane_);
    if constexpr (kDimSplit == 1) {
      gemm_nt<Operand, Config::kDimQk>(s, a, b);
    } else {
      constexpr int kDim = Config::kDimQk / kDimSplit;
      gemm_nt<Operand, kDim, Config::kDimQk>(
          s, Config::QTile::advance(a, dim_group() * (kDim / Config::QTile::kChunkElements)),
          Config::KTile::advance(b, dim_group() * (kDim / Config::KTile::kChunkElements)));
      add_sums(s);
    }
  }

  // Adds what the other warp of the pair has summed. Both get the same bits.
  __device__ __forceinline__ void add_sums(ScoreFragment& s) const {
    constexpr int kQuads = Config::kWarpSumsBytes / 512;
    const uint32_t own = shared_ + Config::kSumsOffset + warp_ * Config::kWarpSumsBytes;
    const uint32_t other =
        own + (dim_group() == 0 ? 1 : -1) * Config::kTeams * Config::kWarpSumsBytes;
    auto& sums = flat(s);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      ptx::store_shared(own + (n * 32 + lane_) * 16, sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2],
                        sums[n * 4 + 3]);
    }
    ptx::named_sync(1 + warp_ % Config::kTeams, 32 * kDimSplit);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      float more[4];
      ptx::load_shared(more, other + (n * 32 + lane_) * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n * 4 + e] += more[e];
    }
  }

  __device__ __forceinline__ void multiply_p_v(const ScoreFragment& p, typename Config::VTile v) {
    const auto weights = [&](int mma_m, int step, int x) { return acc_as_a<T>(p[mma_m], step, x); };
    const uint32_t b = b_mn_major(v, key_group() * kWarpKv, lane_);
    if constexpr (kDimSplit == 1) {
      gemm_rs<Operand, kWarpKv / 16>(o_, b, weights);
    } else {
      gemm_rs<Operand, kWarpKv / 16, Config::kDimV>(
          o_, Config::VTile::advance(b, dim_group() * (kWarpDimV / Config::VTile::kChunkElements)),
          weights);
    }
  }

  __device__ __forceinline__ void load_q(typename Config::QTile q) const {
    const Inputs& in = params_.args.inputs;
    const int32_t dim = params_.problem.dim_qk;
    if (has_uniform_stride()) {
      const RowView rows{query_row<sizeof(T)>(in.q, 0), row_bytes<sizeof(T)>(in.q)};
      load_tokens<Config::kQThreads>(q, dim, rows, 0, rows_);
    } else {
      cuda::load_tile<Config::kQThreads>(q, dim, [&](int r) -> const char* {
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
    if constexpr (kIsE4m3) {
      PageRunCopy<kThreads, typename Config::KTile>::prefetch_page_index(
          pages_address(tile), rows, cache_.pages_, tile * kTileKv, seqlen_.len.kv);
    } else {
      PagedCopy<kThreads, typename Config::KTile>::prefetch_page_index(
          pages_address(tile), rows, tile * kTileKv, seqlen_.len.kv);
    }
  }

  // Starts cp.async of a tile of K or V.
  __device__ __forceinline__ void load_tile(typename Config::KTile to, const flashattn_tensor& from,
                                            const char* base, int dim, int32_t tile) const {
    if constexpr (kIsE4m3) {
      if (params_.problem.layout & FLASHATTN_LAYOUT_PAGED_KV) {
        const PagedRowView rows = paged_rows<sizeof(Operand)>(params_, from, base);
        PageRunCopy<kThreads, typename Config::KTile>::load(
            to, pages_address(tile), dim, rows, cache_.pages_, tile * kTileKv, seqlen_.len.kv);
        return;
      }
    }
    load_kv<kThreads>(params_, to, pages_address(tile), from, base, dim, tile * kTileKv);
  }

  // The warp has the keys of key_group() in each tile, and rows from first_row() on.
  __device__ __forceinline__ int key_group() const { return warp_ % Config::kKeyGroups; }
  __device__ __forceinline__ int first_row() const {
    const int row_group = warp_ / Config::kKeyGroups % Config::kRowGroups;
    return Config::kRowGroups == 1 ? 0 : row_group * Config::kGroupRows;
  }
  // The warp has this range of the columns of K and V.
  __device__ __forceinline__ int dim_group() const {
    return kDimSplit == 1 ? 0 : warp_ / Config::kTeams;
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
    const float wide = ScoreMod::kIsPlain ? params_.problem.scale * (kLog2E / kWideUnit)
                                          : WideMembers<false>::remaining_factor(params_.problem);
    update(s, wide, cache_.weight_shift());
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
      if constexpr (kIsE4m3) sum *= cache_.sum_factor();
      const int32_t r = row_of(mma_m, half);
      if (r >= rows_ || (kDimSplit > 1 && dim_group() != step)) continue;
      if (lane_ % 4 == 0) {
        ptx::store_shared_pair(row_stats_address(key_group(), r), {m_[mma_m][half], sum});
      }
      const auto& o = o_[mma_m];
      if constexpr (kIsE4m3) {  // even and odd columns, see mma_e4m3.cuh
        const uint32_t to = o_address(key_group(), r) + lane_ % 4 * 16;
        const float by = sum == 0.0f ? 0.0f : factor;  // no key has that descale
#pragma unroll
        for (int n = 0; n < Config::kOutputColumns / 8; n += 2) {
          const int at = (kDimSplit > 1 ? 0 : step * Config::kOutputColumns / 8) + n;
          const float *even = &o[at][half * 2], *odd = &o[at + 1][half * 2];
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
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  DecodeKernel<Config> kernel(params, ptx::shared_address(shared));
  if (kernel.init()) kernel.run();
}

}  // namespace flashattn::cuda::sm80
