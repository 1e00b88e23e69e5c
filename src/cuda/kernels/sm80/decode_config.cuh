// Tiles, warps and shared memory of a portable decode kernel.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm80/decode_merge.cuh"
#include "cuda/kernels/sm80/e4m3_cache.cuh"
#include "cuda/kernels/sm80/fwd_work_tile.cuh"
#include "cuda/device/score_mod.cuh"

namespace flashattn::cuda::sm80 {

// Shared memory: Q | stages of K | stages of V | page numbers | E4m3CacheLayout | sums of Q K^T
// that warps exchange | FwdWorkTile | Merge. Operand: the type of K and V. kRowWarps sets
// of kKeyWarps kDimSplit warps have 16 kMmaM rows each.
template <class Operand_, int kDimQk_, int kDimV_, int kMmaM_, int kTileKv_, int kStages_,
          int kMinCtasPerSm_, int kRowWarps_ = 1, int kKeyWarps_ = 4,
          class ScoreMod_ = ScoreModChain<>, int kDimSplit_ = 1, bool kMerges_ = false>
struct DecodeConfig {
  using Operand = Operand_;
  using ScoreMod = ScoreMod_;
  static constexpr bool kIsE4m3 = std::is_same<Operand, ptx::E4m3>::value;
  using T = std::conditional_t<kIsE4m3, __half, Operand>;  // type of Q and P in MMAs
  static constexpr int kDimQk = kDimQk_, kDimV = kDimV_;   // tile columns; smaller heads are padded
  static constexpr int kMmaM = kMmaM_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_;
  static constexpr int kDimSplit = kDimSplit_, kTeams = kKeyWarps * kRowWarps;
  static constexpr int kWarpDimV = kDimV / kDimSplit;  // columns of V and O
  static_assert(kDimSplit == 1 || (kIsE4m3 && kDimSplit == 2 && kTeams < 16), "pairs of warps");
  static constexpr int kWarps = kTeams * kDimSplit, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kMmaM, kTileQ = kWarpRows * kRowWarps;
  static constexpr int kTileKv = kTileKv_, kWarpKv = kTileKv / kKeyWarps;
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtasPerSm = kMinCtasPerSm_;  // limits registers

  using QTile = SmemTile<kTileQ, kDimQk>;
  using KTile = SmemTile<kTileKv, kDimQk, sizeof(Operand)>;
  using VTile = SmemTile<kTileKv, kDimV, sizeof(Operand)>;
  static_assert(std::is_same<KTile, VTile>::value, "the same threads load the same rows of both");
  static constexpr int kQChunks = QTile::kBytes / 16;
  static constexpr int kQThreads = kQChunks < kThreads ? kQChunks : kThreads;  // they load Q
  static constexpr int kKOffset = QTile::kBytes;
  static constexpr int kVOffset = kKOffset + kStages * KTile::kBytes;
  // The warps' partial results take the buffers of Q, K and V: rows of O, which start at different
  // banks, then row maxima and sums. O is combined in kOutputSteps ranges of columns.
  static constexpr int kOutputSteps = kIsE4m3 ? 2 : 1, kOutputColumns = kDimV / kOutputSteps;
  static constexpr int kORowBytes = kOutputColumns * 4 + 32;
  static constexpr int kRowStatsOffset = kKeyWarps * kTileQ * kORowBytes;
  static constexpr int kPartialBytes = kRowStatsOffset + kKeyWarps * kTileQ * 8;
  static constexpr int kBufferBytes = kVOffset + kStages * VTile::kBytes;
  static_assert(kIsE4m3 || kPartialBytes <= kBufferBytes, "partial results fit");
  static constexpr int kPagesOffset = kPartialBytes > kBufferBytes ? kPartialBytes : kBufferBytes;
  // Page numbers, a word a thread: for the tiles in flight and for those that follow them.
  static constexpr int kPageSets = 2 * kStages;
  static_assert((kStages & (kStages - 1)) == 0, "the lowest bits of a tile's index are its stage");
  using CacheLayout = E4m3CacheLayout<kTileQ, kTileKv, kStages>;
  static constexpr int kCacheOffset = kPagesOffset + kPageSets * kThreads * 4;
  static constexpr int kSumsOffset = kCacheOffset + (kIsE4m3 ? CacheLayout::kBytes : 0);
  static constexpr int kWarpSumsBytes = kDimSplit == 1 ? 0 : kWarpRows * kWarpKv * 4;
  static constexpr int kWorkTileOffset = kSumsOffset + kWarps * kWarpSumsBytes;
  static constexpr bool kMerges = kMerges_;  // the CTAs of a cluster merge their splits
  using Merge = ClusterMerge<DecodeConfig>;
  static constexpr int kMergeOffset = kWorkTileOffset + FwdWorkTile::kWords * 4;
  static constexpr int kSharedBytes = kMergeOffset + Merge::kBytes;
  static_assert(kMinCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024,
                "an H100's shared memory holds the CTAs");
};

// A warp of a decode kernel works on the keys of key_warp() in each tile, rows from first_row()
// on, and the columns of K and V of dim_warp().
template <class Config>
struct DecodeWarp {
  int lane = threadIdx.x % 32, idx = threadIdx.x / 32;

  __device__ __forceinline__ int key_warp() const { return idx % Config::kKeyWarps; }
  __device__ __forceinline__ int first_row() const {
    const int row_warp = idx / Config::kKeyWarps % Config::kRowWarps;
    return Config::kRowWarps == 1 ? 0 : row_warp * Config::kWarpRows;
  }
  __device__ __forceinline__ int dim_warp() const {
    return Config::kDimSplit == 1 ? 0 : idx / Config::kTeams;
  }
  __device__ __forceinline__ int32_t row_of(int mma_m, int half) const {
    return first_row() + mma_m * 16 + half * 8 + lane / 4;
  }
};

}  // namespace flashattn::cuda::sm80
