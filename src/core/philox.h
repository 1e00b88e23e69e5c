// The random numbers of the dropout: Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random
// numbers: as easy as 1, 2, 3, SC 2011), with the layout that flashattn_dropout_mask documents.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn {

struct PhiloxWords {
  uint32_t word[4];
};

// Increments of the two key words from round to round.
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

// The fewest rounds that pass BigCrush.
constexpr int kPhiloxRounds = 7;

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;

FLASHATTN_HD constexpr PhiloxWords philox_round(PhiloxWords c, uint32_t key0, uint32_t key1) {
  const uint64_t p0 = static_cast<uint64_t>(kPhiloxFactor0) * c.word[0];
  const uint64_t p1 = static_cast<uint64_t>(kPhiloxFactor1) * c.word[2];
  return {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p0)}};
}

FLASHATTN_HD constexpr PhiloxWords philox4x32_7(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    counter = philox_round(counter, key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// The stream of one (sequence, query head).
struct DropoutStream {
  uint32_t key0, key1;
  uint32_t head;    // b * heads_q + h
  uint32_t offset;  // low word

  FLASHATTN_HD static constexpr DropoutStream make(uint64_t seed, uint64_t offset, uint32_t head) {
    return {static_cast<uint32_t>(seed),
            static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32), head,
            static_cast<uint32_t>(offset)};
  }

  // The counter whose four words serve weight (i, j) and seven others of its 16 x 16 tile: rows i &
  // ~8 and i | 8; columns j & ~9 plus 0, 1, 8, 9.
  FLASHATTN_HD constexpr PhiloxWords call(uint32_t i, uint32_t j) const {
    return philox4x32_7({{(j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, head, offset}}, key0,
                        key1);
  }

  // The 16-bit number of weight (i, j).
  FLASHATTN_HD constexpr uint32_t number(uint32_t i, uint32_t j) const {
    const uint32_t word = call(i, j).word[((j >> 3) & 1) * 2 + ((i >> 3) & 1)];
    return (j & 1) ? word >> 16 : word & 0xffffu;
  }
};

// Factor of the weights that dropout keeps. threshold: see Problem::dropout_threshold().
FLASHATTN_HD float dropout_keep_scale(uint32_t threshold) {
  return 65536.0f / (65536.0f - static_cast<float>(threshold));
}

}  // namespace flashattn
