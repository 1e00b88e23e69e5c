// Dropout on accumulator fragments of mma.sync and WGMMA.
#pragma once

#include "core/philox.h"
#include "cuda/params.h"
#include "cuda/device/score_stage.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// The Philox counter for a lane's eight elements of P in the 16 x 16 tile at (i, j), multiples of
// 16.
__device__ __forceinline__ PhiloxWords dropout_counter(const DropoutStream& stream, int32_t i,
                                                       int32_t j, int32_t lane) {
  return {{static_cast<uint32_t>(j) >> 4 << 5 | static_cast<uint32_t>(lane),
           static_cast<uint32_t>(i) >> 4, stream.head, stream.offset}};
}

// Turns counters into 16-bit random numbers: word (column half) * 2 + (row half) holds the even
// column's in its low half. Several tiles at a time, as each round of one depends on the round
// before.
template <int kCount>
__device__ __forceinline__ void draw(PhiloxWords (&words)[kCount], const DropoutStream& stream) {
  uint32_t key0 = stream.key0, key1 = stream.key1;
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma unroll
    for (PhiloxWords& each : words) each = philox_round(each, key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

// Whether an element of P is kept. odd: the element of the word's odd column. The number in the
// high half of a word reaches the threshold if the word is above `limit`, whatever its low half is:
// no shift. For threshold 65536, which no number reaches, the limit is 2^32 - 1.
__device__ __forceinline__ bool is_kept(uint32_t word, bool odd, uint32_t threshold) {
  const uint32_t limit = threshold * 65536u - 1;
  return (odd ? word : word << 16) > limit;
}

// The signs of a packed pair, bits 15 and 31, say whether its elements of P are dropped; other bits
// may be anything. For thresholds below 65536.
__device__ __forceinline__ uint32_t dropout_signs(uint32_t word, uint32_t threshold) {
  const uint32_t least = threshold * 0x10001u;
  // Whether the low 15 bits reach those of the threshold; no half borrows from the other.
  const uint32_t reaches = (word | 0x80008000u) - (least & 0x7fff7fffu);
  return (~word & least) | (~(word ^ least) & ~reaches);
}

// The signs of kPairs packed pairs, set in ascending order. kDense: two pairs share a word.
template <int kPairs, bool kDense>
class DropoutSigns {
 public:
  __device__ __forceinline__ void set(int i, uint32_t signs) {
    uint32_t& word = words_[kDense ? i / 2 : i];
    word = kDense && i % 2 == 1 ? (word & 0x80008000u) | (signs >> 1 & ~0x80008000u) : signs;
  }
  __device__ __forceinline__ uint32_t operator[](int i) const {
    return kDense ? words_[i / 2] << i % 2 : words_[i];
  }

 private:
  uint32_t words_[kDense ? kPairs / 2 : kPairs];
};

// Calls visit(m, n, half, word) for the random words of all elements of P: the word of the pair
// [m][n][2 half] and [m][n][2 half + 1], where m counts MMAs of 16 rows. i and j: the first row's
// and column's index, multiples of 16. kTransposed: rows are keys and columns queries; otherwise
// the other way round. kAtOnce: 16 x 16 tiles drawn at once.
template <int kMmaM, int kMmaN, bool kTransposed, int kAtOnce = 2, class Visit>
__device__ __forceinline__ void visit_words(const DropoutStream& stream, int32_t i, int32_t j,
                                            int32_t lane, Visit visit) {
  constexpr int kTiles = kMmaM * kMmaN / 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += kAtOnce) {
    PhiloxWords words[kAtOnce];
#pragma unroll
    for (int own = 0; own < kAtOnce; ++own) {
      const int row = (tile + own) % kMmaM * 16, column = (tile + own) / kMmaM * 16;
      words[own] = kTransposed ? dropout_counter(stream, j + column, i + row, lane)
                               : dropout_counter(stream, i + row, j + column, lane);
    }
    draw(words, stream);
#pragma unroll
    for (int x = 0; x < 4 * kAtOnce; ++x) {
      const int own = x / 4, n = (tile + own) / kMmaM * 2 + x % 4 / 2, half = x % 2;
      if (tile + own >= kTiles) continue;
      const uint32_t word = words[own].word[kTransposed ? half * 2 + n % 2 : n % 2 * 2 + half];
      visit((tile + own) % kMmaM, n, half, kTransposed ? ptx::movmatrix_trans(word) : word);
    }
  }
}

// Dropout of P, as a member of a score modification: of one head of one sequence. threshold: see
// Problem::dropout_threshold().
struct Dropout {
  static constexpr ScoreStage kStage = ScoreStage::kWeight;
  static constexpr bool kBoundsGrowth = true, kReadsMemory = false;

  DropoutStream stream;

  static __device__ __forceinline__ Dropout of(const Problem& problem, const Inputs& in, int32_t b,
                                               int32_t h) {
    const uint64_t* device = in.rng_device;
    return {DropoutStream::make(in.rng_seed + (device ? device[0] : 0),
                                in.rng_offset + (device ? device[1] : 0),
                                static_cast<uint32_t>(b * problem.heads_q + h))};
  }

  // Scale of the elements that are kept.
  static __device__ __forceinline__ float keep_scale(uint32_t threshold) {
    return dropout_keep_scale(threshold);
  }

  // Draws the signs of 16 rows from i on and of columns from j on: those of pair 2 n + half.
  template <int kMmaN, bool kTransposed, int kPairs, bool kDense>
  __device__ __forceinline__ void draw_signs(DropoutSigns<kPairs, kDense>& signs,
                                             uint32_t threshold, int32_t i, int32_t j,
                                             int32_t lane) const {
    visit_words<1, kMmaN, kTransposed, 4>(stream, i, j, lane,
                                          [&](int, int n, int half, uint32_t word) {
                                            signs.set(2 * n + half, dropout_signs(word, threshold));
                                          });
  }

  // As visit_words, visit(m, n, x) for each element [m][n][x] of P that is dropped.
  template <int kMmaM, int kMmaN, bool kTransposed, class Visit>
  __device__ __forceinline__ void visit_dropped(uint32_t threshold, int32_t i, int32_t j,
                                                int32_t lane, Visit visit) const {
    visit_words<kMmaM, kMmaN, kTransposed>(stream, i, j, lane,
                                           [&](int m, int n, int half, uint32_t word) {
#pragma unroll
                                             for (int e = 0; e < 2; ++e) {
                                               if (!is_kept(word, e, threshold))
                                                 visit(m, n, 2 * half + e);
                                             }
                                           });
  }
};

}  // namespace flashattn::cuda
