// Epilogue of a consumer warpgroup of the Hopper forward pass: it adds the sink, scales its rows of
// O and stores them, by TMA or row by row, stores LSE, and finds tiles that must be redone.
#pragma once

#include <cfloat>

#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/fwd_softmax.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda::sm90 {

// Stores rows of O.
template <class Config>
class FwdOStore {
 public:
  using OAccum = float[Config::kDimV / 2];  // this lane's accumulators of O

  __device__ __forceinline__ explicit FwdOStore(const FwdConsumer<Config>& consumer)
      : consumer_(consumer), params_(consumer.params_) {}

  // kShort: see FwdEpilogue::finish_tile(). nonfinite: whether the stored O of a row is not finite.
  // redo: the tile is redone.
  template <bool kShort>
  __device__ __forceinline__ void store(const OAccum& o, bool redo, bool (&nonfinite)[2]) const {
    bool fp32 = !kShort && params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    if (!kShort) fp32 |= consumer_.is_partial();
    if (fp32) {
      store_fp32(o, nonfinite);
    } else {
      uint32_t seen[2][2] = {};  // two chains per row hide latency
#pragma unroll
      for (int subtile = 0; subtile < Config::kOSubtiles; ++subtile) {
        store_to_smem(o, subtile, redo, seen);
        if (kShort || params_.o_by_tma) {
          store_tma(subtile);
        } else {
          store_rows(subtile);
        }
      }
      constexpr uint32_t kNoSign = 0x7fff7fff;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) nonfinite[mi] = (seen[mi][0] | seen[mi][1]) & kNoSign;
    }
    // O has used the buffer of Q, which is released once O has been read.
    if (!Config::kSeparateO) {
      if (!kShort && !params_.o_by_tma) {
        ptx::fence_async_proxy();
        consumer_.warpgroup_sync();
      }
      if (consumer_.leader_) {
        ptx::bulk_wait_read();
        consumer_.release_q();
      }
    }
  }

  // The address of row i of O; FwdConsumer says what row i is.
  __device__ __forceinline__ char* o_row_ptr(int32_t i, int32_t size) const {
    return tensor_row(params_.args.o, size, work_tile().b, consumer_.head_of(i),
                      work_tile().offset_q + consumer_.query_of(i));
  }

 private:
  using T = typename Config::T;
  static constexpr int kTileQ = Config::kTileQ;
  // O is stored in kOSubtiles subtiles of these sizes.
  static constexpr int kPanels = Config::kPanelsV / Config::kOSubtiles;
  static constexpr int kSubtileColumns = Config::kDimV / Config::kOSubtiles;

  __device__ __forceinline__ const volatile WorkTile<Config::kConsumers>& work_tile() const {
    return consumer_.work_tile();
  }
  __device__ __forceinline__ int32_t lane() const { return consumer_.lane(); }
  __device__ __forceinline__ int32_t row() const { return consumer_.row(); }

  __device__ __forceinline__ void store_fp32(const OAccum& o, bool (&nonfinite)[2]) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      float seen = 0.0f;  // 0, or NaN if O is not finite
      const int32_t i = work_tile().query + row() + mi * 8;
      int32_t columns = i < work_tile().query_end ? params_.problem.dim_v : 0;
      float* out = reinterpret_cast<float*>(o_row_ptr(i, 4)) + lane() % 4 * 2;
      if constexpr (FwdConsumer<Config>::kMayBePartial) {
        if (!consumer_.has_head(i)) columns = 0;
        if (consumer_.is_partial()) {
          const int64_t to = columns > 0 ? consumer_.partial_row(i) : 0;
          out = params_.partial_o + to * params_.problem.dim_v + lane() % 4 * 2;
        }
      }
