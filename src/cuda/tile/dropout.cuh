// Dropout on sums as mma.sync and WGMMA lay them out.
#pragma once

#include "core/philox.h"
#include "cuda/params.h"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

__device__ __forceinline__ DropoutStream dropout_stream(const Problem& problem,
                                                        const flashattn_inputs& in, int32_t b,
                                                        int32_t h) {
  const uint64_t* device = in.rng_device;
  return DropoutStream::make(in.rng_seed + (device ? device[0] : 0),
                             in.rng_offset + (device ? device[1] : 0),
                             static_cast<uint32_t>(b * problem.heads_q + h));
}

// The counter of a lane's eight weights of the 16 x 16 tile at (i, j), multiples of 16.
__device__ __forceinline__ PhiloxWords dropout_counter(const DropoutStream& stream, int32_t i,
                                                       int32_t j, int32_t lane) {
  return {{static_cast<uint32_t>(j) >> 4 << 5 | static_cast<uint32_t>(lane),
           static_cast<uint32_t>(i) >> 4, stream.head, stream.offset}};
}

// Counters to numbers: word (column half) * 2 + (row half), the even column's in its low half. Two
// tiles at a time, for one waits for itself.
__device__ __forceinline__ void draw(PhiloxWords (&words)[2], const DropoutStream& stream) {
  uint32_t key0 = stream.key0, key1 = stream.key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    words[0] = philox_round(words[0], key0, key1);
    words[1] = philox_round(words[1], key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

// Whether a word's weight is kept, odd: that of the odd column. The number in the high half of a
// word reaches the threshold if the word is above `limit`, whatever its low half is: no shift. Of
// threshold 65536, which none reaches, the limit is 2^32 - 1.
__device__ __forceinline__ bool is_kept(uint32_t word, bool odd, uint32_t threshold) {
  const uint32_t limit = threshold * 65536u - 1;
  return (odd ? word : word << 16) > limit;
}

// Calls visit(strip, n, x) for each weight of strips of 16 rows that the dropout drops, number
// [strip][n][x]. i and j: the first row's and column's index, multiples of 16. kTurned: rows are
// keys and columns queries; otherwise the other way round.
template <int kStrips, int kGroups, bool kTurned, class Visit>
__device__ __forceinline__ void visit_dropped(const DropoutStream& stream, uint32_t threshold,
                                              int32_t i, int32_t j, int32_t lane, Visit visit) {
  constexpr int kTiles = kStrips * kGroups / 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 2) {
    PhiloxWords words[2];
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int row = (tile + own) % kStrips * 16, column = (tile + own) / kStrips * 16;
      words[own] = kTurned ? dropout_counter(stream, j + column, i + row, lane)
                           : dropout_counter(stream, i + row, j + column, lane);
    }
    draw(words, stream);
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const int own = x / 8, n = (tile + own) / kStrips * 2 + x % 8 / 4, half = x % 4 / 2;
      if (tile + own >= kTiles) continue;
      uint32_t word = words[own].word[kTurned ? half * 2 + n % 2 : n % 2 * 2 + half];
      if (kTurned) word = ptx::transpose(word);
      if (!is_kept(word, x % 2, threshold)) visit((tile + own) % kStrips, n, x % 4);
    }
  }
}

}  // namespace flashattn::cuda
