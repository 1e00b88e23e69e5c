// Before the Hopper backward kernels: the tiles that a block mask does not hide, in bits.
#include "cuda/kernels/sm90/bwd_block_mask.h"

#include "cuda/device/block_mask.cuh"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kWarps = 16;
constexpr int kRowsAhead = 8;  // rows of blocks whose loads are in flight at once

// A CTA has 32 Q tiles of a head. Each warp takes 32 KV tiles at a time, one per lane: neighbouring
// lanes read neighbouring bytes of the mask.
class BwdBlockMask {
 public:
  __device__ __forceinline__ BwdBlockMask(const BackwardParams& params, int32_t b, int32_t h,
                                          int32_t q_word)
      : params_(params),
        common_(params.common),
        problem_(params.common.problem),
        q_word_(q_word),
        sequence_(seqlen_info(problem_, common_.args.shape, common_.args.inputs, b)),
        blocks_(BlockMask::of(problem_, common_.args.inputs, b, h)),
        queries_{q_word * 32 * common_.tile_q,
                 min((q_word + 1) * 32 * common_.tile_q, sequence_.len.q)},
        first_tile_(
            static_cast<int64_t>(h) * params.head_q_tiles +
            first_q_tile(problem_, sequence_.offset_q, b, common_.tile_q, params.max_q_tiles)),
        to_(params.block_mask.q_tiles +
            (static_cast<int64_t>(h) * params.block_mask.head_q_words +
             first_q_tile(problem_, sequence_.offset_q, b, 32 * common_.tile_q,
                          params.block_mask.max_q_words) +
             q_word) *
                params.block_mask.max_kv_tiles) {}

