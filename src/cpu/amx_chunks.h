// The forward pass on tile registers where scores count as they are: 32 rows against chunks of
// keys. Weights are computed between the products of the scores that come next. Their products with
// values wait until there are as many as a window holds: O is loaded and stored once for all of
// them. (Where the other thread of an Intel core is busy, too, tile registers are written one after
// the other, a load in some 30 cycles, a product in 40, which are 8 and 16 otherwise: there, fewer
// loads count for more than what overlaps.)
#pragma once

#include "cpu/weights.h"

namespace flashattn::cpu::FLASHATTN_ISA {

constexpr int32_t kChunkRows = 32;
constexpr int32_t kChunkKeys = 128;
constexpr int32_t kChunkStep = 32;  // the last chunk may have fewer keys, a multiple of this
constexpr int32_t kWindowChunks = 4;

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
  const uint32_t* v;
  int64_t v_panel;
  float* o;
  int32_t v_columns;
  float* scores;  // room for those of a chunk
  uint32_t* p;    // and for the weights of a window
};

#if defined(__AMX_BF16__)
// Scores lie step by step: 32 rows by 32 keys. These two are not inlined: nothing of theirs is to
// take registers from the products.
constexpr int32_t kStepScores = kChunkRows * kChunkStep;

// Hides those of a step's scores that its rows do not see; first: its first key of the chunk.
__attribute__((noinline)) inline void hide_step(const Interval* seen, int32_t first,
                                                float* scores) {
  constexpr Interval kAll{0, kChunkStep};
  for (int32_t r = 0; r < kChunkRows; ++r, scores += kChunkStep) {
    hide(scores, intersect({seen[r].begin - first, seen[r].end - first}, kAll), kAll);
  }
}

// The references m of rows that have one; of others, the highest of a chunk's scores.
__attribute__((noinline)) inline void find_references(const float* m, int32_t steps,
                                                      const float* scores, float* found) {
  for (int32_t r = 0; r < kChunkRows; r += kWidth) {
    Floats each[kWidth];
    for (int32_t n = 0; n < kWidth; n += 2) {
      const float* s = scores + (r + n) * kChunkStep;
      highest_of<2>(s, kChunkStep, {0, kChunkStep}, each + n);
      for (int32_t step = 1; step < steps; ++step) {
        Floats more[2];
        highest_of<2>(s + step * kStepScores, kChunkStep, {0, kChunkStep}, more);
        for (int i = 0; i < 2; ++i) each[n + i] = max_of_both(each[n + i], more[i]);
      }
    }
    const Floats before = load(m + r);
    store(found + r, select(before == -kInfinity, max_each(each), before));
  }
}

