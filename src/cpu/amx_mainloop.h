// The AMX mainloop of the forward pass: 32 rows against the subtiles of a KV tile, for scores that
// are only scaled. P of a step of 32 keys is computed between the products Q K^T of the next step.
// Products P V wait until P of kPvSubtiles subtiles is there, so that O is loaded and stored once
// for all of them. (If the other thread of an Intel core is busy, tile registers are written one
// after the other: a load takes some 30 cycles instead of 8, a product 40 instead of 16. Fewer
// loads then count for more than overlap.)
#pragma once

#include "cpu/softmax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

constexpr int32_t kMainloopRows = 32;
constexpr int32_t kSubtileKeys = 128;
constexpr int32_t kStepKeys = 32;  // keys of a step; the last subtile may have fewer steps
constexpr int32_t kPvSubtiles = 4;

// Whether a problem uses this mainloop. It depends on the problem alone, and so do the subtiles of
// all rows.
FLASHATTN_INLINE bool uses_amx_mainloop(const Problem& problem) {
  return kHasAmx && inputs_are_bf16(problem) && problem.dim_qk % 32 == 0 &&
         problem.dim_v % 32 == 0 && (modifications(problem) & ~(kModBlockMask | kModKeyBits)) == 0;
}

struct AmxMainloopOperands {
  const uint32_t* q;  // words, like all that follows
  int32_t qk_words;   // words of a row of q
  const uint32_t* k;  // packed, from the first subtile on
  const uint32_t* v;
  int64_t v_panel;
  float* o;
  int32_t v_columns;
  float* scores;  // scores of a subtile
  uint32_t* p;    // P of kPvSubtiles subtiles
};

#if defined(__AMX_BF16__)
// Scores are stored step by step: 32 rows by 32 keys. The next two functions are not inlined, so
// that they take no registers from the products.
constexpr int32_t kStepScores = kMainloopRows * kStepKeys;

// Masks the scores of a step. first: the first key of the step, counted from that of the subtile.
__attribute__((noinline)) inline void mask_step(const Interval* seen, int32_t first,
                                                float* scores) {
  constexpr Interval kAll{0, kStepKeys};
  for (int32_t r = 0; r < kMainloopRows; ++r, scores += kStepKeys) {
    mask_columns(scores, intersect({seen[r].begin - first, seen[r].end - first}, kAll), kAll);
  }
}

// The softmax base of each row: its m, or for a row without one the maximum of the subtile's
// scores.
__attribute__((noinline)) inline void find_softmax_base(const float* m, int32_t steps,
                                                        const float* scores, float* new_base) {
  for (int32_t r = 0; r < kMainloopRows; r += kWidth) {
    Floats each[kWidth];
    for (int32_t n = 0; n < kWidth; n += 2) {
      const float* s = scores + (r + n) * kStepKeys;
      max_of_rows<2>(s, kStepKeys, {0, kStepKeys}, each + n);
      for (int32_t step = 1; step < steps; ++step) {
        Floats more[2];
        max_of_rows<2>(s + step * kStepScores, kStepKeys, {0, kStepKeys}, more);
        for (int i = 0; i < 2; ++i) each[n + i] = max_of_both(each[n + i], more[i]);
      }
    }
    const Floats before = load(m + r);
    store(new_base + r, select(before == -kInfinity, max_each(each), before));
  }
}

