// Mainloop of a consumer warpgroup of the Hopper forward pass in E4M3: 64 rows of Q. See
// fwd_fp8.cuh.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/kernels/sm90/fwd_fp8_epilogue.cuh"
#include "cuda/kernels/sm90/fwd_fp8_softmax.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdFp8Mainloop : FwdFp8Softmax<Config> {
  using Base = FwdFp8Softmax<Config>;
  using Element = ptx::E4m3;
  using Base::add_to_bases, Base::alibi_rise, Base::descales, Base::load_exponent_scale;
  using Base::inverse_v_, Base::tile_sum_;
  using Base::kTileKv, Base::kTileQ, Base::kScoreUnit;
  using Base::params_, Base::q_state_, Base::storage_, Base::warpgroup_;
  using Base::raise_lone_p;
  using Base::score_mod, Base::row_sum_, Base::s_, Base::o_, Base::pv_;
  using Base::work_tile, Base::warpgroup_tile, Base::lane, Base::row, Base::release_q;
  static constexpr int kStages = Config::kStages, kDimV = Config::kDimV;
  static constexpr bool kIsRuntime = Config::kIsRuntime;
  static constexpr bool kHasBlockDescales = Config::kHasBlockDescales;
  using KvState = PipelineState<kStages>;

 public:
  __device__ __forceinline__ FwdFp8Mainloop(const ForwardParams& params, uint32_t shared,
                                            SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage,
             kIsRuntime || kHasBlockDescales ? own_warpgroup() : warpgroup) {}

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
          int32_t begin = max(warpgroup_tile().full_begin, warpgroup_tile().kv_begin);
          if (Config::kHasAlibi && n >= warpgroup_tile().linear_begin)
            begin = max(begin, warpgroup_tile().linear_begin);
          if constexpr (Config::kHasAlibi) add_to_bases(alibi_rise(n));
