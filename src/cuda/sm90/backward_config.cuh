// The configuration of a Hopper backward kernel and what its warps share.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/params.h"

namespace flashattn::cuda::sm90 {

template <class T_, int kDim_, int kTileQ_>
struct BackwardConfig {
  using T = T_;
  static constexpr int kDim = kDim_;  // of the products; smaller heads: zeros
  static constexpr int kTileQ = kTileQ_, kTileKv = 128;
  static constexpr int kConsumers = 2;  // warpgroups of 64 keys
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // Columns come in panels of 64, 128 bytes a row.
  static constexpr int kPanels = kDim / 64;
  static constexpr int kKeyBytes = kTileKv * kDim * 2, kQueryBytes = kTileQ * kDim * 2;
  static constexpr int kScoreBytes = kTileQ * kTileKv * 2;
  static constexpr int kSumBytes = kTileQ * kDim * 4;
  static constexpr int kShareBytes = kSumBytes / kConsumers;  // of dQ, a warpgroup
  static constexpr int kNumberBytes = kTileQ * 4;             // lse or D of a tile

  // K | V | stages of Q | of dO | of dS | dQ | stages of lse | of D | BackwardControl.
  static constexpr int kV = kKeyBytes, kQ = 2 * kKeyBytes, kDo = kQ + kStages * kQueryBytes;
  static constexpr int kDs = kDo + kStages * kQueryBytes, kDq = kDs + kStages * kScoreBytes;
  static constexpr int kLse = kDq + kSumBytes, kDelta = kLse + kStages * kNumberBytes;
  static constexpr int kMainBytes = kDelta + kStages * kNumberBytes;

  static_assert(kDim == 64 || kDim == 128, "two warpgroups share dQ by columns or by queries");
  static_assert(kTileQ * kDim == 64 * 128, "dQ: 64 x 64 a warpgroup");
  static_assert(kKeyBytes / 2 <= kStages * kScoreBytes / 2 && kKeyBytes / 2 <= kShareBytes,
                "dV leaves from where dS lay, dK from where dQ lay");
};

// A tile of keys of a KV head: all tiles of queries of its group that see some of it.
struct BackwardItem {
  int32_t end;  // not 0: there are no more
  int32_t b, kv_head;
  int32_t key, keys;  // the first; how many, up to the tile
  int32_t first_q, first_kv;
  Lengths len;
  Interval tiles;      // of queries
  Interval full;       // tiles in which every query sees every key
  int64_t first_tile;  // of the sequence, in dq and the like, for the group's first head
};

constexpr int kBackwardItems = 2;

template <class Config>
struct BackwardControl {
  uint64_t k_full, v_full, kv_empty, nearly;
  uint64_t q_full[Config::kStages], q_empty[Config::kStages];
  uint64_t do_full[Config::kStages], do_empty[Config::kStages];
  uint64_t dq_full[Config::kConsumers], dq_empty[Config::kConsumers];
  uint64_t item_full[kBackwardItems], item_empty[kBackwardItems];
  BackwardItem items[kBackwardItems];
  Interval visible[Config::kTileKv];  // queries, by key of the tile at work
};

template <class Config>
constexpr int kBackwardSharedBytes =
    Config::kMainBytes + static_cast<int>(sizeof(BackwardControl<Config>));

__device__ __forceinline__ uint32_t barrier_at(uint64_t& barrier) {
  return ptx::shared_address(&barrier);
}

template <class Config>
__device__ __forceinline__ void init_barriers(BackwardControl<Config>& control) {
  constexpr int kConsumers = Config::kConsumers;
  const auto init = [](uint64_t& barrier, int count) {
    ptx::mbarrier_init(barrier_at(barrier), count);
  };
  init(control.k_full, 1);
  init(control.v_full, 1);
  init(control.kv_empty, kConsumers);
  init(control.nearly, 1);
  for (int n = 0; n < Config::kStages; ++n) {
    init(control.q_full[n], 1);
    init(control.do_full[n], 1);
    init(control.q_empty[n], kConsumers);
    init(control.do_empty[n], kConsumers);
  }
  for (int n = 0; n < kConsumers; ++n) {
    init(control.dq_full[n], 4);  // warps
    init(control.dq_empty[n], 1);
  }
  for (int n = 0; n < kBackwardItems; ++n) {
    init(control.item_full[n], 1);
    init(control.item_empty[n], kConsumers + 2);  // and the loader, and the adder
  }
  ptx::fence_mbarrier_init();
}

// How often a ring of two buffers was advanced.
struct Pair {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t slot() const { return count & 1; }
  __device__ __forceinline__ uint32_t phase() const { return count >> 1 & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};
static_assert(kBackwardItems == 2, "a Pair walks over them");

}  // namespace flashattn::cuda::sm90
