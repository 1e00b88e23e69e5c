// Mainloop of a consumer warpgroup of the Hopper forward pass: 64 rows of Q, Q K^T and P V over the
// KV tiles.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/fwd_epilogue.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class FwdMainloop : FwdSoftmax<Config> {
  using Base = FwdSoftmax<Config>;
  using T = typename Config::T;
  using Base::base, Base::score_mod, Base::release_q, Base::work_tile, Base::warpgroup_tile;
  using Base::block_mask_hides_keys_, Base::block_mask_hides_tile_, Base::softmax_base_,
      Base::row_sum_, Base::s_, Base::s_half_;
  using Base::kBaseSlack, Base::kTileKv, Base::kTileQ;
  using Base::params_, Base::q_state_, Base::storage_, Base::warpgroup_;
  static constexpr int kStages = Config::kStages;
  // fp16 only, as bf16 has the range of fp32; not with ALiBi, whose bias is lowest for first keys.
  static constexpr bool kChecksFirstKeys = !Config::kHasAlibi && std::is_same<T, __half>::value;
  using KvState = PipelineState<kStages>;
  using typename Base::AlibiRows, typename Base::AlibiTile;
  using TileDropoutSigns = typename Base::ScoreMod::TileDropoutSigns;

 public:
  __device__ __forceinline__ FwdMainloop(const ForwardParams& params, uint32_t shared,
                                         SharedStorage<Config>& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup),
        q_(ptx::SmemDescriptor::at(shared + warpgroup * 64 * 128, 0)),
        k_(ptx::SmemDescriptor::at(shared + Config::kKOffset, 0)),
        v_(ptx::SmemDescriptor::at(shared + Config::kVOffset, kTileKv * 128)) {}

  __device__ __forceinline__ void run() {
    this->for_each_work_tile([this] { process_tile(); });
  }

 private:
  // How a step gets from Q K^T to P. kOnline updates the base; the other paths use a fixed one.
  // From kFirstKeys on, every row sees every key.
  enum class ScorePath {
    kOnline,       // masks, every score modification, and an update of the base
    kMasked,       // masks and every score modification
    kFirstKeys,    // every score modification; tile 0, whose first keys may raise the base
    kPlain,        // scale
    kSoftcap,      // softcap
    kAlibi,        // ALiBi
    kAlibiPaired,  // ALiBi of paired rows; all keys lie before the rows
  };

  // Steps with a fixed base and no mask, from tile n down to tile `full`. Returns the next n. Each
  // path has a loop of its own: with two in one loop, registers are copied from tile to tile.
  __device__ __forceinline__ int32_t fixed_base_steps(int32_t n, int32_t full) {
    if constexpr (!Config::ScoreMod::kModifiesScores) {
#pragma unroll 1
      for (; n >= full; --n) step<ScorePath::kPlain>(s_, n);
    } else if constexpr (Config::kHasSoftcap) {
#pragma unroll 1
      for (; n >= full; --n) step<ScorePath::kSoftcap>(s_, n);
    } else {
      const AlibiRows alibi = score_mod().alibi_rows();
      const int32_t paired_end = alibi.paired_rows ? max(full, alibi.linear_end) : full;
#pragma unroll 1
      for (; n >= paired_end; --n) step<ScorePath::kAlibi>(s_, n, alibi);
#pragma unroll 1
      for (; n >= full; --n) step<ScorePath::kAlibiPaired>(s_, n, alibi);
    }
    return n;
  }

  // The steps after that of tile n, where a block mask may hide tiles; tile `first` is visible.
  // Kernels for block masks alone: once every row has seen every key of a tile, tiles that hide
  // nothing keep the base. Returns the tile below `first`.
  __device__ __forceinline__ int32_t visible_tile_steps(int32_t n, int32_t first, int32_t full) {
    const int32_t full_end = warpgroup_tile().full_end;
    const auto is_full = [&] { return n >= full && n < full_end && !block_mask_hides_keys_; };
    bool fixed = is_full();
    while (n > first) {
      n = this->wait_k(KvState{kv_state_.count + 1}, n - 1);
      if (block_mask_hides_tile_) {
        hidden_step(n);
      } else if (Config::kHasBlockMask && fixed && is_full()) {
        step<ScorePath::kPlain>(s_, n);
      } else {
        step<ScorePath::kOnline>(s_, n);
        fixed |= is_full();
      }
    }
    return n - 1;
  }

  __device__ __forceinline__ void process_tile() {
    // These are read together, so that the loads overlap.
    const int32_t begin = work_tile().kv_begin, first = warpgroup_tile().kv_begin,
                  end = warpgroup_tile().kv_end;
    const int32_t full = max(warpgroup_tile().full_begin, first);
    const int32_t fixed_end =
        Config::kOnlineSoftmax ? first : max(warpgroup_tile().fixed_base_end, first);
    const bool upper = Config::kHalfTiles && warpgroup_tile().first_upper_only;
    const bool lower = Config::kHalfTiles && warpgroup_tile().last_lower_only;
    const bool redo = work_tile().redo_online;
    int32_t n = work_tile().kv_end - 1;
    storage_.q.consumer_wait(q_state_, warpgroup_);
    // Every warpgroup passes the scheduler barrier kv_end - kv_begin - 1 times per work tile.
    if (Config::kUnusualFirst && first >= end) {
      hidden_tile(n);
    } else if (Config::kUnusualFirst && redo) {
      redo_tile(n);
    } else if (first < end && !redo) {
      if constexpr (Config::kOwnTileFirst) {
        // The warpgroup computes its own first tile before it skips those of others, as far as
        // stages allow.
        this->skip_tiles(kv_state_, n, end + kStages - 1);
        first_step(end - 1, KvState{kv_state_.count + (n + 1 - end)}, lower);
        this->skip_tiles(kv_state_, n, end);
        --n;
      } else {
        this->skip_tiles(kv_state_, n, end);
        first_step(n, kv_state_, lower);
        --n;
      }
      if constexpr (kMayHideTiles<Config>) {
        n = visible_tile_steps(n + 1, first, full);
      } else {
#pragma unroll 1
        for (; n >= fixed_end; --n) step<ScorePath::kOnline>(s_, n);
      }
      if constexpr (!Config::kOnlineSoftmax) {
        for (int mi = 0; mi < 2; ++mi) softmax_base_[mi] = base(mi);  // fixed from here on
        n = fixed_base_steps(n, kChecksFirstKeys ? max(full, 1) : full);
        if constexpr (kChecksFirstKeys) {
          // At most one step. A loop, as ptxas would serialise the WGMMAs of a branch.
#pragma unroll 1
          for (; n == 0 && full == 0; --n) step<ScorePath::kFirstKeys>(s_, n);
        }
        const int32_t whole_begin = upper ? first + 1 : first;
#pragma unroll 1
        for (; n >= whole_begin; --n) step<ScorePath::kMasked>(s_, n);
        if constexpr (Config::kHalfTiles) {
          if (upper && n == first) step<ScorePath::kMasked, KvHalf::kUpper>(s_half_, n--);
        }
      }
      storage_.v.consumer_wait(kv_state_);
      gemm_pv(kv_state_);
      if constexpr (Base::kHasHeadroom) this->total_rows(false);  // P V hides latencies
      wait_pv(kv_state_);
      kv_state_.advance();
    }
    if (!Config::kUnusualFirst && first >= end) {
      hidden_tile(n);
    } else if (!Config::kUnusualFirst && redo) {
      redo_tile(n);
    }
    this->skip_tiles(kv_state_, n, begin);
    if (Base::kHasHeadroom && (first >= end || redo)) this->total_rows(redo);
    FwdEpilogue<Config>(*this).finish_tile(o_, 1.0f, redo);
    q_state_.advance();
  }

  // No row of this warpgroup sees a key. Skips a KV tile, n, if there is one.
  __device__ __forceinline__ void hidden_tile(int32_t& n) {
    reset_accumulators();
    this->warpgroup_sync();
    if (Config::kSeparateO) release_q();
    if (n < work_tile().kv_begin) return;
    this->skip_tile(kv_state_, false);
    --n;
  }

  // Q K^T and softmax of the first KV tile, or of its lower half.
  __device__ __forceinline__ void first_step(int32_t n, const KvState& state, bool lower_half) {
    n = this->wait_k(state, n);
    if (Config::kHalfTiles && lower_half) {
      if constexpr (Config::kHalfTiles) first_step<KvHalf::kLower>(s_half_, n, state);
    } else {
      first_step<KvHalf::kBoth>(s_, n, state);
    }
    // A KV tile with a tail is the first of the work tile, and its stage is kv_state_.
    zero_v_tail(n);
  }

  template <KvHalf kHalf, int kCount>
  __device__ __forceinline__ void first_step(float (&s)[kCount], int32_t n, const KvState& state) {
    gemm_qk<kHalf>(s, state);
    reset_accumulators();
    TileDropoutSigns signs;
    score_mod().draw_dropout(signs, n);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    this->consumer_release(storage_.k, state);
    if (Config::kSeparateO && n == warpgroup_tile().kv_begin) release_q();
    if constexpr (Config::kHasAlibi) {
      AlibiTile alibi = score_mod().alibi_tile(score_mod().alibi_rows(), n);
      float base_bias[2] = {0.0f, 0.0f};
      if (warpgroup_tile().fixed_base_end > 0 && alibi.is_linear) {
        score_mod().max_alibi_bias(base_bias);
        // The predicted base is lowered: P has more range above the base than below.
        for (float& peak : base_bias) peak -= kBaseSlack;
      } else {
        score_mod().modify(s, n * kTileKv, false);
        alibi = {1.0f, {0.0f}};  // modify() has applied ALiBi
      }
      apply_masks<kHalf>(s, n);
      this->update_base(s, alibi.scale, base_bias);
      this->exp2_alibi_abs(s, alibi);
    } else {
      score_mod().modify(s, n * kTileKv, false);
      this->advance_bias();
      apply_masks<kHalf>(s, n);
      this->update_base(s, to_base_units(), {0.0f, 0.0f});
      this->exp2_online(s);
    }
    score_mod().apply_dropout(s_, n);
    pack_p<kHalf>(s, signs);
  }

  // Issues Q K^T of tile n and P V of tile n + 1; then the softmax of n, under others' WGMMAs.
  template <ScorePath kPath, KvHalf kHalf = KvHalf::kBoth, int kCount>
  __device__ __forceinline__ void step(float (&s)[kCount], int32_t n, const AlibiRows& alibi = {}) {
    const KvState v_state = kv_state_;
    kv_state_.advance();
    const bool last = n == warpgroup_tile().kv_begin;
    constexpr bool kIsOnline = kPath == ScorePath::kOnline;
    if constexpr (kMayHideTiles<Config>) {  // wait_k() has waited for tile n
    } else if constexpr (kPath == ScorePath::kPlain) {
      storage_.k.consumer_wait_with_pair(kv_state_, softmax_base_);
    } else {
      storage_.k.consumer_wait(kv_state_);
    }
    this->warp_scheduler_sync();
    gemm_qk<kHalf>(s, kv_state_);
    storage_.v.consumer_wait(v_state);
    gemm_pv(v_state);
    this->warp_scheduler_arrive();
    TileDropoutSigns signs;
    score_mod().draw_dropout(signs, n);
    AlibiTile alibi_tile;  // computed while the WGMMAs run; latencies after them are exposed
    if constexpr (kPath == ScorePath::kAlibi) alibi_tile = score_mod().alibi_tile(alibi, n);
    const bool is_masked = Config::kHasDenseBias && this->is_masked(n);
    ptx::wgmma_wait<1>();
    ptx::reg_fence(s);
    this->consumer_release(storage_.k, kv_state_);
    if (Config::kSeparateO && last) release_q();
    if (Config::kWaitPvFirst) wait_pv(v_state);
    float o_scale[2] = {1.0f, 1.0f};
    if constexpr (kPath == ScorePath::kAlibi) {
      this->exp2_alibi(s, alibi_tile);
    } else if constexpr (kPath == ScorePath::kAlibiPaired) {
      this->exp2_alibi_paired(alibi, n, o_[0]);
    } else if constexpr (kPath == ScorePath::kSoftcap) {
      this->exp2_softcap();
    } else {
      score_mod().modify(s, n * kTileKv + Base::template kFirstKey<kHalf>, false);
      this->advance_bias();
      if constexpr (Config::kHasDenseBias) this->apply_mask_if(is_masked, n);
      if constexpr (!Config::kHasDenseBias && (kIsOnline || kPath == ScorePath::kMasked))
        apply_masks<kHalf>(s, n);
      if constexpr (kIsOnline) {
        this->update_base(s, to_base_units(), {0.0f, 0.0f}, false, o_scale);
        this->exp2_online(s);
      } else {
        this->exp2_scaled(s, softmax_base_);
      }
    }
    // Asked before P V is waited for, which hides the latency.
    const bool raises = kPath == ScorePath::kFirstKeys && first_keys_exceed();
    score_mod().apply_dropout(s_, n);
    if (!Config::kWaitPvFirst) wait_pv(v_state);
    if (raises) raise_to_first_keys();
    pack_p<kHalf>(s, signs);
    if constexpr (kIsOnline) rescale_o(o_scale);
  }

  // P V of tile n + 1. No row of this warpgroup sees a key of tile n: its P is 0.
  __device__ __forceinline__ void hidden_step(int32_t n) {
    const KvState v_state = kv_state_;
    kv_state_.advance();
    const bool last = n == warpgroup_tile().kv_begin;
    this->warp_scheduler_sync();
    storage_.v.consumer_wait(v_state);
    gemm_pv(v_state);
    this->warp_scheduler_arrive();
    wait_pv(v_state);
    this->consumer_release(storage_.k, kv_state_);
    if (Config::kSeparateO && last) release_q();
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) p_[i] = 0;
  }

  // Online softmax of a redone work tile, from KV tile `next` on. The base is the maximum of all
  // tiles so far and is subtracted exactly, from rounded scores. The steps overlap nothing, as they
  // are rare, and are all alike, so that their code is short. `n` is a counter of its own: the
  // usual steps keep theirs in a uniform register.
  __device__ __forceinline__ void redo_tile(int32_t& next) {
    const int32_t first = warpgroup_tile().kv_begin;
    int32_t n = next;
    this->skip_tiles(kv_state_, n, warpgroup_tile().kv_end);
    reset_accumulators();
    bool in_order = false;
#pragma unroll 1
    for (; n >= first; --n) {
      n = this->wait_k(kv_state_, n);
      if (in_order) this->warp_scheduler_sync();
      gemm_qk<KvHalf::kBoth>(s_, kv_state_);
      if (in_order) this->warp_scheduler_arrive();
      in_order = true;
      TileDropoutSigns signs;
      score_mod().draw_dropout(signs, n);
      ptx::wgmma_wait<0>();
      ptx::reg_fence(s_);
      this->consumer_release(storage_.k, kv_state_);
      if (Config::kSeparateO && n == first) release_q();
      zero_v_tail(n);
      float o_scale[2];
      score_mod().modify(s_, n * kTileKv, true);
      this->advance_bias();
      apply_masks<KvHalf::kBoth>(s_, n);
      this->update_base(s_, 1.0f, {0.0f, 0.0f}, true, o_scale);
      this->exp2_redo();
      score_mod().apply_dropout(s_, n);
      pack_p<KvHalf::kBoth>(s_, signs);
      rescale_o(o_scale);
      storage_.v.consumer_wait(kv_state_);
      gemm_pv(kv_state_);
      wait_pv(kv_state_);
      kv_state_.advance();
    }
    next = n;
  }

  // Trained models give the first keys of a sequence scores far above those of all others. Tile 0
  // is visited last: if P of one of its first 8 keys exceeds the slack, the base rises. Otherwise P
  // would overflow fp16, and the whole work tile would be redone.
  static constexpr float kMaxFirstP = 1 << static_cast<int>(Base::kBaseSlack);
  __device__ __forceinline__ bool first_keys_exceed() const {
    return __any_sync(~0u, fmaxf(max_first_p(0), max_first_p(1)) > kMaxFirstP);
  }
  // The maximum P of the lane's two first keys.
  __device__ __forceinline__ float max_first_p(int mi) const {
    return fmaxf(s_[2 * mi], s_[2 * mi + 1]);
  }

  // P is still fp32. The base rises to the largest P, which becomes 1: rounded, it keeps its
  // weight.
  __device__ __forceinline__ void raise_to_first_keys() {
    float scale[2];
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      float top = max_first_p(mi);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = top > kMaxFirstP ? top : 1.0f;
      scale[mi] = ptx::reciprocal(top);
      softmax_base_[mi] += ptx::log2(top);
      row_sum_[mi] *= scale[mi];
    }
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) s_[i] *= scale[i / 2 % 2];
    this->scale_rows(o_, scale);
  }

  __device__ __forceinline__ void wait_pv(const KvState& v_state) {
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    this->consumer_release(storage_.v, v_state);
  }

  // Masks the scores of tile n, or of a half of it.
  template <KvHalf kHalf, int kCount>
  __device__ __forceinline__ void apply_masks(float (&s)[kCount], int32_t n) {
    if constexpr (kHalf == KvHalf::kBoth) {
      Base::apply_masks(n);
    } else {
      score_mod().apply_mask(s, n * kTileKv + Base::template kFirstKey<kHalf>);
    }
  }

  // Factor from the scores that modify() leaves to the units of softmax_base_.
  __device__ __forceinline__ float to_base_units() const {
    return Base::ScoreMod::kHoldsAllScores ? 1.0f : Base::ScoreMod::exponent_scale(params_);
  }

  __device__ __forceinline__ void reset_accumulators() {
    this->reset_rows();
#pragma unroll
    for (int i = 0; i < Config::kDimV / 2; ++i) o_[i] = 0.0f;
  }

  template <KvHalf kHalf, int kCount>
  __device__ __forceinline__ void gemm_qk(float (&s)[kCount], const KvState& state) {
    const ptx::SmemDescriptor k =
        k_.advance(state.stage() * Config::kKBytes + Base::template kFirstKey<kHalf> * 128);
    // Large heads: otherwise the compiler keeps all addresses in registers, and spills.
    const ptx::SmemDescriptor first{Config::kDimQk > 128 ? no_hoist(q_.low) : q_.low};
    const ptx::SmemDescriptor q = first.advance(q_state_.stage() * Config::kQBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < Config::kDimQk / 16; ++x) {
      ptx::wgmma_ss<T, 0, 0>(s, q.advance(x / 4 * kTileQ * 128 + x % 4 * 32).descriptor(),
                             k.advance(x / 4 * kTileKv * 128 + x % 4 * 32).descriptor(), x > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void gemm_pv(const KvState& state) {
    const ptx::SmemDescriptor v = v_.advance(state.stage() * Config::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kTileKv / 16; ++x) {
      ptx::wgmma_rs<T, 1>(o_, &p_[4 * x], v.advance(x * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  template <KvHalf kHalf, int kCount>
  __device__ __forceinline__ void pack_p(const float (&s)[kCount], const TileDropoutSigns& signs) {
    constexpr int kFrom = Base::template kFirstKey<kHalf> / 4;
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) {
      const int x = 2 * (i - kFrom);
      p_[i] = x < 0 || x >= kCount ? 0 : ptx::pack<T>(s[x], s[x + 1]);
      if constexpr (Config::kHasDropout) p_[i] &= ~ptx::sign_mask(signs[i]);
    }
  }

  __device__ __forceinline__ void rescale_o(const float (&o_scale)[2]) {
    // The base rarely rises after the first tiles.
    if (__all_sync(~0u, o_scale[0] == 1.0f && o_scale[1] == 1.0f)) return;
    this->scale_rows(o_, o_scale);
  }

  // Clears rows of V past the last key: their P is 0, but they may be NaN.
  __device__ __forceinline__ void zero_v_tail(int32_t n) {
    if (!params_.kv_has_tail || (n + 1) * kTileKv <= work_tile().len.kv) return;
    storage_.v.consumer_wait(kv_state_);
    const uint32_t v = v_.address() + kv_state_.stage() * Config::kVBytes;
    clear_rows<Config::kPanelsV>(v, kTileKv, work_tile().len.kv - n * kTileKv);
    ptx::fence_async_proxy();
    this->warpgroup_sync();
  }

  const ptx::SmemDescriptor q_, k_, v_;
  KvState kv_state_;
  uint32_t p_[kTileKv / 4];
  float o_[Config::kDimV / 2];
};

}  // namespace flashattn::cuda::sm90
