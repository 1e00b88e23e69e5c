// Lists of the Q tiles of a work tile in the Hopper backward kernels for block masks and for any
// score modification. The scheduler's warp makes them from the bits of bwd_block_mask.cu.
#pragma once

#include "cuda/kernels/sm90/bwd_q_tiles.cuh"

namespace flashattn::cuda::sm90 {

// Makes the list of a work tile, by a warp. Loops are rolled: this warp has few registers.
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
    for (int32_t n = 0; n < all_words(); n += 32) count = append(n, count);
    __syncwarp();  // the list is complete
    if (lane() == 0) work_tile_.iter_end = work_tile_.iter_begin + count;
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t first_word() const { return work_tile_.q_tiles.begin / 32; }
  __device__ __forceinline__ int32_t words() const {
    return max((work_tile_.q_tiles.end + 31) / 32 - first_word(), 0);
  }

  // The tiles of a word that lie in the interval.
  static __device__ __forceinline__ uint32_t tiles_in(const volatile Interval& tiles,
                                                      int32_t word) {
    return bits_in({tiles.begin, tiles.end}, word * 32);
  }

  // Words of Q tiles, of all heads of the GQA group.
  __device__ __forceinline__ int32_t all_words() const {
    return words() * params_.common.q_heads_per_kv_head;
  }

  // Lists the visible Q tiles of 32 words from `first` on, behind `count` others. Each lane reads a
  // word; then each lists a tile of every word. Returns the number of entries.
  __device__ __forceinline__ uint32_t append(int32_t first, uint32_t count) const {
    QTileBits bits{};
    int32_t q_coord = 0;  // of the word's first tile
    if (first + lane() < all_words()) {
      const int32_t head = (first + lane()) / words(),
                    word = first_word() + first + lane() - head * words();
      bits = bits_of(head, word);
      q_coord = head * kMaxListedTiles + word * 32;
      const uint32_t any = (bits.any[0] | bits.any[1]) & tiles_in(work_tile_.q_tiles, word);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bits.any[half] &= any;
        if constexpr (Config::kSplitsDs)  // by position, too
          bits.any[half] &= tiles_in(work_tile_.q_spans[half].any, word);
      }
      // A tile that sees keys of neither half by position stays: its dQ awaits this KV tile.
      if constexpr (Config::kSplitsDs) bits.any[0] |= any & ~bits.any[1];
    }
    uint32_t left = __ballot_sync(~0u, (bits.any[0] | bits.any[1]) != 0);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const QTileBits of_word = {
          {__shfl_sync(~0u, bits.any[0], from), __shfl_sync(~0u, bits.any[1], from)},
          {__shfl_sync(~0u, bits.all[0], from), __shfl_sync(~0u, bits.all[1], from)}};
      const int32_t own = __shfl_sync(~0u, q_coord, from) + lane();
      const uint32_t any = of_word.any[0] | of_word.any[1];
      if (any >> lane() & 1) {
        uint32_t* const to = work_tile_.q_tile_list + count + __popc(any & ((1u << lane()) - 1));
        *to = QTileEntry::of(own, of_word, lane()).word;
        if (params_.common.ordered)
          to[params_.q_tile_list_size] = turn_of(own / kMaxListedTiles, own % kMaxListedTiles);
      }
      count += __popc(any);
    }
    return count;
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
