// Products of a warpgroup, done when all four warps have asked for them, at the latest when one of
// their threads waits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "block.h"
#include "tensor_map.h"

namespace emulator {
namespace {

constexpr int kThreads = 128;

#ifdef __x86_64__
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

// d (rows x columns) += a b. a has rows of `depth`, b and d of `width`; columns are whole eights.
WIDE void add_product(const float* a, int depth, const float* b, float* d, int rows, int columns,
                      int width) {
  for (int m = 0; m < rows; ++m) {
    for (int x = 0; x < columns; x += 8) {
      float sums[8];
      for (int n = 0; n < 8; ++n) sums[n] = d[m * width + x + n];
      for (int k = 0; k < kDepth; ++k) {
        for (int n = 0; n < 8; ++n) sums[n] += a[m * depth + k] * b[k * width + x + n];
      }
      for (int n = 0; n < 8; ++n) d[m * width + x + n] = sums[n];
    }
  }
}

// As a Hopper tensor core adds products of E4M3 to a sum: all are cut off below 13 bits of the
// largest. Sums that are never promoted to fp32 lose a fifth over 16k terms of one sign.
void add_product_e4m3(const float* a, const float* b, float* d, int rows, int columns, int width) {
  for (int m = 0; m < rows; ++m) {
    for (int x = 0; x < columns; ++x) {
      float terms[2 * kDepth + 1], largest = 0;
      terms[2 * kDepth] = d[m * width + x];
      for (int k = 0; k < 2 * kDepth; ++k) terms[k] = a[m * 2 * kDepth + k] * b[k * width + x];
      bool finite = true;
      for (const float term : terms) {
        finite &= std::isfinite(term);
        largest = std::max(largest, std::abs(term));
      }
      float& sum = d[m * width + x];
      if (!finite || largest == 0) {
        for (int k = 0; k < 2 * kDepth; ++k) sum += terms[k];
        continue;
      }
      const float unit = std::ldexp(1.0f, std::max(std::ilogb(largest) - 13, -149));
      double all = 0;
      for (const float term : terms) all += std::trunc(double{term} / unit);
      sum = static_cast<float>(all * unit);
    }
  }
}

float half_to_float(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> all(1 << 16);
    for (uint32_t n = 0; n < all.size(); ++n) {
      all[n] = __half2float(__half(__half_raw{static_cast<unsigned short>(n)}));
    }
    return all;
  }();
  return table[bits];
}

float element(const char* at, Number type) {
  if (type == Number::kE4m3) return e4m3_to_float(static_cast<uint8_t>(*at));
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return as_float(bits, type == Number::kBf16);
}

// An operand in shared memory: rows of 128 or 64 bytes, their 16-byte chunks exchanged.
struct Operand {
  uint32_t first, panel, row_bytes;
  bool transposed;
  Number type;

  Operand(uint64_t matrix, bool transpose, Number of)
      : first(static_cast<uint32_t>(matrix & 0x3fff) << 4),
        panel(static_cast<uint32_t>(matrix >> 16 & 0x3fff) << 4),
        row_bytes(matrix >> 62 == 2 ? 64 : 128),
        transposed(transpose),
        type(of) {
    if ((matrix >> 32 & 0x3fff) != 8 * row_bytes >> 4 || (matrix >> 62 != 1 && matrix >> 62 != 2)) {
      fail("a matrix that is not of rows of 128 or 64 bytes with chunks exchanged");
    }
    if (type == Number::kE4m3 && transposed) fail("a matrix of 8 bits whose rows run along k");
  }

  // put(x, k, number) for each: x along the result's side, up to `size`; k along the sum.
  template <class Put>
  void read(int size, const Put& put) const {
    const int bytes = type == Number::kE4m3 ? 1 : 2, depth = 2 * kDepth / bytes;
    const int rows = transposed ? depth : size, columns = transposed ? size : depth;
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; column += 16 / bytes) {
        const uint32_t linear =
            first + static_cast<uint32_t>(column / 64) * panel +
            static_cast<uint32_t>(row * static_cast<int>(row_bytes) + column % 64 * bytes);
        const uint32_t place = own_address(exchanged(linear, row_bytes));
        const char* chunk = engine_place(place, 16);
        for (int n = 0; n < 16 / bytes; ++n) {
          const int x = transposed ? column + n : row, k = transposed ? row : column + n;
          put(x, k, element(chunk + bytes * n, type));
        }
      }
    }
  }
};

