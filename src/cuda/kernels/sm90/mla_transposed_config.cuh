// Configuration of the Hopper kernel for few rows and LATENT_KV, its shared memory, barriers. See
// mla_transposed.cuh.
#pragma once

#include "cuda/kernels/sm90/mla_config.cuh"

namespace flashattn::cuda::sm90 {

// T: type of Q and of the rotary columns of K. kTileQ: rows of Q per CTA.
template <class T_, int kTileQ_>
struct MlaTransposedConfig {
  using T = T_;
  static constexpr int kTileQ = kTileQ_, kTileKv = kMlaTileKv;
  static constexpr int kDimQk = 576, kDimV = 512, kDimRotary = kDimQk - kDimV;
  static constexpr int kGroups = kDimV / kLatentDescaleDim;  // columns of V that share a descale
  static constexpr int kConsumers = 2;  // warpgroups; each has half of the columns of V
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kStages = 4;

  // A record in shared memory: V, descales and rotary columns, in the order that MlaParams says.
  // Eight rows that lie so far apart occupy all banks: ldmatrix has no conflicts.
  static constexpr int kRecordBytes = kDimV + kGroups * 4 + kDimRotary * 2;
  static_assert(kRecordBytes % 128 == 16, "bank conflicts");
  static constexpr int kStageBytes = kTileKv * kRecordBytes;

  // Panels have 64 columns, 128 bytes per row. A panel of P has all keys of a tile.
  static constexpr int kPanelBytes = kTileQ * 128, kPanelsV = kDimV / 64;
  static constexpr int kRotaryOffset = kPanelsV * kPanelBytes;
  static constexpr int kPOffset = kRotaryOffset + kPanelBytes;
  static constexpr int kKOffset = kPOffset + kConsumers * kPanelBytes;
  static constexpr int kTensorBytes = kKOffset + kStages * kStageBytes;
  // O of 16 bits is stored through the buffers of Q and P.
  static constexpr int kOutputRowBytes = kDimV * 2 + 16;
  static_assert(kTileQ * kOutputRowBytes <= kKOffset, "O in shared memory");

  struct SharedStorage {
    Pipeline<kStages, 1, false, StageState> k;
    MlaWorkTile work_tile;
    const char* records;  // V of the sequence's first key, or of the pool's first page
    int32_t has_work;
    int32_t redo;  // the base overflowed: the tile is computed again, with online softmax
    uint16_t shown_kv[kStages][4];  // PAGES: a bit for each of 16 keys whose page is not hidden
    uint16_t ratios[kConsumers][2][kGroups][kTileKv];  // of the tiles whose P a warpgroup stores
    int32_t lift;                                      // see lift_of_p()
    float q_unit;                            // by which Q in shared memory must be multiplied
    int32_t units[kConsumers][2];            // of that P, see MlaTransposedConsumer
    int32_t nonfinite[4 * kConsumers];       // by warp: O is not finite
    Interval visible_kv[kTileQ];             // keys of the split that each row sees
    float partials[4 * kConsumers][kTileQ];  // by warp: row maxima of a step, row sums
    float base[kTileQ];     // of the softmax, in units of kWideUnit log2(e); -inf: no key yet
    float top[kTileQ];      // the base in units of log2(e); 0 if there is none
    float o_scale[kTileQ];  // factor for O of a step, of the epilogue

    __device__ __forceinline__ bool is_redo() const {
      return *static_cast<const volatile int32_t*>(&redo) != 0;
    }
  };
  static constexpr int kSharedBytes = kTensorBytes + static_cast<int>(sizeof(SharedStorage));
  static_assert(kSharedBytes <= 227 * 1024, "a CTA's shared memory");
};

// The power of two by which P is multiplied before it becomes fp16, which loses what is 2^-25 times
// the largest: the sum of that over all keys must stay small.
__device__ __forceinline__ int32_t lift_of_p(int32_t keys) {
  return min(max(0, 32 - __clz(keys) - 13), 8);
}

}  // namespace flashattn::cuda::sm90
