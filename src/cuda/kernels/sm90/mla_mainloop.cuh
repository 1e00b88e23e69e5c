// Mainloop of a consumer warpgroup of latent attention on Hopper. See mla.cuh.
#pragma once

#include "cuda/kernels/sm90/mla_epilogue.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaMainloop : MlaConsumer<Config> {
  using Base = MlaConsumer<Config>;
  using T = typename Config::T;
  using Base::params_, Base::storage_, Base::shared_, Base::warpgroup_;
  using Base::s_, Base::o_, Base::kTileKv;
  using Base::tile, Base::lane, Base::row;
  static constexpr int kPanelBytes = Config::kPanelBytes;
  // P V of a tile is made by so many WGMMAs for each 16 keys. One of all columns has more registers
  // than the threads of a latent kernel start with.
  static constexpr int kPartsOfO = Config::kIsLatent ? 2 : 1;
  static constexpr int kPartBytes = Config::kHalfPanels / kPartsOfO * kPanelBytes;  // of V
  using PartOfO = float[Base::kColumns / 2 / kPartsOfO];
  static constexpr uint32_t kStageBarriers = 2 * sizeof(Barrier);  // bytes, of empty barriers

 public:
  __device__ __forceinline__ MlaMainloop(const MlaParams& params, uint32_t shared,
                                         typename Config::SharedStorage& storage, int32_t warpgroup)
      : Base(params, shared, storage, warpgroup),
        own_(shared + Config::kKOffset + warpgroup * Config::kStageBytes),
        other_(shared + Config::kKOffset + (1 - warpgroup) * Config::kStageBytes),
        own_state_{warpgroup},
        second_empty_(empty_of(ptx::cluster_rank() ^ (params.cluster_size - 1))) {}

  __device__ __forceinline__ void run() {
    this->load_q();
#pragma unroll 1
    for (bool redo = false;;) {
      pass(redo);
      if (this->reduce_row_sums() && !redo) storage_.redo = 1;
      if (redo) break;
      end_first_pass(params_);
      redo = storage_.is_redo();
      if (!redo) break;
      second_empty_ = empty_of(ptx::cluster_rank());
    }
    MlaEpilogue<Config>(*this).store();
  }

 private:
  // Computes O and row sums over all tiles. redo: with online softmax in every step. Otherwise
  // pairs of tiles that every row sees whole have a fixed base once every row has seen a key.
  __device__ __forceinline__ void pass(bool redo) {
    this->reset();
    const int32_t end = tile().tiles.end, pairs_end = end - 1;
    const int32_t fixed_begin = max(tile().fixed_begin, tile().full_tiles.begin);
    const int32_t fixed_end = redo ? 0 : min(tile().full_tiles.end, end) - 1;
    const float slack = redo ? 0.0f : Base::kBaseSlack / kWideUnit;
    int32_t n = tile().tiles.begin;
#pragma unroll 1
    while (n < pairs_end) {
      if (n < fixed_begin || n >= fixed_end) {
        step<true, true, true>(n, slack);
        n += 2;
      } else if (Config::kIsLatent || params_.releases_early) {
        if (warpgroup_ == 1) other_tile();
#pragma unroll 1
        for (; n < fixed_end; n += 2) {
          own_tile(n + warpgroup_);
          if (warpgroup_ == 0 || n + 2 < fixed_end) other_tile();
        }
      } else if (warpgroup_ == 0) {
#pragma unroll 1
        for (; n < fixed_end; n += 2) step<false, true, true>(n, slack);
      } else {
#pragma unroll 1
        for (; n < fixed_end; n += 2) second_step(n);
      }
    }
    // The last tile has no pair.
    if (n < end) {
      if (warpgroup_ == 0) {
        step<true, true, false>(n, slack);
      } else {
        step<true, false, true>(n, slack);
      }
    }
  }

  // The pair of tiles n and n + 1: this warpgroup computes the scores of one, and its columns of
  // P V of both. kOnline: the base may rise. kOwn, kOther: this, the other warpgroup has a tile.
  template <bool kOnline, bool kOwn, bool kOther>
  __device__ __forceinline__ void step(int32_t n, float slack) {
    float o_scale[2];
    if constexpr (kOwn) {
      gemm_qk();
      ptx::wgmma_wait<0>();
      ptx::reg_fence(s_);
      if constexpr (kOnline) {
        this->scale_scores();
        this->mask(n + warpgroup_);
      } else {
        this->mask_by_pages();
      }
    }
    if constexpr (kOnline) {
      this->update_base(kOwn, slack, o_scale);
      rescale_o(o_scale);
    }
    if constexpr (kOwn) {
      if constexpr (kOnline) {
        this->exp2_exact();
      } else {
        this->exp2_scaled();
      }
      hand_over_p<!kOnline>(n + warpgroup_);
      gemm_pv_own();
    }
    if constexpr (kOther) {
      ptx::named_sync(kMlaPBarrier + 1 - warpgroup_, 256);
      gemm_pv_other();
    }
    if constexpr (kOwn) {
      ptx::wgmma_wait<kOther ? 1 : 0>();
      release(warpgroup_);
      own_state_.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    if constexpr (kOther) release(1 - warpgroup_);
  }

  // The second warpgroup's step with a fixed base, in another order: P V of the first one's tile
  // runs during its own softmax, and releases that tile's stage early. So the warpgroups stay half
  // a step apart, and the load of a stage takes place during the products of the other one.
  __device__ __forceinline__ void second_step(int32_t n) {
    gemm_qk();
    ptx::named_sync(kMlaPBarrier + 1 - warpgroup_, 256);
    gemm_pv_other();
    ptx::wgmma_wait<1>();
    ptx::reg_fence(s_);
    this->mask_by_pages();
    this->exp2_scaled();
    hand_over_p<true>(n + warpgroup_);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    release(1 - warpgroup_);
    gemm_pv_own();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    release(warpgroup_);
    own_state_.advance();
  }

  // A step with a fixed base where memory is the limit: stages are released, and their next loads
  // begin, before the other stage's tile has arrived. The second warpgroup begins with the first
  // one's tile. It adds the products to O in the same order as above.
  __device__ __forceinline__ void own_tile(int32_t n) {
    gemm_qk();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s_);
    this->mask_by_pages();
    this->exp2_scaled();
    hand_over_p<true>(n);
    gemm_pv_own();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    release(warpgroup_);
    own_state_.advance();
  }

  __device__ __forceinline__ void other_tile() {
    ptx::named_sync(kMlaPBarrier + 1 - warpgroup_, 256);
    gemm_pv_other();
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    release(1 - warpgroup_);
  }

  // Packs P, in s_, of tile n, and stores it for the other warpgroup. kWhole: the tile has no row
  // past the last key.
  template <bool kWhole>
  __device__ __forceinline__ void hand_over_p(int32_t n) {
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) p_[i] = ptx::pack<T>(s_[2 * i], s_[2 * i + 1]);
    this->warpgroup_sync();  // all warps have read the panel that P replaces
    store_p();
    if constexpr (!kWhole) zero_v_tail(n);
    ptx::fence_async_proxy();
    ptx::named_arrive(kMlaPBarrier + warpgroup_, 256);
  }

  // Releases this warpgroup's half of V in a stage, in a cluster to both producers.
  __device__ __forceinline__ void release(int32_t stage) const {
    if (threadIdx.x % 128 == 0) storage_.k.consumer_release({stage}, warpgroup_);
    if constexpr (!Config::kIsLatent) {
      ptx::mbarrier_arrive_remote_if(second_empty_ == 0 ? 0
                                                        : second_empty_ + stage * kStageBarriers);
    }
  }

  // S of this warpgroup's stage, as the substages of K arrive: its own half of V first.
  __device__ __forceinline__ void gemm_qk() {
    const uint32_t first = no_hoist(warpgroup_) * (Config::kHalfPanels * kPanelBytes);
    const uint32_t second = Config::kHalfPanels * kPanelBytes - first;
    storage_.k.consumer_wait(own_state_, warpgroup_);
    ptx::wgmma_fence();
    gemm_panels<Config::kHalfPanels>(first, true);
    storage_.k.consumer_wait(own_state_, 1 - warpgroup_);
    ptx::wgmma_fence();
    gemm_panels<Config::kHalfPanels>(second, false);
    gemm_panels<Config::kPanels - Config::kPanelsV>(Config::kPanelsV * kPanelBytes, false);
    ptx::wgmma_commit();
  }

  // offset: bytes to the first panel, in Q and in K.
  template <int kPanels>
  __device__ __forceinline__ void gemm_panels(uint32_t offset, bool first) {
    // Otherwise the compiler keeps all addresses in registers, and spills.
    const ptx::SmemDescriptor q = ptx::SmemDescriptor::at(no_hoist(shared_ + offset), 0),
                              k = ptx::SmemDescriptor::at(no_hoist(own_ + offset), 0);
#pragma unroll
    for (int x = 0; x < kPanels * 4; ++x) {
      const uint32_t bytes = x / 4 * kPanelBytes + x % 4 * 32;
      ptx::wgmma_ss<T, 0, 0>(s_, q.advance(bytes).descriptor(), k.advance(bytes).descriptor(),
                             !first || x > 0);
    }
  }

  // This warpgroup's columns of V in a stage.
  __device__ __forceinline__ ptx::SmemDescriptor v_of(uint32_t stage) const {
    return ptx::SmemDescriptor::at(stage + warpgroup_ * (Config::kHalfPanels * kPanelBytes),
                                   kPanelBytes);
  }

  __device__ __forceinline__ PartOfO& part_of_o(int n) {
    return reinterpret_cast<PartOfO&>(o_[n * (Base::kColumns / 2 / kPartsOfO)]);
  }

  __device__ __forceinline__ void gemm_pv_own() {
    const ptx::SmemDescriptor v = v_of(own_);
    ptx::reg_fence(p_);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kTileKv / 16; ++x) {
#pragma unroll
      for (int n = 0; n < kPartsOfO; ++n) {
        ptx::wgmma_rs<T, 1>(part_of_o(n), &p_[4 * x],
                            v.advance(n * kPartBytes + x * 2048).descriptor(), 1);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void gemm_pv_other() {
    const ptx::SmemDescriptor v = v_of(other_),
                              p = ptx::SmemDescriptor::at(other_ + Config::kPOffset, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kTileKv / 16; ++x) {
#pragma unroll
      for (int n = 0; n < kPartsOfO; ++n) {
        ptx::wgmma_ss<T, 0, 1>(part_of_o(n), p.advance(x * 32).descriptor(),
                               v.advance(n * kPartBytes + x * 2048).descriptor(), 1);
      }
    }
    ptx::wgmma_commit();
  }

  // Stores P for the other warpgroup, swizzled as Q is.
  __device__ __forceinline__ void store_p() const {
    const int32_t r = row() - lane() / 4 + lane() % 16;
    const uint32_t to = own_ + Config::kPOffset + r * 128;
#pragma unroll
    for (int j = 0; j < kTileKv / 16; ++j) {
      ptx::stmatrix_x4(to + (((2 * j + lane() / 16) ^ (r & 7)) << 4), p_[4 * j], p_[4 * j + 1],
                       p_[4 * j + 2], p_[4 * j + 3]);
    }
  }

  // Clears rows of V past the last key: their P is 0, but they may be NaN.
  __device__ __forceinline__ void zero_v_tail(int32_t n) const {
    const int32_t first = tile().len.kv - n * kTileKv;
    if (first >= kTileKv) return;
    clear_rows<Config::kPanelsV>(own_, kTileKv, first);
    ptx::fence_async_proxy();
    this->warpgroup_sync();
  }

  __device__ __forceinline__ void rescale_o(const float (&o_scale)[2]) {
    // The base rarely rises after the first tiles.
    if (__all_sync(~0u, o_scale[0] == 1.0f && o_scale[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kDimV / 4; ++i) o_[i] *= o_scale[i / 2 % 2];
  }

  // In a cluster the thread that releases stages arrives a second time, at the address that this
  // returns: that of its empty barrier of stage 0 in the CTA of a rank. For other threads, or
  // without a cluster: 0.
  __device__ __forceinline__ uint32_t empty_of(uint32_t rank) const {
    const uint32_t address = ptx::mapa(storage_.k.empty_barrier({0}, warpgroup_).address(), rank);
    return params_.cluster_size > 1 && threadIdx.x % 128 == 0 ? address : 0;
  }

  const uint32_t own_, other_;  // the stages of K
  StageState own_state_;
  uint32_t second_empty_;  // empty_of() the other CTA; in a redo, which runs alone, this CTA
  uint32_t p_[kTileKv / 4];
};

}  // namespace flashattn::cuda::sm90
