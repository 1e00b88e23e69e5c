// The portable decode kernel: up to 64 rows, which are queries of one KV head's GQA group; Q in 16
// bits; K and V in 16 bits or E4M3; all masks but BLOCKS. It takes as long as loading the KV cache
// does, plus the time from the last load to the last store.
//
// Four or eight warps share a KV tile's keys. Each has all rows (or those of its row_warp), and
// row maxima, sums and O of its own keys, which are combined at the end. kStages tiles of K and of
// V are in flight; a buffer is refilled once all warps have read it.
//
// E4M3: kDimSplit warps may share rows and keys. Each converts its range of K's and of V's columns:
// it sums Q K^T over that range, and has those columns of O. They exchange the sums.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/kernels/sm80/decode_epilogue.cuh"
#include "cuda/device/mma_gemm.cuh"
#include "cuda/device/page_runs.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

template <class Config>
class DecodeKernel : FwdWorkTile, DecodeSoftmax<Config> {
  using Softmax = DecodeSoftmax<Config>;
  using Softmax::o_, Softmax::clear, Softmax::update;
  using typename Softmax::ScoreFragment;
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using ScoreMod = typename Config::ScoreMod;
  using Cache = DecodeCache<Config>;
  static constexpr bool kIsE4m3 = Config::kIsE4m3;
  static constexpr int kTileKv = Config::kTileKv, kWarpKv = Config::kWarpKv;
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  static constexpr int kMmaM = Config::kMmaM;
  // cp.async groups that may be in flight behind that of the K or V that is waited for. E4M3: a
  // buffer is refilled behind the next barrier that is there anyway, half a tile later.
  static constexpr int kPending = 2 * kStages - (kIsE4m3 ? 2 : 1);
  static constexpr int kDimSplit = Config::kDimSplit, kWarpDimV = Config::kWarpDimV;

 public:
  __device__ __forceinline__ DecodeKernel(const ForwardParams& params, uint32_t shared)
      : params_(params),
        shared_(shared),
        cache_(params, shared + Config::kCacheOffset),
        merge_(params, shared + Config::kMergeOffset) {}

