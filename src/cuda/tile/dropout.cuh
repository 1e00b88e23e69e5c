// Dropout on sums as mma.sync and WGMMA lay them out.
#pragma once

#include "core/philox.h"
#include "cuda/params.h"

namespace flashattn::cuda {

__device__ __forceinline__ DropoutStream dropout_stream(const Problem& problem,
                                                        const flashattn_inputs& in, int32_t b,
                                                        int32_t h) {
  const uint64_t* device = in.rng_device;
  return DropoutStream::make(in.rng_seed + (device ? device[0] : 0),
                             in.rng_offset + (device ? device[1] : 0),
                             static_cast<uint32_t>(b * problem.heads_q + h));
}

// The numbers of a lane's eight weights of each of two 16 x 16 tiles, of which the second stands
// kRows rows further and kColumns columns: word (column half) * 2 + (row half), the even column's
// in its low half. i and j are multiples of 16. Two at a time, for one waits for itself.
template <int kRows, int kColumns>
__device__ __forceinline__ void dropout_numbers(PhiloxWords (&words)[2],
                                                const DropoutStream& stream, int32_t i, int32_t j,
                                                int32_t lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    words[n] = {{(static_cast<uint32_t>(j) >> 4 << 5 | static_cast<uint32_t>(lane)) +
                     n * (kColumns / 16 << 5),
                 (static_cast<uint32_t>(i) >> 4) + n * (kRows / 16), stream.head, stream.offset}};
  }
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

// Clears the weights of strips of 16 rows that the dropout drops. i and j: the first row's and
// column's index, multiples of 16.
template <int kStrips, int kGroups>
__device__ __forceinline__ void drop_weights(float (&p)[kStrips][kGroups][4],
                                             const DropoutStream& stream, uint32_t threshold,
                                             int32_t i, int32_t j, int32_t lane) {
  static_assert(kStrips <= 2, "pairs of tiles");
  constexpr bool kDown = kStrips == 2;
#pragma unroll
  for (int n = 0; n < kGroups; n += kDown ? 2 : 4) {
    PhiloxWords words[2];
    dropout_numbers<kDown ? 16 : 0, kDown ? 0 : 16>(words, stream, i, j + n * 8, lane);
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const int own = x / 8, group = n + (kDown ? 0 : own * 2) + x % 8 / 4;
      if (group >= kGroups) continue;
      float& weight = p[kDown ? own : 0][group][x % 4];
      if (!is_kept(words[own].word[x % 8 / 2], x % 2, threshold)) weight = 0.0f;
    }
  }
}

}  // namespace flashattn::cuda