  // counts: for each warp and each Q tile, in shared memory.
  __device__ __forceinline__ void run(int32_t (&counts)[kWarps][32]) const {
    if (queries_.begin >= queries_.end) return;
    // Lane n also stands for Q tile n: KV tiles that it sees by position, and how many precede.
    const int32_t q_tile = q_word_ * 32 + lane(), query = q_tile * common_.tile_q;
    const bool valid = query < queries_.end;
    Interval seen{0, 0};
    if (valid) {
      seen = key_tiles(problem_.mask_rule(), {query, min(query + common_.tile_q, queries_.end)},
                       sequence_.len, common_.tile_kv);
    }
    const auto kv_words = static_cast<int32_t>(ceil_div(sequence_.len.kv, 32 * common_.tile_kv));
    int32_t before = 0;
#pragma unroll 1
    for (int32_t first = 0; first < kv_words; first += kWarps) {
      const int32_t kv_word = first + warp();
      const uint32_t by_position = bits_in(seen, kv_word * 32);
      uint32_t any = 0;
      if (__any_sync(~0u, by_position != 0)) any = by_position & find(kv_word);
      counts[warp()][lane()] = __popc(any);
      __syncthreads();
      int32_t own = before, all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int32_t count = counts[w][lane()];
        if (w < warp()) own += count;
        all += count;
      }
      if (valid && kv_word < kv_words) store_ordered(q_tile, kv_word, any, own);
      before += all;
      __syncthreads();  // all have read the counts
    }
    if (valid) store_states(q_tile, kDqPendingTile * before);
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }

  // Finds and stores the bits of this lane's KV tile. Returns those of Q tile `lane`: a bit for the
  // KV tile of each lane.
  __device__ __forceinline__ uint32_t find(int32_t kv_word) const {
    const int32_t kv_tile = kv_word * 32 + lane();
    QTileBits bits{};
    const uint32_t own = holds_halves() ? find_in_blocks(kv_tile, &bits) : find_any(kv_tile, &bits);
    if (has_keys(kv_tile, 0)) to_[kv_tile] = bits;
    return own;
  }

  // Whether the half of a KV tile has keys.
  __device__ __forceinline__ bool has_keys(int32_t kv_tile, int half) const {
    return (2 * static_cast<int64_t>(kv_tile) + half) * (common_.tile_kv / 2) < sequence_.len.kv;
  }
  // The keys of a half that has some.
  __device__ __forceinline__ Interval keys_of(int32_t kv_tile, int half) const {
    const int32_t keys = common_.tile_kv / 2, first = (2 * kv_tile + half) * keys;
    return {first, min(keys, sequence_.len.kv - first) + first};
  }

  // Whether each Q tile and each half of a KV tile lies in one block.
  __device__ __forceinline__ bool holds_halves() const {
    return problem_.block_q % common_.tile_q == 0 && problem_.block_kv % (common_.tile_kv / 2) == 0;
  }

  // find() where holds_halves(): a byte of the mask for all Q tiles of a block and each half.
  __device__ __forceinline__ uint32_t find_in_blocks(int32_t kv_tile, QTileBits* bits) const {
    const int32_t tiles = problem_.block_q / common_.tile_q;  // of a block
    const int32_t y_begin = queries_.begin / problem_.block_q,
                  y_end = (queries_.end - 1) / problem_.block_q + 1;
    bool valid[2];
    int32_t columns[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      valid[n] = has_keys(kv_tile, n);
      columns[n] = valid[n] ? keys_of(kv_tile, n).begin / problem_.block_kv : 0;
    }
    uint32_t own = 0;
#pragma unroll 1
    for (int32_t first = y_begin; first < y_end; first += kRowsAhead) {
      // __syncwarp() keeps all loads before the first use: their latencies overlap.
      uint32_t shown[2][kRowsAhead];
#pragma unroll
      for (int32_t i = 0; i < kRowsAhead; ++i) {
        const uint8_t* const row = blocks_.on + min(first + i, y_end - 1) * blocks_.row;
        shown[0][i] = row[columns[0]];
        shown[1][i] = row[columns[1]];
      }
      __syncwarp();
#pragma unroll
      for (int32_t i = 0; i < kRowsAhead; ++i) {
        const int32_t y = first + i;
        const uint32_t of_block =
            y < y_end ? bits_in({y * tiles, (y + 1) * tiles}, q_word_ * 32) : 0;
        bool any = false;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t byte = valid[n] ? shown[n][i] : 0;  // as in BlockMask::kind()
          any |= byte != 0;
          bits->any[n] |= byte != 0 ? of_block : 0;
          bits->all[n] |= byte > blocks_.has_lens ? of_block : 0;
        }
        const uint32_t ballot = __ballot_sync(~0u, any);
        if (of_block >> lane() & 1) own = ballot;
      }
    }
    return own;
  }

  // find() for any blocks.
  __device__ __forceinline__ uint32_t find_any(int32_t kv_tile, QTileBits* bits) const {
    const int32_t tile_q = common_.tile_q;
    uint32_t own = 0;
#pragma unroll 1
    for (int32_t tile = 0; queries_.begin + tile * tile_q < queries_.end; ++tile) {
      const int32_t query = queries_.begin + tile * tile_q;
      bool any = false;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (!has_keys(kv_tile, n)) continue;
        const TileKind kind =
            blocks_.kind({query, min(query + tile_q, queries_.end)}, keys_of(kv_tile, n));
        any |= kind != TileKind::kEmpty;
        bits->any[n] |= static_cast<uint32_t>(kind != TileKind::kEmpty) << tile;
        bits->all[n] |= static_cast<uint32_t>(kind == TileKind::kFull) << tile;
      }
      const uint32_t ballot = __ballot_sync(~0u, any);
      if (tile == lane()) own = ballot;
    }
    return own;
  }

  // If additions to dQ are ordered: stores the bits of 32 KV tiles for a Q tile.
  __device__ __forceinline__ void store_ordered(int32_t q_tile, int32_t kv_word, uint32_t any,
                                                int32_t before) const {
    const BlockMaskBits& to = params_.block_mask;
    if (!to.kv_tiles) return;
    to.kv_tiles[(first_tile_ + q_tile) * to.kv_words() + kv_word] = {any, before};
  }

  // Stores the state of the Q tile's dQ, for all that share these bits.
  __device__ __forceinline__ void store_states(int32_t q_tile, int32_t state) const {
    const BlockMaskBits& of = params_.block_mask;
    const int32_t heads = of.shares_heads ? problem_.heads_q : 1;
    const int32_t sharers = (of.shares_batch ? common_.args.shape.batch : 1) * heads;
#pragma unroll 1
    for (int32_t n = warp(); n < sharers; n += kWarps) {
      const int32_t b = n / heads, h = n - b * heads;  // beyond the first
      const int64_t tile = first_tile_ + static_cast<int64_t>(h) * params_.head_q_tiles +
                           static_cast<int64_t>(b) * params_.max_q_tiles + q_tile;
#pragma unroll 1
      for (int32_t cta = 0; cta < common_.dq_ctas; ++cta)
        common_.dq_states[tile * common_.dq_ctas + cta] = state;
    }
  }

  const BackwardParams& params_;
  const cuda::BackwardParams& common_;
  const Problem& problem_;
  const int32_t q_word_;
  const SeqlenInfo sequence_;
  const BlockMask blocks_;
  const Interval queries_;    // those of the Q word
  const int64_t first_tile_;  // the sequence's first Q tile, in the workspace
  QTileBits* const to_;       // the Q word's
};

__global__ void __launch_bounds__(32 * kWarps, 2)
    bwd_block_mask(const __grid_constant__ BackwardParams params) {
  __shared__ int32_t counts[kWarps][32];
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  const BlockMaskBits& mask = params.block_mask;
  const int32_t head_idx = blockIdx.x / mask.max_q_words;
  const int32_t heads = mask.shares_heads ? 1 : params.common.problem.heads_q;
  BwdBlockMask(params, head_idx / heads, head_idx % heads, blockIdx.x - head_idx * mask.max_q_words)
      .run(counts);
}

}  // namespace

BwdBlockMaskKernel bwd_block_mask_kernel() { return {32 * kWarps, &bwd_block_mask}; }

}  // namespace flashattn::cuda::sm90
