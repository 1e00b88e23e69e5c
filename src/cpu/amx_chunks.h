// The forward pass on tile registers where scores count as they are: 32 rows against chunks of
// keys. Weights are computed between the products, so that neither waits: those of one half of a
// chunk while the scores of the next half and O of the chunk before are multiplied. (While tile
// registers are at work, and some hundred cycles longer, an Intel core has one of its two fp32
// units for vectors: what is not between products takes longer, too.)
#pragma once

#include "cpu/weights.h"

namespace flashattn::cpu::FLASHATTN_ISA {

constexpr int32_t kChunkRows = 32;
constexpr int32_t kChunkKeys = 128;
constexpr int32_t kChunkStep = 32;  // the last chunk may have fewer keys, a multiple of this

// Whether a problem's rows go this way. By the problem alone: so are the chunks of all its rows.
FLASHATTN_INLINE bool works_in_chunks(const Problem& problem) {
  return kHasAmx && problem.dtype == FLASHATTN_DTYPE_BF16 && problem.dim_qk % 32 == 0 &&
         problem.dim_v % 32 == 0 && problem.softcap == 0 && problem.bias == 0 &&
         problem.dropout == 0 && problem.scale >= 0;
}

struct ChunkOperands {
  const uint32_t* q;  // units, as all that follows
  int32_t qk_units;   // of a row of q
  const uint32_t* k;  // packed, from the first chunk on
  int64_t k_panel;
  const uint32_t* v;
  int64_t v_panel;
  float* o;
  int32_t v_columns;
  float* scores;  // room for those of a chunk
  uint32_t* p;    // and for the weights of two
};

#if defined(__AMX_BF16__)
// A half of a chunk: 32 rows of scores. These two are not inlined: nothing of theirs is to take
// registers from the products.
constexpr int32_t kChunkHalf = kChunkKeys / 2;

// Hides those of a chunk's scores that its rows do not see; count: of its keys.
__attribute__((noinline)) inline void hide_chunk(const Interval* seen, int32_t count,
                                                 float* scores) {
  for (int32_t first = 0; first < count; first += kChunkHalf) {
    const Interval all{0, count - first < kChunkHalf ? count - first : kChunkHalf};
    for (int32_t r = 0; r < kChunkRows; ++r, scores += kChunkHalf) {
      hide(scores, intersect({seen[r].begin - first, seen[r].end - first}, all), all);
    }
  }
}

// The references m of rows that have one; of others, the highest of a chunk's scores, times scale.
__attribute__((noinline)) inline void find_references(const float* m, int32_t count, float scale,
                                                      const float* scores, float* found) {
  for (int32_t r = 0; r < kChunkRows; r += kWidth) {
    Floats each[kWidth];
    for (int32_t n = 0; n < kWidth; n += 2) {
      const float* s = scores + (r + n) * kChunkHalf;
      highest_of<2>(s, kChunkHalf, {0, count < kChunkHalf ? count : kChunkHalf}, each + n);
      if (count <= kChunkHalf) continue;
      Floats more[2];
      highest_of<2>(s + kChunkRows * kChunkHalf, kChunkHalf, {0, count - kChunkHalf}, more);
      for (int i = 0; i < 2; ++i) each[n + i] = max_of_both(each[n + i], more[i]);
    }
    const Floats before = load(m + r);
    store(found + r, select(before == -kInfinity, max_each(each) * splat(scale), before));
  }
}

// keys: of all chunks. scale: of the scores, to units of log2(e). m, -inf of a row without any
// weights so far, and l and rest, the sums of its weights (see add_up): of each row.
// seen_in(chunk): the columns that each row sees, or NULL: all. Stops before the first chunk in
// which a row would need another m than it has, and returns how many are done. Calls ahead() in
// every chunk.
template <class SeenIn, class AheadOf>
int32_t weigh_chunks(const ChunkOperands& x, int32_t keys, float scale, float* m, float* l,
                     float* rest, SeenIn seen_in, AheadOf ahead) {
  // Tiles are loaded and stored behind the compiler's back.
  __asm__ volatile("" : : : "memory");
  constexpr int32_t kHalf = kChunkHalf, kPRow = kChunkKeys / 2;
  static_assert(kWidth == kTile && kChunkRows == 2 * kTile && kHalf == 4 * kTile);
  // Keys and values of a chunk come from the L2 cache, once for 32 rows; what else a chunk needs
  // fills the L1 cache. (1.1 to 1.2 times as fast, on 16 threads up to 1.4.)
  using Block = TileBlock<true, true, true>;
  configure_tiles(kTile, kTile, kTile);
  const auto chunks = static_cast<int32_t>(ceil_div(keys, kChunkKeys));
  const auto halves = static_cast<int32_t>(ceil_div(keys, kHalf));
  const int32_t columns = x.v_columns / (2 * kTile);
  const auto keys_of = [=](int32_t half) {
    const int32_t left = keys - half * kHalf;
    return left < kHalf ? left : kHalf;
  };
  const float factor[2] = {scale, scale};
  Block before{nullptr, 0};
  const auto scores_of = [&](int32_t half) { return x.scores + half % 2 * kChunkRows * kHalf; };
  const auto weights_of = [&](int32_t chunk) { return x.p + chunk % 2 * kChunkRows * kPRow; };
  const auto multiply_scores = [&](int32_t half, auto between) FLASHATTN_INLINED {
    for (int32_t c = 0; c < keys_of(half); c += 2 * kTile) {
      const Block block{scores_of(half) + c, kHalf};
      block.multiply(x.q, x.qk_units, x.k + (half * kHalf + c) / kTile * x.k_panel, x.k_panel,
                     x.qk_units, kTile, false, before, between);
      before = block;
    }
  };
  const auto multiply_values = [&](int32_t chunk, int32_t units, Interval some,
                                   auto between) FLASHATTN_INLINED {
    for (int32_t c = some.begin; c < some.end; ++c) {
      const Block block{x.o + c * 2 * kTile, x.v_columns};
      block.multiply(weights_of(chunk), kPRow,
                     x.v + c * 2 * x.v_panel + int64_t{chunk} * kPRow * kTile, x.v_panel, units,
                     kTile, true, before, between);
      before = block;
    }
  };

  multiply_scores(0, [] {});
  int32_t done = 0;
  for (bool fits = true; done < chunks; ++done) {
    const Interval* seen = seen_in(done);
    const int32_t begin = 2 * done, end = begin + 2 < halves ? begin + 2 : halves;
    Ints starts{};  // rows without any weights so far
    for (int32_t r = 0; r < kChunkRows; r += kWidth) starts |= load(m + r) == -kInfinity;
    // Of these, and where rows do not see all, every score is computed before any weight is.
    const bool at_once = any(starts) || seen;
    float found[kChunkRows], shift[kChunkRows];
    const float* references = m;
    if (at_once) {
      const int32_t left = keys - done * kChunkKeys, count = left < kChunkKeys ? left : kChunkKeys;
      if (begin + 1 < end) multiply_scores(begin + 1, [] {});
      before.store();
      before.c = nullptr;
      __asm__ volatile("" : : : "memory");
      if (seen) hide_chunk(seen, count, x.scores);
      find_references(m, count, scale, x.scores, found);
      references = found;
    }
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      const Floats reference = load(references + r);
      store(shift + r, select(reference == -kInfinity, Floats{}, reference));
    }
    Floats sums[kChunkRows] = {};
    for (int32_t half = begin; half < end; ++half) {
      const bool more = half + 1 < halves;
      // O's columns, in twos of tiles, that are multiplied meanwhile.
      const Interval some = done == 0       ? Interval{0, 0}
                            : half % 2 == 1 ? Interval{columns / 2, columns}
                            : more          ? Interval{0, columns / 2}
                                            : Interval{0, columns};
      const bool next = more && !(at_once && half + 1 < end);
      const int32_t coming = next ? keys_of(half + 1) / (2 * kTile) : 0;
      const auto products = static_cast<uint32_t>(
          4 * ((some.end - some.begin) * (kPRow / kTile) + coming * (x.qk_units / kTile)));
      // Two rows by 32 keys at a time; of the first 32 keys first, for the others may wait in
      // `before`.
      constexpr uint32_t kRows = kChunkRows;
      const auto all = static_cast<uint32_t>(keys_of(half));  // rows by 32 keys, as those below
      uint32_t weighed = 0, owed = 0;
      float* scores = scores_of(half);
      uint32_t* p = weights_of(done) + half % 2 * kHalf / 2;
      const auto weigh = [&]() FLASHATTN_INLINED {
        const uint32_t row = weighed % kRows;
        write_weights<Compute::kBf16Pairs, 2>(scores, kHalf, p, kPRow, nullptr, {0, 2 * kTile},
                                              factor, shift + row, sums + row);
        scores += 2 * kHalf;
        p += 2 * kPRow;
        weighed += 2;
        if (weighed != kRows) return;
        scores += 2 * kTile - kChunkRows * kHalf;
        p += kTile - kChunkRows * kPRow;
      };
      const auto between = [&]() FLASHATTN_INLINED {
        __asm__ volatile("" : : : "memory");
        for (owed += all / 2; owed >= products && weighed < all; owed -= products) weigh();
        __asm__ volatile("" : : : "memory");
      };
      if (products == 0 || all == kRows) {
        before.store();
        before.c = nullptr;
      }
      multiply_values(done - 1, kPRow, some, between);
      if (next) multiply_scores(half + 1, between);
      __asm__ volatile("" : : : "memory");
      while (weighed < all) weigh();
      __asm__ volatile("" : : : "memory");
    }
    ahead();
    float rows[kChunkRows];
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      Floats each[kWidth];
      for (int n = 0; n < kWidth; ++n) each[n] = sums[r + n];
      const Floats sum = sum_each(each);
      fits &= !any(~(sum <= kLargestSum));
      store(rows + r, sum);
    }
    if (!fits) break;
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      Floats sum = load(l + r), left = load(rest + r);
      add_up(sum, left, load(rows + r));
      store(l + r, sum);
      store(rest + r, left);
      store(m + r, load(references + r));
    }
  }
  if (done == chunks) {
    multiply_values(done - 1, (keys - (done - 1) * kChunkKeys) / 2, {0, columns}, [] {});
  }
  before.store();
  __asm__ volatile("" : : : "memory");
  return done;
}
#else
template <class SeenIn, class AheadOf>
int32_t weigh_chunks(const ChunkOperands&, int32_t, float, float*, float*, float*, SeenIn,
                     AheadOf) {
  return 0;
}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
