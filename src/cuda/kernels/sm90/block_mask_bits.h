// The tiles of the Hopper backward kernels that a block mask shows, a bit each.
#pragma once

#include "core/seqlen_info.h"

namespace flashattn::cuda::sm90 {

// The bits of a word whose numbers, from `first` on, lie in the interval.
FLASHATTN_HD constexpr uint32_t bits_in(Interval numbers, int32_t first) {
  const int32_t begin = numbers.begin > first ? numbers.begin - first : 0;
  const int32_t end = numbers.end - first < 32 ? numbers.end - first : 32;
  return begin < end ? ~0u >> (32 - (end - begin)) << begin : 0;
}

// HeadTiles::first() of queries, without a division in 64 bits. max_tiles: of the longest sequence.
FLASHATTN_HD int32_t first_q_tile(const Problem& problem, int64_t offset_q, int32_t b, int32_t rows,
                                  int32_t max_tiles) {
  return problem.layout & FLASHATTN_LAYOUT_VARLEN_Q ? static_cast<int32_t>(offset_q) / rows + b
                                                    : b * max_tiles;
}

// Block mask: 32 Q tiles, a bit each, beside the halves of a KV tile. any: the mask shows some key
// of the half to some query. all: it shows all of them to all.
struct alignas(16) QTileBits {
  uint32_t any[2], all[2];
};
// 32 KV tiles, a bit each: whether some query of a Q tile sees some of their keys. before: how many
// such tiles precede these.
struct alignas(8) KvTileBits {
  uint32_t any;
  int32_t before;
};

// The tiles that a block mask shows, which bwd_block_mask.cu finds for the backward kernel. Queries
// are divided into Q words: 32 Q tiles each, from the start of a sequence on.
struct BlockMaskBits {
  QTileBits* q_tiles;    // (head, Q word, KV tile); NULL: there is no block mask
  KvTileBits* kv_tiles;  // (head, Q tile, 32 KV tiles); NULL unless additions to dQ are ordered
  int32_t max_q_words, max_kv_tiles;  // of the longest sequence
  int32_t head_q_words;               // from one head to the next
  // Whether all sequences, or all heads, have the bits of the first.
  int32_t shares_batch, shares_heads;

  FLASHATTN_HD int32_t kv_words() const { return (max_kv_tiles + 31) / 32; }
};

}  // namespace flashattn::cuda::sm90