// Calls each(i, x) for a thread's accumulators: x is their place in d.
template <class Each>
void accumulators(int thread, int columns, float (*d)[kMaxColumns], const Each& each) {
  float* const upper = &d[thread / 32 * 16 + thread % 32 / 4][thread % 4 * 2];
  for (int i = 0; i < columns / 2; ++i) {
    each(i, upper[i / 4 * 8 + i % 2 + i / 2 % 2 * 8 * kMaxColumns]);
  }
}

int actor_of(const Thread* group, bool sums) {
  return block->races.actor((sums ? kSums : kByRow) + group->warp / 4);
}

// What all warps know that have asked for the product.
Act reader(const Thread* group) {
  Act act;
  if (!finds_races) return act;
  act.known = *group[0].products.front().known;
  for (int n = 32; n < kThreads; n += 32) act.known.meet(*group[n].products.front().known);
  act.time = static_cast<uint32_t>(group[0].products_done) + 1;
  return act;
}

void execute(Thread* group) {
  auto& [a, b, d] = block->matrices;
  const Product& first = group[0].products.front().product;
  const int columns = first.columns;
  // A matrix by itself stands for no product: nobody uses the result.
  const bool used = first.a || first.a_matrix != first.b_matrix;
  Act act = reader(group);
  const Acting reading(used ? &act : nullptr, false);
  for (int n = 1; n < kThreads; ++n) {
    const Product& other = group[n].products.front().product;
    if (other.columns != columns || other.a_matrix != first.a_matrix ||
        other.b_matrix != first.b_matrix || other.accumulate != first.accumulate ||
        (other.a == nullptr) != (first.a == nullptr)) {
      fail("a warpgroup's threads disagree about a product");
    }
  }
  const bool e4m3 = first.type == Number::kE4m3;
  if (first.a) {
    for (int n = 0; n < kThreads; ++n) {
      const uint32_t* words = group[n].products.front().product.a;
      for (int w = 0; w < 4; ++w) {
        const int row = n / 32 * 16 + n % 32 / 4 + w % 2 * 8;
        if (e4m3) {
          const int k = n % 4 * 4 + w / 2 * 16;
          for (int e = 0; e < 4; ++e) {
            a[row][k + e] = e4m3_to_float(static_cast<uint8_t>(words[w] >> 8 * e));
          }
          continue;
        }
        const int k = n % 4 * 2 + w / 2 * 8;
        a[row][k] = as_float(words[w] & 0xffff, first.type == Number::kBf16);
        a[row][k + 1] = as_float(words[w] >> 16, first.type == Number::kBf16);
      }
    }
  } else {
    act.actor = actor_of(group, first.transpose_a);
    const Operand left(first.a_matrix, first.transpose_a, first.type);
    left.read(kRows, [&](int m, int k, float number) { a[m][k] = number; });
  }
  act.actor = actor_of(group, first.transpose_b);
  const Operand right(first.b_matrix, first.transpose_b, first.type);
  right.read(columns, [&](int x, int k, float number) { b[k][x] = number; });
  for (int n = 0; n < kThreads; ++n) {
    const float* sums = group[n].products.front().product.d;
    const bool accumulate = first.accumulate;
    accumulators(n, columns, d, [=](int i, float& x) { x = accumulate ? sums[i] : 0.0f; });
  }
  if (e4m3) {
    add_product_e4m3(a[0], b[0], d[0], kRows, columns, kMaxColumns);
  } else {
    add_product(a[0], 2 * kDepth, b[0], d[0], kRows, columns, kMaxColumns);
  }
  for (int n = 0; n < kThreads; ++n) {
    float* sums = group[n].products.front().product.d;
    accumulators(n, columns, d, [=](int i, float x) { sums[i] = x; });
    group[n].products.pop_front();
    ++group[n].products_done;
  }
}