#pragma unroll 1
          for (; n >= begin; --n) {
            if ((overflow = step<false>(n))) break;
          }
          if constexpr (Config::kHasAlibi) add_to_bases(-alibi_rise(overflow ? n : n + 1));
        } else {
          overflow = step<true>(n);
          if (!overflow) n = next_tile(n);
        }
        if (overflow) {  // outside the inner loop, which must stay small
          this->template lower_p<false>(n);
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

  // Whether every row sees every key of tile n and has seen one before, and keeps its base. With
  // ALiBi all keys lie on one side of all rows, too.
  __device__ __forceinline__ bool is_full(int32_t n) const {
    if (kIsRuntime || work_tile().redo_online) return false;
    if (Config::kHasAlibi &&
        ((n >= warpgroup_tile().linear_end && n < warpgroup_tile().linear_begin) ||
         work_tile().alibi_slope > Base::kSteepest)) {
      return false;
    }
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
    if (this->template softmax<true>(n)) {
      this->template lower_p<true>(n);
    } else if (!kIsRuntime && !Config::kHasAlibi && n >= warpgroup_tile().full_begin &&
               n < warpgroup_tile().full_end) {
      raise_lone_p();
    }
    pack_p(n);
  }

  // P V of the tile before, Q K^T of tile n, its softmax. Returns whether a P of this warp may
  // exceed E4M3: then s_ holds P, which must be packed again, and row_sum_ lacks its sums.
  template <bool kMasked>
  __device__ __forceinline__ bool step(int32_t n) {
    const KvState v_state = kv_state_;
    kv_state_.advance();
    storage_.v.consumer_wait(v_state);
    this->warp_scheduler_sync();
    if constexpr (Config::kSplitsQk) {
      add_pv(v_state, [this] {
        storage_.k.consumer_wait(kv_state_);
        gemm_qk<0>(half_of_s<0>(), kv_state_);
      });
      gemm_qk<kTileKv / 2>(half_of_s<1>(), kv_state_);
    } else {
      if constexpr (Config::kSerial) {
        add_pv(v_state, nullptr);
      } else {
        gemm_pv(pv_, v_state, 0, unpromoted_);
      }
      storage_.k.consumer_wait(kv_state_);
      gemm_qk(kv_state_);
    }
    this->warp_scheduler_arrive();
    if constexpr (!Config::kSerial) {
      ptx::wgmma_wait<1>();
      ptx::reg_fence(pv_);
      this->consumer_release(storage_.v, v_state);
      if (++unpromoted_ == Config::kPromoteEvery) promote();
    }
    constexpr bool kPacksFirst = Config::kPacksFirst && !kMasked;
    constexpr int kEarly = kPacksFirst && Config::kSplitsQk ? kTileKv / 2 : 0;  // keys
    if constexpr (kEarly > 0) {
      // P of half of the keys, while the tensor cores compute the scores of the others.
      ptx::wgmma_wait<1>();
      ptx::reg_fence(half_of_s<0>());
      this->template exp2_plain<false, 0, kEarly / 2>();
      convert_p<0, kEarly>(ptx::pack_e4m3_here);
      ptx::wgmma_wait<0>();
      ptx::reg_fence(half_of_s<1>());
    } else {
      ptx::wgmma_wait<0>();
      ptx::reg_fence(s_);
    }
    this->consumer_release(storage_.k, kv_state_);
    if (n == warpgroup_tile().kv_begin) release_q();
    if constexpr (kPacksFirst) {
      this->template exp2_plain<false, kEarly / 2, kTileKv / 2>();
      convert_p<kEarly, kTileKv>(ptx::pack_e4m3_here);
      const bool overflow = this->exceeds_e4m3();
      if (!overflow) add_sums();
      return overflow;
    }
    const bool overflow = this->template softmax<kMasked>(n);
    if (!overflow) pack_p(n);
    return overflow;
  }

  __device__ __forceinline__ void add_sums() {
    row_sum_[0] += tile_sum_[0];
    row_sum_[1] += tile_sum_[1];
  }

  // Sums P and packs it to E4M3.
  __device__ __forceinline__ void pack_p(int32_t n) {
    add_sums();
    if constexpr (kIsRuntime) {
      score_mod().apply_dropout(s_, n);
      descales().weigh(s_, n, inverse_v_);
    }
    convert_p<0, kTileKv>(
        [](float a, float b, float c, float d) { return ptx::pack_e4m3(a, b, c, d); });
  }

  // P of the keys [kBegin, kEnd) to E4M3. Four elements of the accumulator are four of the operand,
  // as V^T orders its keys.
  template <int kBegin, int kEnd, class Pack>
  __device__ __forceinline__ void convert_p(Pack pack) {
#pragma unroll
    for (int j = kBegin / 32; j < kEnd / 32; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &s_[16 * j + i % 2 * 2 + i / 2 * 8];
        p_[4 * j + i] = pack(x[0], x[1], x[4], x[5]);
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

  // One of the halves of s_, the accumulator of a WGMMA.
  using HalfOfS = float[kTileKv / 4];
  template <int kHalf>
  __device__ __forceinline__ HalfOfS& half_of_s() {
    return *reinterpret_cast<HalfOfS*>(&s_[kHalf * (kTileKv / 4)]);
  }

  __device__ __forceinline__ void gemm_qk(const KvState& state) {
    if constexpr (Config::kSplitsQk) {
      gemm_qk<0>(half_of_s<0>(), state);
      gemm_qk<kTileKv / 2>(half_of_s<1>(), state);
    } else {
      gemm_qk<0>(s_, state);
    }
  }

  // to = Q K^T for the keys of the tile from kFirst on.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void gemm_qk(float (&to)[kCount], const KvState& state) {
    constexpr int kRow = Config::kPanelBytes;
    const ptx::SmemDescriptor k =
        at(Config::kKOffset).advance(state.stage() * Config::kKBytes + kFirst * kRow);
    const ptx::SmemDescriptor q = at(warpgroup_ * 64 * Config::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < Config::kDimQk / 32; ++x) {
      const int panel = x * 32 / kRow, column = x * 32 % kRow;
      ptx::wgmma_ss<Element, 0, 0>(
          to, q.advance(panel * kTileQ * kRow + column).template descriptor<kRow>(),
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

  // O += P V, 64 columns at a time; releases V. issue_next: issues a WGMMA, of which the result
  // takes the place of P V but for the last columns.
  template <class IssueNext>
  __device__ __forceinline__ void add_pv(const KvState& state, IssueNext issue_next) {
    constexpr bool kIssuesNext = !std::is_same_v<IssueNext, std::nullptr_t>;
    static_assert(!kIssuesNext || (Config::kPvInFlight == 2 && kDimV % 128 == 0));
    float own[Config::kSplitsQk ? 1 : Config::kPvInFlight][32];
    HalfOfS(&pv)[Config::kPvInFlight] =
        *reinterpret_cast<HalfOfS(*)[Config::kPvInFlight]>(Config::kSplitsQk ? s_ : own[0]);
    gemm_pv(pv[0], state, 0, 0);
#pragma unroll
    for (int subtile = 0; subtile < kDimV / 64; ++subtile) {
      const bool last = subtile + 1 == kDimV / 64;
      if (Config::kPvInFlight > 1 && !last) {
        gemm_pv(pv[(subtile + 1) % Config::kPvInFlight], state, (subtile + 1) * 64, 0);
        ptx::wgmma_wait<1>();
      } else if constexpr (kIssuesNext) {
        issue_next();
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
      add_pv(kv_state_, nullptr);
    } else {
      gemm_pv(pv_, kv_state_, 0, unpromoted_);
      ptx::wgmma_wait<0>();
      ptx::reg_fence(pv_);
      this->consumer_release(storage_.v, kv_state_);
      promote();
    }
  }

  KvState kv_state_;
  int32_t unpromoted_ = 0;
  uint32_t p_[kTileKv / 8];
};

}  // namespace flashattn::cuda::sm90