#pragma unroll
      for (int x = 0; x < Config::kDimV / 8; ++x) {
        const float low = o[4 * x + mi * 2], high = o[4 * x + mi * 2 + 1];
        seen = fmaf(high, 0.0f, fmaf(low, 0.0f, seen));
        ptx::store_if(x * 8 < columns, out + x * 8, low, high);
      }
      nonfinite[mi] = seen != 0.0f;
    }
  }

  // Shared-memory address of a 16-byte chunk of O: swizzled panels of 64 columns, like Q.
  __device__ __forceinline__ uint32_t staging_address(int32_t row, int32_t chunk) const {
    return consumer_.shared_ + Config::kOOffset + chunk / 8 * kTileQ * 128 +
           (consumer_.warpgroup_ * 64 + row) * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void store_to_smem(const OAccum& o, int subtile, bool redo,
                                                uint32_t (&seen)[2][2]) const {
    // TMA may still read the buffer for the subtile before. A redo also waits until the tile's
    // first result is written, which its own must overwrite.
    if (consumer_.leader_) {
      if (redo) {
        ptx::bulk_wait();
        ptx::fence_async_proxy_global();
      } else {
        ptx::bulk_wait_read();
      }
    }
    consumer_.warpgroup_sync();
    const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < kSubtileColumns / 16; ++j) {
      const float* x = &o[subtile * (kSubtileColumns / 2) + 8 * j];
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
        seen[i % 2][i / 2] = ptx::add_nonfinite<T>(seen[i % 2][i / 2], words[i]);
      }
      ptx::stmatrix_x4(staging_address(r, 2 * j + lane() / 16), words[0], words[1], words[2],
                       words[3]);
    }
  }

  __device__ __forceinline__ void store_tma(int subtile) const {
    ptx::fence_async_proxy();
    consumer_.warpgroup_sync();
    if (!consumer_.leader_ ||
        work_tile().query + consumer_.warpgroup_ * 64 >= work_tile().query_end)
      return;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::tma_store(&params_.o, staging_address(0, p * 8),
                     {(subtile * kPanels + p) * 64, work_tile().query + consumer_.warpgroup_ * 64,
                      work_tile().h, work_tile().b});
    }
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void store_rows(int subtile) const {
    constexpr int kChunks = 8 * kPanels;
    __syncwarp();
    for (int32_t x = lane(); x < 16 * kChunks; x += 32) {
      const int32_t r = no_hoist(threadIdx.x) % 128 / 32 * 16 + x / kChunks, chunk = x % kChunks;
      const int32_t i = work_tile().query + consumer_.warpgroup_ * 64 + r;
      const int32_t column = (subtile * kChunks + chunk) * 8;
      if (i >= work_tile().query_end || column >= params_.problem.dim_v) continue;
      if constexpr (Config::kPacksHeads) {
        if (!consumer_.has_head(i)) continue;
      }
      *reinterpret_cast<int4*>(o_row_ptr(i, 2) + column * 2) =
          ptx::load_shared_16(staging_address(r, chunk));
    }
  }

  const FwdConsumer<Config>& consumer_;
  const ForwardParams& params_;
};

// OStore: stores O.
template <class Config, class OStore = FwdOStore<Config>>
class FwdEpilogue {
  using Softmax = FwdSoftmax<Config>;
  using OAccum = typename OStore::OAccum;
  using T = typename Config::T;

 public:
  // finish_tile() also finishes the sums and bases of the softmax.
  __device__ __forceinline__ explicit FwdEpilogue(Softmax& softmax)
      : softmax_(softmax),
        softmax_base_(softmax.softmax_base_),
        row_sum_(softmax.row_sum_),
        params_(softmax.params_) {}

  // Stores O times `unit` and LSE, and queues the tile for a redo if its base overflowed.
  __device__ __forceinline__ void finish_tile(OAccum& o, float unit, bool redo) {
    if (params_.o_by_tma && !(params_.problem.features & FLASHATTN_FEATURE_SINK) &&
        !softmax_.is_partial()) {
      finish_tile<true>(o, unit, redo);
    } else {
      finish_tile<false>(o, unit, redo);
    }
  }

 private:
  // A larger base causes a redo. A dense bias may leave a row one key, whose weight must be 1: in
  // these units the product of base and log2(e) is rounded.
  static constexpr float kLargestBase = Config::kHasDenseBias ? kLargeScore : kRedoScore;

  // Bounds of a row sum. A base that is predicted, or set by the paired row, may make it too small.
  static constexpr float kMaxRowSum = 0x1p120f;  // far enough below FLT_MAX that P and O are finite
  static constexpr float kMinRowSum = !Config::kHasAlibi               ? FLT_MIN
                                      : Config::kIsFp8                 ? 0x1p-5f
                                      : std::is_same<T, __half>::value ? 0x1p-2f
                                                                       : 0x1p-60f;

