// The forward pass on tile registers where scores count as they are: 32 rows against chunks of
// keys. Weights are computed between the products, so that neither waits:
// those of one half of a chunk while the scores of the next half and O of the chunk before are
// multiplied. (While tile registers are at work, and some hundred cycles longer, an Intel core has
// one of its two fp32 units for vectors: what is not between products takes longer, too.)
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
// Of two rows' scores from a column on, of a step, hides those that a row does not see. Not
// inlined: it is called from many places, seldom.
__attribute__((noinline)) inline void hide_step(const Interval* seen, int32_t column, float* scores,
                                                int32_t scores_row) {
  constexpr Interval kAll{0, kChunkStep};
  for (int n = 0; n < 2; ++n) {
    const Interval shown{seen[n].begin - column, seen[n].end - column};
    if (shown.begin <= 0 && shown.end >= kChunkStep) continue;
    const bool none = shown.begin >= kChunkStep || shown.end <= 0;
    hide(scores + n * scores_row, none ? Interval{kChunkStep, kChunkStep} : intersect(shown, kAll),
         kAll);
  }
}

// keys: of all chunks. scale: of the scores, to units of log2(e). m, -inf of a row without any
// weights so far, l and rest, the sums of its weights (see add_up), and their excess as they are
// stored: of each row.
// seen_in(chunk): the columns that each row sees, or NULL: all. Stops before the first chunk in
// which m of a row would have to change, and returns how many are done. Calls ahead() in every
// chunk.
template <class SeenIn, class AheadOf>
int32_t weigh_chunks(const ChunkOperands& x, int32_t keys, float scale, float* m, float* l,
                     float* rest, float* excess, SeenIn seen_in, AheadOf ahead) {
  // Tiles are loaded and stored behind the compiler's back.
  __asm__ volatile("" : : : "memory");
  constexpr int32_t kHalf = kChunkKeys / 2, kPRow = kChunkKeys / 2;
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
  float shift[kChunkRows];
  for (int32_t r = 0; r < kChunkRows; ++r) shift[r] = m[r] == -kInfinity ? 0.0f : m[r];
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
    Floats sums[kChunkRows] = {}, stored[kChunkRows] = {};
    // Twice in machine code: a call of what hides scores would empty registers everywhere.
    const auto weigh_half = [&](int32_t half, auto masked) FLASHATTN_INLINED {
      const bool more = half + 1 < halves;
      // O's columns, in twos of tiles, that are multiplied meanwhile.
      const Interval some = done == 0       ? Interval{0, 0}
                            : half % 2 == 1 ? Interval{columns / 2, columns}
                            : more          ? Interval{0, columns / 2}
                                            : Interval{0, columns};
      const int32_t coming = more ? keys_of(half + 1) / (2 * kTile) : 0;
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
        if constexpr (decltype(masked)::value) {
          const int32_t column = half % 2 * kHalf + static_cast<int32_t>(weighed - row);
          hide_step(seen + row, column, scores, kHalf);
        }
        write_weights<Compute::kBf16Pairs, 2>(scores, kHalf, p, kPRow, nullptr, {0, 2 * kTile},
                                              factor, shift + row, sums + row, stored + row);
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
      if (more) multiply_scores(half + 1, between);
      __asm__ volatile("" : : : "memory");
      while (weighed < all) weigh();
      __asm__ volatile("" : : : "memory");
    };
    for (int32_t half = 2 * done; half < 2 * done + 2 && half < halves; ++half) {
      seen ? weigh_half(half, std::true_type{}) : weigh_half(half, std::false_type{});
    }
    ahead();
    float rows[kChunkRows];
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      Floats each[kWidth];
      for (int n = 0; n < kWidth; ++n) each[n] = sums[r + n];
      const Floats sum = sum_each(each);
      Floats least = select(load(m + r) == -kInfinity, splat(kLeastSum), Floats{});
      for (int n = 0; n < kWidth && seen; ++n) {
        if (seen[r + n].begin >= seen[r + n].end) least[n] = 0;
      }
      fits &= !any(~((sum <= kLargestSum) & (sum >= least)));
      store(rows + r, sum);
    }
    if (!fits) break;
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      Floats sum = load(l + r), left = load(rest + r);
      add_up(sum, left, load(rows + r));
      store(l + r, sum);
      store(rest + r, left);
      Floats each[kWidth];
      for (int n = 0; n < kWidth; ++n) each[n] = stored[r + n];
      store(excess + r, load(excess + r) + (sum_each(each) - load(rows + r)));
      // A row that has seen nothing yet stays as it is.
      const Floats reference = load(m + r);
      const Ints none = (reference == -kInfinity) & (load(rows + r) == 0.0f);
      store(m + r, select(none, reference, load(shift + r)));
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
int32_t weigh_chunks(const ChunkOperands&, int32_t, float, float*, float*, float*, float*, SeenIn,
                     AheadOf) {
  return 0;
}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