// keys: of all chunks. scale: of the scores, to units of log2(e). m, -inf of a row without any
// weights so far, and l and rest, the sums of its weights (see add_up): of each row.
// seen_in(chunk): the columns that each row sees, or NULL: all. Stops before the first chunk in
// which a row would need another m than it has, and returns how many are done. Calls ahead() in
// every chunk.
template <int32_t kUnits, class SeenIn, class AheadOf>
int32_t weigh_chunks_of(const ChunkOperands& x, int32_t keys, float scale, float* m, float* l,
                        float* rest, SeenIn seen_in, AheadOf ahead) {
  // Tiles are loaded and stored behind the compiler's back.
  __asm__ volatile("" : : : "memory");
  constexpr int32_t kSteps = kChunkKeys / kChunkStep;  // of a whole chunk
  constexpr int32_t kPRow = kWindowChunks * kChunkKeys / 2;
  static_assert(kWidth == kTile && kChunkRows == 2 * kTile && kChunkStep == 2 * kTile);
  // Keys and values of a chunk come from the L2 cache, once for 32 rows; what else a chunk needs
  // fills the L1 cache. (1.1 to 1.2 times as fast, on 16 threads up to 1.4.)
  using Block = TileBlock<true, true, true>;
  configure_tiles(kTile, kTile, kTile);
  const int32_t steps = keys / kChunkStep;
  const auto chunks = static_cast<int32_t>(ceil_div(steps, kSteps));
  const float factor[2] = {scale, scale};
  Block before{nullptr, 0};
  const auto store_before = [&]() FLASHATTN_INLINED {
    __asm__ volatile("" : : : "memory");
    before.store();
    before.c = nullptr;
    __asm__ volatile("" : : : "memory");
  };
  const int32_t units = kUnits ? kUnits : x.qk_units;
  bool held = false;
  const auto multiply_scores = [&](int32_t step, float* scores, auto between) FLASHATTN_INLINED {
    const uint32_t* k = x.k + int64_t{step} * 2 * kTile * units;
    if constexpr (kUnits == HeldRows::kUnits) {
      if (!held) {
        store_before();
        HeldRows::load(x.q);
        held = true;
      }
      HeldRows::multiply(k, scores, kChunkStep, between);
      HeldRows::multiply(k + kTile * kUnits, scores + kTile, kChunkStep, between);
      __asm__ volatile("" : : : "memory");
    } else {
      const Block block{scores, kChunkStep};
      block.multiply(x.q, units, k, kTile * units, units, kTile, false, before, between);
      before = block;
    }
  };
  // Those of the chunks [from, to), of one window.
  const auto multiply_values = [&](int32_t from, int32_t to) FLASHATTN_INLINED {
    const int32_t end = to * kSteps < steps ? to * kSteps : steps;
    const int32_t count = (end - from * kSteps) * kTile;
    held = false;
    for (int32_t c = 0; count > 0 && c < x.v_columns / (2 * kTile); ++c) {
      const Block block{x.o + c * 2 * kTile, x.v_columns};
      block.multiply(x.p, kPRow, x.v + c * 2 * x.v_panel + int64_t{from} * kSteps * kTile * kTile,
                     x.v_panel, count, kTile, true, before, [] {});
      before = block;
    }
  };

  multiply_scores(0, x.scores, [] {});
  int32_t done = 0, window = 0;  // the first chunk whose values have not been multiplied
  while (done < chunks) {
    const Interval* seen = seen_in(done);
    const int32_t first = done * kSteps, end = first + kSteps < steps ? first + kSteps : steps;
    Ints starts{};  // rows without any weights so far
    for (int32_t r = 0; r < kChunkRows; r += kWidth) starts |= load(m + r) == -kInfinity;
    // Of these every score is computed before any weight is.
    const bool at_once = any(starts);
    const auto scores_of = [&](int32_t step) {
      return x.scores + (at_once ? step - first : (step - first) % 2) * kStepScores;
    };
    float found[kChunkRows], shift[kChunkRows];
    const float* references = m;
    if (at_once) {
      for (int32_t step = first + 1; step < end; ++step) {
        multiply_scores(step, scores_of(step), [] {});
      }
      store_before();
      for (int32_t step = first; seen && step < end; ++step) {
        hide_step(seen, (step - first) * kChunkStep, scores_of(step));
      }
      find_references(m, end - first, x.scores, found);
      references = found;
    }
    for (int32_t r = 0; r < kChunkRows; r += kWidth) {
      const Floats reference = load(references + r);
      store(shift + r, select(reference == -kInfinity, Floats{}, reference * splat(scale)));
    }
    Floats sums[kChunkRows] = {};
    for (int32_t step = first; step < end; ++step) {
      if (seen && !at_once) {
        store_before();
        hide_step(seen, (step - first) * kChunkStep, scores_of(step));
      }
      float* scores = scores_of(step);
      uint32_t* p = x.p + (step - window * kSteps) * kTile;
      int32_t row = 0;
      // Two rows by 32 keys.
      const auto weigh = [&]() FLASHATTN_INLINED {
        write_weights<Compute::kBf16Pairs, 2, true>(
            scores + row * kChunkStep, kChunkStep, p + row * kPRow, kPRow, nullptr, {0, kChunkStep},
            factor, shift + row, sums + row);
        row += 2;
      };
      const int32_t next = step + 1;
      if (next < steps && !(at_once && next < end)) {
        // None after the first product: then two tiles of scores are still to be stored.
        const int32_t products = 4 * (units / kTile);
        int32_t owed = -kChunkRows / 2;
        multiply_scores(next, next < end ? scores_of(next) : x.scores, [&]() FLASHATTN_INLINED {
          __asm__ volatile("" : : : "memory");
          for (owed += kChunkRows / 2; owed >= products; owed -= products) weigh();
          __asm__ volatile("" : : : "memory");
        });
      } else {
        store_before();
      }
      __asm__ volatile("" : : : "memory");
      while (row < kChunkRows) weigh();
      __asm__ volatile("" : : : "memory");
    }
    ahead();
    float rows[kChunkRows];
    bool fits = true;
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
    ++done;
    if (done - window == kWindowChunks) {
      multiply_values(window, done);
      window = done;
    }
  }
  multiply_values(window, done);
  store_before();
  return done;
}

template <class SeenIn, class AheadOf>
int32_t weigh_chunks(const ChunkOperands& x, int32_t keys, float scale, float* m, float* l,
                     float* rest, SeenIn seen_in, AheadOf ahead) {
  switch (x.qk_units) {
    case 32: return weigh_chunks_of<32>(x, keys, scale, m, l, rest, seen_in, ahead);
    case 64: return weigh_chunks_of<64>(x, keys, scale, m, l, rest, seen_in, ahead);
    default: return weigh_chunks_of<0>(x, keys, scale, m, l, rest, seen_in, ahead);
  }
}
#else
template <class SeenIn, class AheadOf>
int32_t weigh_chunks(const ChunkOperands&, int32_t, float, float*, float*, float*, SeenIn,
                     AheadOf) {
  return 0;
}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