  // Nothing hides these latencies: the check comes last, as its branch would delay the store.
  // kShort: there is no sink, and TMA stores O. That code is contiguous: after each jump
  // instructions must be fetched (D = 64, 1k keys, causal: 2 % faster).
  template <bool kShort>
  __device__ __forceinline__ void finish_tile(OAccum& o, float unit, bool redo) {
    if constexpr (!Softmax::kHasHeadroom) softmax_.total_rows(redo);
    const float l[2] = {row_sum_[0], row_sum_[1]},
                base[2] = {softmax_base_[0], softmax_base_[1]};  // without the sink
    float factor[2];
    const bool sink_overflows = o_factors<kShort>(redo, factor);
    softmax_.scale_rows(o, {factor[0] * unit, factor[1] * unit});
    bool nonfinite[2];
    OStore(softmax_).template store<kShort>(o, redo, nonfinite);
    if (!kShort && softmax_.is_partial()) {
      store_partial_sum(redo);
    } else {
      store_lse(redo);
    }
    check_rows<kShort>(l, base, nonfinite, sink_overflows, redo);
  }

  // Adds the sink, of any size, to bases and row sums. o_scale: factor for the sum of the keys.
  // Returns whether the sink is finite but overflows these units.
  __device__ __forceinline__ bool add_sink(bool redo, float (&o_scale)[2]) {
    const float unit = softmax_.log2_unit(redo);
    const auto add = [&](int mi, float sink) {
      const float keys = row_sum_[mi] == 0.0f ? -INFINITY : softmax_base_[mi];
      const float top = fmaxf(keys, sink);
      o_scale[mi] = keys == top ? 1.0f : ptx::exp2((keys - top) * unit);
      row_sum_[mi] *= o_scale[mi];
      if (top != -INFINITY) row_sum_[mi] += ptx::exp2((sink - top) * unit);
      softmax_base_[mi] = top;
    };
    if (!softmax_.is_first_partial()) return false;
    if constexpr (Config::kPacksHeads) {
      bool overflows = false;
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) {
        const int32_t i = row() + mi * 8;
        const float natural =
            softmax_.has_head(i) ? params_.args.inputs.sink[softmax_.head_of(i)] : 0.0f;
        const float sink = natural * (kLog2E / unit);
        add(mi, sink);
        overflows |= sink == INFINITY && natural < INFINITY;
      }
      return overflows;
    } else {
      const float natural = params_.args.inputs.sink[work_tile().h],
                  sink = natural * (kLog2E / unit);
#pragma unroll
      for (int mi = 0; mi < 2; ++mi) add(mi, sink);
      return sink == INFINITY && natural < INFINITY;
    }
  }

  // Computes the factor of O per row, and adds the sink to the row sums. Returns whether the sink
  // is finite but overflows these units.
  template <bool kShort>
  __device__ __forceinline__ bool o_factors(bool redo, float (&factor)[2]) {
    bool sink_overflows = false;
    float o_scale[2] = {1.0f, 1.0f};
    if (!kShort && params_.problem.features & FLASHATTN_FEATURE_SINK)
      sink_overflows = add_sink(redo, o_scale);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float sum = Softmax::kRoundsSingleKeys
                            ? fmaf(softmax_.excess_[mi], o_scale[mi], row_sum_[mi])
                            : row_sum_[mi];
      factor[mi] = sum == 0.0f
                       ? 0.0f
                       : ptx::reciprocal(sum) * o_scale[mi] * softmax_.score_mod().dropout_scale();
    }
    return sink_overflows;
  }

  // Queues the tile for a redo if a sum l (without the sink) or a base is out of range, if O is not
  // finite, or if a row of a single key may differ from V of that key.
  template <bool kShort>
  __device__ __forceinline__ void check_rows(const float (&l)[2], const float (&base)[2],
                                             const bool (&nonfinite)[2], bool sink_overflows,
                                             bool redo) {
    const bool fp32 = !kShort && params_.problem.dtype_o == FLASHATTN_DTYPE_F32;
    // A NaN in a sum or base is in O, too.
    const bool usual = !Config::kHasAlibi && fminf(l[0], l[1]) >= kMinRowSum &&
                       fmaxf(l[0], l[1]) <= kMaxRowSum && !nonfinite[0] && !nonfinite[1] &&
                       fmaxf(fabsf(base[0]), fabsf(base[1])) <= kLargeScore / Softmax::kScoreUnit;
    if (__all_sync(~0u, usual) && !sink_overflows && !fp32) return;
    bool base_overflowed = sink_overflows;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      int32_t keys = softmax_.visible_keys_of(mi);
      // Bits of a tree may leave one key.
      if (Config::kPacksHeads && params_.problem.mask & FLASHATTN_MASK_TREE) keys = min(keys, 1);
      bool bad = !(l[mi] <= kMaxRowSum) || nonfinite[mi];
      // In a redo P of a single key is exactly 1. Else the residue of a large score is in P.
      const float largest = keys == 1 ? fminf(kLargeScore, kLargestBase) : kLargestBase;
      bad |= base[mi] != -INFINITY && !(fabsf(base[mi]) <= largest / Softmax::kScoreUnit);
      if (!Softmax::ScoreMod::kHoldsAllScores) {
        // The sum is too small for visible keys; it is 0 where finite scores are -inf in log2
        // units.
        bad |= !(l[mi] >= kMinRowSum) && keys > 0 && softmax_.score_mod().block_mask_shows_key(mi);
        bad |= fp32 && keys == 1;  // O is V of that key to the last digit
      }
      if constexpr (Config::kPacksHeads) bad &= softmax_.has_head(row() + mi * 8);
      base_overflowed |= bad && work_tile().query + row() + mi * 8 < work_tile().query_end;
    }
    if (__any_sync(~0u, base_overflowed) && !redo && lane() == 0) {
      softmax_.storage_.redo_queue[work_tile().redo_slot] = work_tile().work_idx + 1;
      softmax_.storage_.base_overflowed = 1;
    }
  }

  // The first two lanes of a quad store one row each.
  __device__ __forceinline__ void store_lse(bool redo) const {
    const int32_t mi = lane() % 4;
    const int32_t i = row() + mi * 8;
    if (Config::kPacksHeads) return store_packed_lse(redo);
    if (mi > 1 || params_.args.lse == nullptr) return;
    if (work_tile().query + i >= work_tile().query_end) return;
    const float l = mi == 0 ? row_sum_[0] : row_sum_[1];
    params_.args.lse[work_tile().lse_row + i] =
        lse_of(mi == 0 ? softmax_base_[0] : softmax_base_[1], softmax_.log2_unit(redo), l);
  }

  __device__ __forceinline__ void store_partial_sum(bool redo) const {
    if constexpr (Softmax::kMayBePartial) {
      const int32_t mi = lane() % 4, i = work_tile().query + row() + mi * 8;
      if (mi > 1 || i >= work_tile().query_end || !softmax_.has_head(i)) return;
      params_.partial_sums[softmax_.partial_row(i)] = softmax_.partial_sum(mi, redo);
    }
  }

  __device__ __forceinline__ void store_packed_lse(bool redo) const {
    if constexpr (Config::kPacksHeads) {
      const int32_t mi = lane() % 4, i = work_tile().query + row() + mi * 8;
      if (mi > 1 || i >= work_tile().query_end || !softmax_.has_head(i)) return;
      const float base = mi == 0 ? softmax_base_[0] : softmax_base_[1],
                  unit = softmax_.log2_unit(redo);
      const float l = mi == 0 ? row_sum_[0] : row_sum_[1];
      if (params_.args.lse) {
        const RowLayout layout = row_layout(params_.problem, params_.args.shape);
        params_.args
            .lse[work_tile().b * layout.batch_stride + softmax_.head_of(i) * layout.head_stride +
                 work_tile().offset_q + softmax_.query_of(i)] = lse_of(base, unit, l);
      }
    }
  }

  __device__ __forceinline__ const volatile WorkTile<Config::kConsumers>& work_tile() const {
    return softmax_.work_tile();
  }
  __device__ __forceinline__ int32_t lane() const { return softmax_.lane(); }
  __device__ __forceinline__ int32_t row() const { return softmax_.row(); }

  Softmax& softmax_;
  float (&softmax_base_)[2];
  float (&row_sum_)[2];
  const ForwardParams& params_;
};

}  // namespace flashattn::cuda::sm90
