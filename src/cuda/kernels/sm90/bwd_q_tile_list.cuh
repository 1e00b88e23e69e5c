// Lists of the Q tiles of a work tile in the Hopper backward kernels for block masks and for any
// score modification. The scheduler's warp makes them from the bits of bwd_block_mask.cu.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tiles.cuh"

namespace flashattn::cuda::sm90 {

// Makes the list of a work tile, by a warp: each lane lists the visible ones of 32 Q tiles of a
// head. Loops are rolled: this warp has few registers.
template <class Config>
class QTileLister {
 public:
  __device__ __forceinline__ QTileLister(const BackwardParams& params,
                                         volatile BwdWorkTile<Config>& work_tile)
      : params_(params), work_tile_(work_tile) {}

  // stage: that of the work tile.
  __device__ __forceinline__ void run(uint32_t stage) const {
    if (lane() == 0) {
      work_tile_.q_tile_list =
          params_.q_tile_lists + (static_cast<int64_t>(blockIdx.x) * kWorkTileStages + stage) *
                                     (params_.q_tile_list_size * (1 + params_.common.ordered));
    }
    __syncwarp();  // one lane wrote the work tile
    uint32_t count = 0;
#pragma unroll 1
    for (int32_t n = 0; n < words() * params_.common.q_heads_per_kv_head; n += 32)
      count += append(n + lane(), count);
    __syncwarp();  // the list is complete
    if (lane() == 0) work_tile_.iter_end = work_tile_.iter_begin + count;
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t first_word() const { return work_tile_.q_tiles.begin / 32; }
  __device__ __forceinline__ int32_t words() const {
    return max((work_tile_.q_tiles.end + 31) / 32 - first_word(), 0);
  }

  // Lists the visible Q tiles of word n of this lane, counted over all heads of the GQA group,
  // behind `count` others and those of lower lanes. Returns how many all lanes have listed.
  __device__ __forceinline__ uint32_t append(int32_t n, uint32_t count) const {
    const int32_t head = n / words();
    QTileBits bits{};
    const int32_t word = first_word() + n - head * words();
    if (head < params_.common.q_heads_per_kv_head) bits = bits_of(head, word);
    uint32_t left = (bits.any[0] | bits.any[1]) &
                    bits_in({work_tile_.q_tiles.begin, work_tile_.q_tiles.end}, word * 32);
    const uint32_t own = __popc(left);
    uint32_t end = own;  // of this lane's entries
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const uint32_t before = __shfl_sync(~0u, end, (lane() - m) & 31);
      if (lane() >= m) end += before;
    }
    uint32_t at = count + end - own;
#pragma unroll 1
    for (; left != 0; left &= left - 1, ++at) {
      const int32_t bit = __ffs(left) - 1, tile = word * 32 + bit;
      uint32_t* const list = work_tile_.q_tile_list;
      list[at] = QTileEntry::of(head, tile, bits, bit).word;
      if (params_.common.ordered) list[params_.q_tile_list_size + at] = turn_of(head, tile);
    }
    return __shfl_sync(~0u, end, 31);
  }

  __device__ __forceinline__ int32_t kv_tile() const {
    return work_tile_.key / Config::kClusterTileKv;
  }
  __device__ __forceinline__ int32_t head_of(int32_t head) const {
    if (params_.block_mask.shares_heads) return 0;
    return work_tile_.kv_head * params_.common.q_heads_per_kv_head + head;
  }
  // The index of the sequence's first tile of `rows` queries, among those of a head.
  __device__ __forceinline__ int32_t first_tile(int32_t rows, int32_t max_tiles) const {
    if (params_.block_mask.shares_batch) return 0;
    return first_q_tile(params_.common.problem, work_tile_.offset_q, work_tile_.b, rows, max_tiles);
  }

  __device__ __forceinline__ QTileBits bits_of(int32_t head, int32_t word) const {
    const BlockMaskBits& mask = params_.block_mask;
    if (!mask.q_tiles) return {{~0u, ~0u}, {~0u, ~0u}};
    const int64_t q_word = static_cast<int64_t>(head_of(head)) * mask.head_q_words +
                           first_tile(32 * Config::kTileQ, mask.max_q_words) + word;
    return mask.q_tiles[q_word * mask.max_kv_tiles + kv_tile()];
  }

  // The number of KV tiles still to be added to a Q tile's dQ when it is this one's turn.
  __device__ __forceinline__ int32_t turn_of(int32_t head, int32_t tile) const {
    const BlockMaskBits& mask = params_.block_mask;
    if (!mask.q_tiles) {
      return kv_tile() + 1 -
             params_.common
                 .dq_first[work_tile_.workspace_tile + head * params_.head_q_tiles + tile];
    }
    const int64_t q_tile = static_cast<int64_t>(head_of(head)) * params_.head_q_tiles +
                           first_tile(Config::kTileQ, params_.max_q_tiles) + tile;
    const KvTileBits bits = mask.kv_tiles[q_tile * mask.kv_words() + kv_tile() / 32];
    return bits.before + __popc(bits.any & ((2u << kv_tile() % 32) - 1));
  }

  const BackwardParams& params_;
  volatile BwdWorkTile<Config>& work_tile_;
};

}  // namespace flashattn::cuda::sm90
