// Warps of the Hopper forward pass in E4M3 that transpose V in shared memory: WGMMA reads operands
// of 8 bits only with k contiguous.
//
// V has rows of keys, V^T rows of columns, 128 keys long, with the 128-byte swizzle; fwd_fp8.cuh
// has the order of keys.
//
// ldmatrix.trans moves pairs of bytes: lane 4 g + c gets columns 2 g and 2 g + 1 of keys 2 c and
// 2 c + 1. Two such words, 8 keys apart, hold the four keys at positions 4 c to 4 c + 3 of both
// columns, which byte permutations separate. The word that is stored first is that of the even
// column for g < 4, of the odd one for g >= 4: the 8 rows that stmatrix writes at a time then are
// different modulo 8, and in different banks.
#pragma once

#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/fwd_config.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class VTransposer {
  static constexpr int kTileKv = Config::kTileKv, kPanelBytes = Config::kPanelBytes;
  static constexpr int kPanelTile = kTileKv * kPanelBytes;  // bytes of a panel
  static constexpr int kKeys = kTileKv / Config::kTransposerWarps;
  static constexpr int kChunks = kPanelBytes / 16;  // of 16 columns in a panel
  static_assert(kTileKv == 128 && kKeys == 64, "a row of V^T is swizzled as a whole");

 public:
  __device__ __forceinline__ VTransposer(uint32_t shared, SharedStorage<Config>& storage)
      : storage_(storage), shared_(shared) {
    const int32_t lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    // ldmatrix: matrix m has keys 8 m to 8 m + 7 of 32.
    const int32_t key = first_key() + lane;
    from_ =
        shared + Config::kVOffset + key * kPanelBytes + (key * kPanelBytes / 128 % kChunks) * 16;
    // stmatrix: matrices 0 and 1 have the first 16 keys, 2 and 3 the others.
    const int32_t column = 2 * row + (row / 4 ^ matrix % 2);
    to_ = shared + Config::kVtOffset + column * kTileKv +
          ((first_key() / 16 + matrix / 2) ^ column % 8) * 16;
    even_first_ = lane < 16 ? 0x6420 : 0x7531;
  }

  __device__ __forceinline__ void run() {
    for (uint32_t count = 0;; ++count) {
      const PipelineState<Config::kRawVStages> raw{count};
      const PipelineState<Config::kStages> transposed{count};
      storage_.raw_v.consumer_wait(raw);
      const int32_t keys = *static_cast<const volatile int32_t*>(&storage_.raw_v_keys[raw.stage()]);
      if (keys == kNoMoreTiles) return;
      const uint32_t from = raw.stage() * Config::kVBytes;
      if (keys < kTileKv) clear_keys(from, keys);
      storage_.v.producer_acquire(transposed);
      __syncwarp();
      transpose(from_ + from, to_ + transposed.stage() * Config::kVBytes);
      ptx::fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        storage_.v.producer_commit(transposed);
        storage_.raw_v.consumer_release(raw);
      }
    }
  }

 private:
  // The first of this warp's keys.
  static __device__ __forceinline__ int32_t first_key() {
    return static_cast<int32_t>(no_hoist(threadIdx.x) / 32 % Config::kTransposerWarps) * kKeys;
  }

  // Clears this warp's keys of a stage from key `end` of the tile on. They are past the sequence's
  // last: whatever lies there must not reach O, not even times 0.
  __device__ __forceinline__ void clear_keys(uint32_t stage, int32_t end) const {
    const uint32_t first = max(end, first_key()) * kPanelBytes + threadIdx.x % 32 * 16;
    const uint32_t last = (first_key() + kKeys) * kPanelBytes;
#pragma unroll 1
    for (uint32_t panel = 0; panel < Config::kVBytes; panel += kPanelTile) {
#pragma unroll 1
      for (uint32_t x = first; x < last; x += 32 * 16) {
        ptx::clear_shared_16(shared_ + Config::kVOffset + stage + panel + x);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void transpose(uint32_t from, uint32_t to) const {
    constexpr int kAtOnce = 2;  // chunks, which hides latencies
    const uint32_t odd_first = even_first_ ^ 0x1111;
#pragma unroll 1
    for (int chunk = 0; chunk < Config::kDimV / 16; chunk += kAtOnce) {
      uint32_t x[kAtOnce][2][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t column =
            (from ^ (chunk + i) % kChunks * 16) + (chunk + i) / kChunks * kPanelTile;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the keys
          ptx::ldmatrix_x4_trans(x[i][half], column + half * 32 * kPanelBytes);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t (&y)[4] = x[i][half];
          ptx::stmatrix_x4((to ^ half * 32) + (chunk + i) * 16 * kTileKv,
                           __byte_perm(y[0], y[1], even_first_), __byte_perm(y[0], y[1], odd_first),
                           __byte_perm(y[2], y[3], even_first_),
                           __byte_perm(y[2], y[3], odd_first));
        }
      }
    }
  }

  SharedStorage<Config>& storage_;
  const uint32_t shared_;
  uint32_t from_, to_;   // this lane's first addresses in the first stage
  uint32_t even_first_;  // selects the bytes of the word that is stored first
};

}  // namespace flashattn::cuda::sm90