// Computes subtiles of `keys` keys in all. scale: from products to units of log2(e). m, l, rest:
// the state of each row, as in ForwardScratch; m = -inf: the row has no base yet.
// visible_in(subtile): the columns that each row sees, or NULL: all. Returns how many subtiles are
// done: it stops before the first in which a row's sum overflows its base. Calls prefetch() in
// every subtile.
template <int32_t kWords, class SeenIn, class Prefetch>
int32_t amx_mainloop_of(const AmxMainloopOperands& x, int32_t keys, float scale, float* m, float* l,
                        float* rest, SeenIn visible_in, Prefetch prefetch) {
  // The compiler does not see that tile intrinsics load and store memory.
  __asm__ volatile("" : : : "memory");
  constexpr int32_t kSteps = kSubtileKeys / kStepKeys;  // steps of a whole subtile
  constexpr int32_t kPRow = kPvSubtiles * kSubtileKeys / 2;
  static_assert(kWidth == kTileRows && kMainloopRows == 2 * kTileRows &&
                kStepKeys == 2 * kTileRows);
  // K and V of a subtile come from the L2 cache, once for 32 rows; what else a subtile needs fills
  // the L1 cache. (kStreamB: 1.1 to 1.2 times as fast, on 16 threads up to 1.4.)
  using Block = TileQuad<true, true, true>;
  configure_tiles(kTileRows, kTileRows, kTileRows);
  const int32_t steps = keys / kStepKeys;
  const auto subtiles = static_cast<int32_t>(ceil_div(steps, kSteps));
  const float factor[2] = {scale, scale};
  Block before{nullptr, 0};
  const auto store_before = [&]() FLASHATTN_INLINED {
    __asm__ volatile("" : : : "memory");
    before.store();
    before.c = nullptr;
    __asm__ volatile("" : : : "memory");
  };
  const int32_t words = kWords ? kWords : x.qk_words;
  bool a_is_loaded = false;
  const auto multiply_scores = [&](int32_t step, float* scores, auto between) FLASHATTN_INLINED {
    const uint32_t* k = x.k + int64_t{step} * 2 * kTileRows * words;
    if constexpr (kWords == StationaryA::kWords) {
      if (!a_is_loaded) {
        store_before();
        StationaryA::load(x.q);
        a_is_loaded = true;
      }
      StationaryA::multiply(k, scores, kStepKeys, between);
      StationaryA::multiply(k + kTileRows * kWords, scores + kTileRows, kStepKeys, between);
      __asm__ volatile("" : : : "memory");
    } else {
      const Block block{scores, kStepKeys};
      block.multiply(x.q, words, k, kTileRows * words, words, kTileRows, false, before, between);
      before = block;
    }
  };
  // O += P V of the subtiles [from, to), whose P is there.
  const auto multiply_values = [&](int32_t from, int32_t to) FLASHATTN_INLINED {
    const int32_t end = to * kSteps < steps ? to * kSteps : steps;
    const int32_t count = (end - from * kSteps) * kTileRows;
    a_is_loaded = false;
    for (int32_t c = 0; count > 0 && c < x.v_columns / (2 * kTileRows); ++c) {
      const Block block{x.o + c * 2 * kTileRows, x.v_columns};
      block.multiply(x.p, kPRow,
                     x.v + c * 2 * x.v_panel + int64_t{from} * kSteps * kTileRows * kTileRows,
                     x.v_panel, count, kTileRows, true, before, [] {});
      before = block;
    }
  };

  multiply_scores(0, x.scores, [] {});
  int32_t done = 0, pv_begin = 0;  // pv_begin: the first subtile whose P V is not computed yet
  while (done < subtiles) {
    const Interval* seen = visible_in(done);
    const int32_t first = done * kSteps, end = first + kSteps < steps ? first + kSteps : steps;
    Ints starts{};  // rows without a base
    for (int32_t r = 0; r < kMainloopRows; r += kWidth) starts |= load(m + r) == -kInfinity;
    // Such a base needs every score of the subtile before any P is computed.
    const bool scores_first = any(starts);
    const auto scores_of = [&](int32_t step) {
      return x.scores + (scores_first ? step - first : (step - first) % 2) * kStepScores;
    };
    float new_base[kMainloopRows], shift[kMainloopRows];
    const float* base = m;
    if (scores_first) {
      for (int32_t step = first + 1; step < end; ++step) {
        multiply_scores(step, scores_of(step), [] {});
      }
      store_before();
      for (int32_t step = first; seen && step < end; ++step) {
        mask_step(seen, (step - first) * kStepKeys, scores_of(step));
      }
      find_softmax_base(m, end - first, x.scores, new_base);
      base = new_base;
    }
    for (int32_t r = 0; r < kMainloopRows; r += kWidth) {
      const Floats row_base = load(base + r);
      store(shift + r, select(row_base == -kInfinity, Floats{}, row_base * splat(scale)));
    }
    Floats sums[kMainloopRows] = {};
    for (int32_t step = first; step < end; ++step) {
      if (seen && !scores_first) {
        store_before();
        mask_step(seen, (step - first) * kStepKeys, scores_of(step));
      }
      float* scores = scores_of(step);
      uint32_t* p = x.p + (step - pv_begin * kSteps) * kTileRows;
      int32_t row = 0;
      // Computes P of two rows and 32 keys.
      const auto compute_rows = [&]() FLASHATTN_INLINED {
        compute_p<Compute::kBf16Pairs, 2, true>(scores + row * kStepKeys, kStepKeys,
                                                p + row * kPRow, kPRow, nullptr, {0, kStepKeys},
                                                factor, shift + row, sums + row);
        row += 2;
      };
      const int32_t next = step + 1;
      if (next < steps && !(scores_first && next < end)) {
        // No rows are computed after the first product, when two tiles of scores are still to be
        // stored.
        const int32_t products = 4 * (words / kTileRows);
        int32_t credit = -kMainloopRows / 2;
        multiply_scores(next, next < end ? scores_of(next) : x.scores, [&]() FLASHATTN_INLINED {
          __asm__ volatile("" : : : "memory");
          for (credit += kMainloopRows / 2; credit >= products; credit -= products) compute_rows();
          __asm__ volatile("" : : : "memory");
        });
      } else {
        store_before();
      }
      __asm__ volatile("" : : : "memory");
      while (row < kMainloopRows) compute_rows();
      __asm__ volatile("" : : : "memory");
    }
    prefetch();
    float rows[kMainloopRows];
    bool fits = true;
    for (int32_t r = 0; r < kMainloopRows; r += kWidth) {
      Floats each[kWidth];
      for (int n = 0; n < kWidth; ++n) each[n] = sums[r + n];
      const Floats sum = sum_each(each);
      fits &= !any(~(sum <= kMaxRowSum));
      store(rows + r, sum);
    }
    if (!fits) break;
    for (int32_t r = 0; r < kMainloopRows; r += kWidth) {
      Floats sum = load(l + r), left = load(rest + r);
      add_compensated(sum, left, load(rows + r));
      store(l + r, sum);
      store(rest + r, left);
      store(m + r, load(base + r));
    }
    ++done;
    if (done - pv_begin == kPvSubtiles) {
      multiply_values(pv_begin, done);
      pv_begin = done;
    }
  }
  multiply_values(pv_begin, done);
  store_before();
  return done;
}

template <class SeenIn, class Prefetch>
int32_t amx_mainloop(const AmxMainloopOperands& x, int32_t keys, float scale, float* m, float* l,
                     float* rest, SeenIn visible_in, Prefetch prefetch) {
  switch (x.qk_words) {
    case 32: return amx_mainloop_of<32>(x, keys, scale, m, l, rest, visible_in, prefetch);
    case 64: return amx_mainloop_of<64>(x, keys, scale, m, l, rest, visible_in, prefetch);
    default: return amx_mainloop_of<0>(x, keys, scale, m, l, rest, visible_in, prefetch);
  }
}
#else
template <class SeenIn, class Prefetch>
int32_t amx_mainloop(const AmxMainloopOperands&, int32_t, float, float*, float*, float*, SeenIn,
                     Prefetch) {
  return 0;
}
#endif

}  // namespace flashattn::cpu::FLASHATTN_ISA