  __device__ __forceinline__ bool init() {
    return FwdWorkTile::template init<sizeof(Operand)>(params_);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Config::kMerges) merge_.expect(rows_);
    if (threadIdx.x == 0) store_to_smem(shared_ + Config::kWorkTileOffset);
    mainloop();
    const DecodeEpilogue<Config> epilogue(params_, shared_, cache_, merge_);
    epilogue.store(*this);
  }

 private:
  __device__ __forceinline__ void mainloop() {
    const int32_t first = keys_.begin / kTileKv;
    const int32_t end = keys_.begin < keys_.end ? (keys_.end + kTileKv - 1) / kTileKv : first;
    for (int n = 0; n < kStages; ++n) prefetch_pages(first + n);
    ptx::cp_async_commit();
    const typename Config::QTile q{shared_};
    if constexpr (kIsE4m3) load_q(q);
    clear();
    ptx::cp_async_wait<0>();  // page numbers have arrived
    // The first kStages iterations only load.
    for (int32_t tile = first - kStages; tile < end; ++tile) {
      const int32_t stage = tile & (kStages - 1);
      const auto k = k_tile(tile);
      const auto v = v_tile(tile);
      ScoreFragment s = {};
      if (tile >= first) {
        ptx::cp_async_wait<kPending>();
        __syncthreads();  // K has arrived; all warps have read the previous V
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
      if constexpr (!kIsE4m3) refill_k(tile, first, end, q);
      if (tile >= first) {
        if (has_rows()) {
          modify_scores<ScoreMod, false>(params_, s, tile * kTileKv + first_key(), rows_of_lane());
          mask(s, tile * kTileKv + warp_.key_warp() * kWarpKv);
          softmax(s);
        }
        ptx::cp_async_wait<kPending>();
        __syncthreads();  // V has arrived; all warps have read K
      }
      if constexpr (kIsE4m3) refill_k(tile, first, end, q);
      if (tile >= first) {
        if (has_rows()) {
          if constexpr (kIsE4m3) {
            cache_.scale_weights(s, o_, stage, first_key(), warp_.key_warp() * kWarpKv, warp_.lane);
          }
          multiply_p_v(s, v);
        }
        if constexpr (!kIsE4m3) __syncthreads();  // all warps have read V
      }
      if constexpr (!kIsE4m3) refill_v(tile, first, end);
    }
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

  // Starts loading the tile that takes the buffer of `tile`. Every call commits one cp.async group.
  // In 16 bits the group of the first K also loads Q, after K, which Q's instructions would delay
  // (0 to 4 %). E4M3 waits for Q to convert it, and would lose 4 % if it loaded K first.
  __device__ __forceinline__ void refill_k(int32_t tile, int32_t first, int32_t end,
                                           typename Config::QTile q) const {
    const int32_t next = tile + kStages;
    if (next < end) {
      load_tile(k_tile(tile), params_.args.inputs.k, k_, params_.problem.dim_qk, next);
      if constexpr (kIsE4m3) {
        cache_.prefetch(Cache::kK, tile & (kStages - 1), *this, next * kTileKv);
      }
      prefetch_pages(next + kStages);
    }
    if (!kIsE4m3 && next == first) load_q(q);
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
    const uint32_t a = a_k_major(q, warp_.first_row(), warp_.lane);
    const uint32_t b = b_k_major(k, warp_.key_warp() * kWarpKv, warp_.lane);
    if constexpr (kDimSplit == 1) {
      gemm_nt<Operand, Config::kDimQk>(s, a, b);
    } else {
      constexpr int kDim = Config::kDimQk / kDimSplit;
      gemm_nt<Operand, kDim, Config::kDimQk>(
          s, Config::QTile::advance(a, warp_.dim_warp() * (kDim / Config::QTile::kChunkElements)),
          Config::KTile::advance(b, warp_.dim_warp() * (kDim / Config::KTile::kChunkElements)));
      add_sums(s);
    }
  }

  // Adds the sums of the warp that has the other columns. Both warps get the same bits.
  __device__ __forceinline__ void add_sums(ScoreFragment& s) const {
    constexpr int kQuads = Config::kWarpSumsBytes / 512;
    const uint32_t own = shared_ + Config::kSumsOffset + warp_.idx * Config::kWarpSumsBytes;
    const uint32_t other =
        own + (warp_.dim_warp() == 0 ? 1 : -1) * Config::kTeams * Config::kWarpSumsBytes;
    auto& sums = flat(s);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      ptx::store_shared(own + (n * 32 + warp_.lane) * 16, sums[n * 4], sums[n * 4 + 1],
                        sums[n * 4 + 2], sums[n * 4 + 3]);
    }
    ptx::named_sync(1 + warp_.idx % Config::kTeams, 32 * kDimSplit);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      float more[4];
      ptx::load_shared(more, other + (n * 32 + warp_.lane) * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n * 4 + e] += more[e];
    }
  }

  __device__ __forceinline__ void multiply_p_v(const ScoreFragment& p, typename Config::VTile v) {
    const auto weights = [&](int mma_m, int step, int x) { return acc_as_a<T>(p[mma_m], step, x); };
    const uint32_t b = b_mn_major(v, warp_.key_warp() * kWarpKv, warp_.lane);
    if constexpr (kDimSplit == 1) {
      gemm_rs<Operand, kWarpKv / 16>(o_, b, weights);
    } else {
      gemm_rs<Operand, kWarpKv / 16, Config::kDimV>(
          o_,
          Config::VTile::advance(b, warp_.dim_warp() * (kWarpDimV / Config::VTile::kChunkElements)),
          weights);
    }
  }

  __device__ __forceinline__ void load_q(typename Config::QTile q) const {
    if (Config::kQThreads < kThreads && threadIdx.x >= Config::kQThreads) return;
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

  __device__ __forceinline__ auto rows_of_lane() const {
    return [this](int mma_m, int second) { return warp_.row_of(mma_m, second); };
  }
  // Whether the warp has rows. Others only help to load.
  __device__ __forceinline__ bool has_rows() const {
    return !kIsE4m3 || Config::kRowWarps == 1 || warp_.first_row() < rows_;
  }
  // The lane's first key in a tile.
  __device__ __forceinline__ int first_key() const {
    return warp_.key_warp() * kWarpKv + warp_.lane % 4 * 2;
  }

  // Sets scores of hidden keys to -inf. begin: the warp's first key.
  __device__ __forceinline__ void mask(ScoreFragment& s, int32_t begin) const {
    const Interval columns{begin, begin + kWarpKv};
    const auto row = rows_of_lane();
    hide_by_bits(params_, s, columns, warp_.lane, row);
    if (columns.begin >= full_keys_.begin && columns.end <= full_keys_.end) return;
    const Interval keys = intersect(columns, keys_);
    const int32_t first = begin + warp_.lane % 4 * 2;
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

  const ForwardParams& params_;
  const uint32_t shared_;
  const DecodeWarp<Config> warp_;
  Cache cache_;
  const typename Config::Merge merge_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtasPerSm)
    decode_kernel(const __grid_constant__ ForwardParams params) {
  // Where there are no clusters, nothing launches a kernel that merges in one.
  if constexpr (!Config::kMerges || kHasClusters) {
    char* const shared = ptx::dynamic_shared();
    DecodeKernel<Config> kernel(params, ptx::shared_address(shared));
    // The kernel may have started early. All that init() may read from memory are lengths.
    if (reads_lengths(params.problem, params.args.inputs)) ptx::griddep_wait();
    const bool has_work = kernel.init();
    ptx::griddep_wait();
    ptx::griddep_launch_dependents();
    if (has_work) kernel.run();
  }
}

}  // namespace flashattn::cuda::sm80