// Sums as a warpgroup's products do: the backward pass assumes that both give the same bits.
template <bool kBf16>
void execute_warp(Words* all) {
  float a[16][kDepth], b[kDepth][8], d[16][8] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, c = lane % 4 * 2;
    const uint32_t* words = all[lane].word;
    float* sums;
    std::memcpy(&sums, &words[6], sizeof sums);
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][c + i % 2] = sums[i];
    for (int e = 0; e < 2; ++e) {
      const auto number = [&](int w) { return as_float(words[w] >> 16 * e & 0xffff, kBf16); };
      for (int w = 0; w < 4; ++w) a[g + w % 2 * 8][c + w / 2 * 8 + e] = number(w);
      for (int w = 0; w < 2; ++w) b[c + w * 8 + e][g] = number(4 + w);
    }
  }
  add_product(a[0], kDepth, b[0], d[0], 16, 8, 8);
  for (int lane = 0; lane < 32; ++lane) {
    float* sums;
    std::memcpy(&sums, &all[lane].word[6], sizeof sums);
    for (int i = 0; i < 4; ++i) sums[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

Thread* warpgroup() { return &block->threads[running->place.thread.x / kThreads * kThreads]; }

// Products that all threads have asked for and that are not done.
size_t ready_products(const Thread* group) {
  size_t least = group[0].products.size();
  for (int n = 1; n < kThreads && least > 0; ++n) {
    least = std::min(least, group[n].products.size());
  }
  return least;
}

}  // namespace

float as_float(uint32_t bits, bool bf16) {
  if (!bf16) return half_to_float(static_cast<uint16_t>(bits));
  const uint32_t word = bits << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

float e4m3_to_float(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::nanf("");
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return bits & 0x80 ? -size : size;
}

uint8_t float_to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const float size = std::min(std::abs(x), 448.0f);
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -6, -6);
  // In units of the last bit; a carry goes into the exponent by itself.
  const int number = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
  return static_cast<uint8_t>(sign | std::min(number + ((exponent + 6) << 3), 0x7e));
}

void multiply_warp(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16) {
  Words mine{{a[0], a[1], a[2], a[3], b0, b1, 0, 0}};
  float* const sums = d;
  std::memcpy(&mine.word[6], &sums, sizeof sums);
  exchange(mine, bf16 ? &execute_warp<true> : &execute_warp<false>);
}

void multiply_fence() { running->fenced = true; }

void multiply(const Product& product) {
  if (!running->fenced) fail("a product without wgmma.fence");
  if (product.columns > kMaxColumns || product.columns % 8 != 0) fail("a product too wide");
  Asked asked{product, running->product_groups, nullptr};
  if (finds_races && running->lane == 0) {
    const Act& now = block->races.act_of_warp(running->warp);
    asked.known = std::make_shared<const Clock>(now.known);
    running->asked_at.push_back(now.time);
    block->races.advance(running->warp);
  }
  running->products.push_back(std::move(asked));
  ++running->products_asked;
}

void multiply_commit() {
  ++running->product_groups;
  if (finds_races) running->committed.push_back(running->products_asked);
  running->fenced = false;
  Thread* const group = warpgroup();
  // Sometimes at once.
  if (draw(kThreads) != 0) return;
  for (size_t n = ready_products(group); n > 0; --n) execute(group);
}

// Of those waited for, not of all that happen to be done. As all four warps have asked for them,
// all have read what they read before.
static void learn(Thread& self, const Thread* group, int pending) {
  const int groups = static_cast<int>(self.committed.size()) - pending;
  if (groups <= 0) return;
  const uint32_t count = self.committed[static_cast<size_t>(groups - 1)];
  self.committed.erase(self.committed.begin(), self.committed.begin() + groups);
  if (count == 0) return;
  const auto know = [&self](int actor, uint32_t time) {
    uint32_t& known = block->races.of_warp(self.warp).time[actor];
    known = std::max(known, time);
  };
  for (const bool sums : {false, true}) know(actor_of(group, sums), count);
  for (int n = 0; n < kThreads; n += 32) {
    know(block->races.actor(kLoads + group[n].warp), group[n].asked_at[count - 1]);
  }
}

void multiply_wait(int pending) {
  int64_t target = running->products_done;
  for (const auto& product : running->products) {
    target += product.group < running->product_groups - pending;
  }
  Thread* const group = warpgroup();
  Thread* const self = running;
  wait_until("products", static_cast<uint64_t>(pending), [=] {
    while (self->products_done < target && ready_products(group) > 0) execute(group);
    return self->products_done >= target;
  });
  if (finds_races) learn(*self, group, pending);
}

}  // namespace emulator
