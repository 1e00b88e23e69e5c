// Mainloop of a consumer warpgroup of the Hopper forward pass in E4M3: 64 rows of Q. See
// fwd_fp8.cuh.
#pragma once

#include "cuda/kernels/sm90/fwd_fp8_descales.cuh"
#include "cuda/kernels/sm90/fwd_fp8_epilogue.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdFp8Mainloop : FwdSoftmax<Config> {
  using Base = FwdSoftmax<Config>;
  using Element = ptx::E4m3;
  using Base::kTileKv, Base::kTileQ, Base::kScoreUnit;
  using Base::params_, Base::q_state_, Base::storage_, Base::warpgroup_;
  using Base::score_mod, Base::softmax_base_, Base::row_sum_, Base::s_;
  using Base::work_tile, Base::warpgroup_tile, Base::lane, Base::row, Base::release_q;
  static constexpr int kStages = Config::kStages, kDimV = Config::kDimV;
  static constexpr bool kIsRuntime = Config::kIsRuntime;
  using KvState = PipelineState<kStages>;
  // log2 of the largest P in a row's first KV tile: it leaves room for larger scores later.
  static constexpr int kFirstPeak = 4;
  // log2 of a lone P, a row's largest and more than 1 / kLoneShare of its tile's sum: later scores
  // seldom exceed it, and if it were smaller the others would be too small for E4M3.
  static constexpr int kLonePeak = 7, kLoneShare = 3;

 public:
  __device__ __forceinline__ FwdFp8Mainloop(const ForwardParams& params, uint32_t shared,
                                            SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, kIsRuntime ? own_warpgroup() : warpgroup) {}

  __device__ __forceinline__ void run() {
    this->for_each_work_tile([this] { process_tile(); });
  }

 private:
  // The warpgroup's index, recomputed: kept in a register from the kernel's start on, it is one too
  // many with amax_o.
  static __device__ __forceinline__ int32_t own_warpgroup() {
    return __shfl_sync(~0u, static_cast<int32_t>(no_hoist(threadIdx.x) / 128), 0) - 1;
  }

  __device__ __forceinline__ void process_tile() {
    int32_t n = work_tile().kv_end - 1;
    load_exponent_scale();
    storage_.q.consumer_wait(q_state_, warpgroup_);
    if (warpgroup_tile().kv_begin >= warpgroup_tile().kv_end) {  // no row here sees a key
      reset();
      this->warpgroup_sync();
      release_q();
      if (n >= work_tile().kv_begin) {
        this->skip_tile(kv_state_, false);
        --n;
      }
    } else {
      this->skip_tiles(kv_state_, n, warpgroup_tile().kv_end);
      first_step(n);
      n = next_tile(n);
      while (n >= warpgroup_tile().kv_begin) {
        bool overflow = false;
        if (is_full(n)) {
          const int32_t begin = max(warpgroup_tile().full_begin, warpgroup_tile().kv_begin);
#pragma unroll 1
          for (; n >= begin; --n) {
            if ((overflow = step<false>(n))) break;
          }
        } else {
          overflow = step<true>(n);
          if (!overflow) n = next_tile(n);
        }
        if (overflow) {  // outside the inner loop, which must stay small
          lower_p<false>();
          pack_p(n);
          n = next_tile(n);
        }
      }
      storage_.v.consumer_wait(kv_state_);
      last_gemm_pv();
      kv_state_.advance();
    }
    this->skip_tiles(kv_state_, n, work_tile().kv_begin);
    FwdEpilogue<Config, FwdFp8OStore<Config>>(*this).finish_tile(o_, descales().largest_of_v(),
                                                                 work_tile().redo_online);
    q_state_.advance();
  }

  __device__ __forceinline__ int32_t next_tile(int32_t n) {
    if (!kMayHideTiles<Config> || n <= warpgroup_tile().kv_begin) return n - 1;
    return this->wait_k(KvState{kv_state_.count + 1}, n - 1);
  }

  // Whether every row sees every key of tile n and has seen one before, and keeps its base.
  __device__ __forceinline__ bool is_full(int32_t n) const {
    if (kIsRuntime || work_tile().redo_online) return false;
    return n >= warpgroup_tile().full_begin && n < warpgroup_tile().full_end &&
           n < warpgroup_tile().fixed_base_end;
  }

  __device__ __forceinline__ void first_step(int32_t n) {
    this->wait_k(kv_state_, n);
    gemm_qk(kv_state_);
    reset();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s_);
    this->consumer_release(storage_.k, kv_state_);
    if (n == warpgroup_tile().kv_begin) release_q();
    if (softmax<true>(n)) {
      lower_p<true>();
    } else if (!kIsRuntime && n >= warpgroup_tile().full_begin && n < warpgroup_tile().full_end) {
      raise_lone_p();
    }
    pack_p(n);
  }

  // P V of the tile before, Q K^T of tile n, its softmax. Returns whether a P of this warp may
  // exceed E4M3: then s_ holds P, and row_sum_ lacks its sums.
  template <bool kMasked>
  __device__ __forceinline__ bool step(int32_t n) {
    const KvState v_state = kv_state_;
    kv_state_.advance();
    storage_.v.consumer_wait(v_state);
    this->warp_scheduler_sync();
    if constexpr (Config::kSerial) {
      add_pv(v_state);
    } else {
      gemm_pv(pv_, v_state, 0, unpromoted_);
    }
    storage_.k.consumer_wait(kv_state_);
    gemm_qk(kv_state_);
    this->warp_scheduler_arrive();
    if constexpr (!Config::kSerial) {
      ptx::wgmma_wait<1>();
      ptx::reg_fence(pv_);
      this->consumer_release(storage_.v, v_state);
      if (++unpromoted_ == Config::kPromoteEvery) promote();
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s_);
    this->consumer_release(storage_.k, kv_state_);
    if (n == warpgroup_tile().kv_begin) release_q();
    const bool overflow = softmax<kMasked>(n);
    if (!overflow) pack_p(n);
    return overflow;
  }

  // Turns scores into P, in s_, and sums P over this lane's columns. Returns whether a P of this
  // warp may exceed the largest number of E4M3.
  template <bool kMasked>
  __device__ __forceinline__ bool softmax(int32_t n) {
    if constexpr (kIsRuntime) {
      descales().apply(s_, n);
      score_mod().modify(s_, n * kTileKv, false);
    }
    if constexpr (kMasked) {
      this->apply_masks(n);
      set_base();
    }
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      const int mi = i / 2 % 2;
      const float base = kMasked ? this->base(mi) : softmax_base_[mi] * kScoreUnit;
      s_[i] = ptx::exp2(fmaf(s_[i], exponent_scale_, -base));
      float& t = tile_sum_[mi];
      t = i < 4 && i % 2 == 0 ? s_[i] : t + s_[i];
    }
    return __any_sync(~0u, !(fmaxf(tile_sum_[0], tile_sum_[1]) <= ptx::kMaxE4m3));
  }

  // Sets the base of rows that had seen no key, and in a redone tile raises those of others.
  __device__ __forceinline__ void set_base() {
    const bool redo = work_tile().redo_online;
    float top[2];
    row_max(top);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float raised = fmaf(top[mi], exponent_scale_, -kFirstPeak) * (1.0f / kScoreUnit);
      const float before = softmax_base_[mi];
      if (before == -INFINITY) {
        softmax_base_[mi] = raised;
      } else if (redo && raised > before) {
        softmax_base_[mi] = raised;
        scale_row(mi, ptx::exp2((before - raised) * kScoreUnit));
      }
    }
  }

  // The largest element of s_ in each row.
  __device__ __forceinline__ void row_max(float (&top)[2]) const {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      top[mi] = s_[2 * mi];
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        if (i / 2 % 2 == mi) top[mi] = fmaxf(top[mi], s_[i]);
      }
      top[mi] = fmaxf(top[mi], __shfl_xor_sync(~0u, top[mi], 1));
      top[mi] = fmaxf(top[mi], __shfl_xor_sync(~0u, top[mi], 2));
    }
  }

  // Multiplies a row's sum, its O and its P V that is not yet promoted by a factor.
  __device__ __forceinline__ void scale_row(int mi, float factor) {
    row_sum_[mi] *= factor;
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) {
      if (i / 2 % 2 != mi) continue;
      o_[i] *= factor;
      if constexpr (!Config::kSerial) pv_[i] *= factor;
    }
  }

  // The sum of a row's P of this tile.
  __device__ __forceinline__ float sum_of_quad(int mi) const {
    const float sum = tile_sum_[mi] + __shfl_xor_sync(~0u, tile_sum_[mi], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

  // Multiplies a row's P, not yet packed, and lowers its base. Returns the factor.
  __device__ __forceinline__ float scale_p(int mi, float log2_factor) {
    const float factor = ptx::exp2(log2_factor);
    softmax_base_[mi] -= log2_factor * (1.0f / kScoreUnit);
    tile_sum_[mi] *= factor;
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      if (i / 2 % 2 == mi) s_[i] *= factor;
    }
    return factor;
  }

  // Raises a lone P in a row's first tile.
  __device__ __forceinline__ void raise_lone_p() {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      scale_p(mi, sum_of_quad(mi) < (kLoneShare << kFirstPeak) ? kLonePeak - kFirstPeak : 0);
    }
  }

  // Lowers P of rows with a sum above E4M3's largest number; a row's largest is then 2^peak, less
  // where many keys are nearly as large, so that their sum leaves room, too. kFirst: O is still 0.
  template <bool kFirst>
  __device__ __forceinline__ void lower_p() {
    float top[2];
    row_max(top);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const float sum = sum_of_quad(mi);
      if (!(sum > ptx::kMaxE4m3 && sum < INFINITY)) continue;
      int peak = sum < kLoneShare * top[mi] ? kLonePeak : kFirstPeak;
      peak -= (sum > kTileKv / 4 * top[mi]) + (sum > kTileKv / 2 * top[mi]);
      const float factor = scale_p(mi, peak - log2f(top[mi]));
      if (!kFirst) scale_row(mi, factor);
    }
  }

  // Packs P to E4M3. Four elements of the accumulator are four of the operand, as V^T orders its
  // keys.
  __device__ __forceinline__ void pack_p(int32_t n) {
    row_sum_[0] += tile_sum_[0];
    row_sum_[1] += tile_sum_[1];
    if constexpr (kIsRuntime) {
      score_mod().apply_dropout(s_, n);
      descales().weigh(s_, n, inverse_v_);
    }
#pragma unroll
    for (int j = 0; j < kTileKv / 32; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &s_[16 * j + i % 2 * 2 + i / 2 * 8];
        p_[4 * j + i] = ptx::pack_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
  }

  __device__ __forceinline__ void reset() {
    this->reset_rows();
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) {
      o_[i] = 0.0f;
      if constexpr (!Config::kSerial) pv_[i] = 0.0f;
    }
    ptx::reg_fence(o_);  // now, beside Q K^T: ptxas would do it after the first softmax
    unpromoted_ = 0;
  }

  // Descriptors are recomputed at each use: registers are scarce.
  __device__ __forceinline__ ptx::SmemDescriptor at(uint32_t offset) const {
    return ptx::SmemDescriptor::at(no_hoist(this->shared_) + offset, 0);
  }

  __device__ __forceinline__ void gemm_qk(const KvState& state) {
    constexpr int kRow = Config::kPanelBytes;
    const ptx::SmemDescriptor k = at(Config::kKOffset).advance(state.stage() * Config::kKBytes);
    const ptx::SmemDescriptor q = at(warpgroup_ * 64 * Config::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < Config::kDimQk / 32; ++x) {
      const int panel = x * 32 / kRow, column = x * 32 % kRow;
      ptx::wgmma_ss<Element, 0, 0>(
          s_, q.advance(panel * kTileQ * kRow + column).template descriptor<kRow>(),
          k.advance(panel * kTileKv * kRow + column).template descriptor<kRow>(), x > 0);
    }
    ptx::wgmma_commit();
  }

  // to (+)= P V for the columns of V from `column` on.
  template <int kCount>
  __device__ __forceinline__ void gemm_pv(float (&to)[kCount], const KvState& state, int column,
                                          int accumulate) {
    const ptx::SmemDescriptor v =
        at(Config::kVtOffset).advance(state.stage() * Config::kVBytes + column * kTileKv);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileKv / 32; ++j) {
      ptx::wgmma_rs<Element, 0>(to, &p_[4 * j], v.advance(j * 32).descriptor(),
                                accumulate || j > 0);
    }
    ptx::wgmma_commit();
  }

  // O += P V, 64 columns at a time; releases V.
  __device__ __forceinline__ void add_pv(const KvState& state) {
    float pv[Config::kPvInFlight][32];
    gemm_pv(pv[0], state, 0, 0);
#pragma unroll
    for (int subtile = 0; subtile < kDimV / 64; ++subtile) {
      const bool last = subtile + 1 == kDimV / 64;
      if (Config::kPvInFlight > 1 && !last) {
        gemm_pv(pv[(subtile + 1) % Config::kPvInFlight], state, (subtile + 1) * 64, 0);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      if (last) this->consumer_release(storage_.v, state);
      float (&x)[32] = pv[subtile % Config::kPvInFlight];
      ptx::reg_fence(x);
#pragma unroll
      for (int i = 0; i < 32; ++i) o_[subtile * 32 + i] += x[i];
      if (Config::kPvInFlight == 1 && !last) gemm_pv(pv[0], state, (subtile + 1) * 64, 0);
    }
  }

  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) o_[i] += pv_[i];
    unpromoted_ = 0;
  }

  __device__ __forceinline__ void last_gemm_pv() {
    if constexpr (Config::kSerial) {
      add_pv(kv_state_);
    } else {
      gemm_pv(pv_, kv_state_, 0, unpromoted_);
      ptx::wgmma_wait<0>();
      ptx::reg_fence(pv_);
      this->consumer_release(storage_.v, kv_state_);
      promote();
    }
  }

  __device__ __forceinline__ FwdFp8Descales<Config> descales() const {
    return FwdFp8Descales<Config>(*this);
  }

  // Loads the factors of a work tile.
  __device__ __forceinline__ void load_exponent_scale() {
    exponent_scale_ = Base::ScoreMod::exponent_scale(params_);
    if (!kIsRuntime) {
      // With a factor of 0 hidden scores would be NaN.
      exponent_scale_ = fmaxf(exponent_scale_ * descales().of_scores(), FLT_MIN);
    }
    if (kIsRuntime && params_.problem.descale_block != 0) {
      const float largest = descales().largest_of_v();
      inverse_v_ = largest == 0.0f ? 0.0f : 1.0f / largest;
    }
  }

  KvState kv_state_;
  int32_t unpromoted_ = 0;
  float exponent_scale_;
  float inverse_v_;  // 1 / largest_of_v(), with descales by blocks
  float tile_sum_[2];
  uint32_t p_[kTileKv / 8];
  float o_[kDimV / 2];
  float pv_[Config::kSerial ? 1 : kDimV / 2];  // P V of unpromoted_ tiles
};

}  // namespace flashattn::cuda::sm90
