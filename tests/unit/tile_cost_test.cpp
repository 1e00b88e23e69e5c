// Which kernel the model of a forward pass's time takes, beside which was faster on an H200.
#include "core/tile_cost.h"

#include <cstdio>
#include <initializer_list>

#include "check.h"

using namespace flashattn;

namespace {

constexpr int32_t kUnits = 132;

// Of bf16 kernels, TFLOP/s.
struct Measured {
  int32_t dim, heads, seqlen;
  bool causal;
  double large, small;  // tiles of 192 or 128 queries, one block; of 64, three or two
};

constexpr Measured kMeasured[] = {
    {64, 32768, 64, false, 47.9, 135.9},   {64, 16384, 128, false, 179.5, 239.0},
    {64, 10624, 197, false, 157.3, 196.0}, {64, 8192, 256, false, 286.7, 336.6},
    {64, 5440, 384, false, 440.3, 390.7},  {64, 4096, 512, false, 446.0, 424.3},
    {64, 2048, 1024, false, 526.2, 488.1}, {64, 1024, 2048, false, 591.0, 527.3},
    {64, 16384, 128, true, 84.8, 122.6},   {64, 8192, 256, true, 143.9, 201.1},
    {64, 5440, 384, true, 242.1, 255.9},   {64, 4096, 512, true, 276.2, 302.2},
    {64, 2048, 1024, true, 376.3, 396.4},  {64, 1024, 2048, true, 488.7, 468.3},
    {64, 16, 512, false, 94.8, 125.3},     {64, 16, 1024, false, 264.9, 303.9},
    {64, 16, 1024, true, 134.8, 166.2},    {64, 96, 512, false, 248.4, 293.5},
    {64, 96, 512, true, 143.3, 185.8},     {128, 8192, 128, false, 270.6, 189.5},
    {128, 2048, 512, false, 592.8, 358.4}, {128, 512, 2048, true, 642.3, 433.6},
    {128, 16, 512, false, 187.2, 222.0},   {128, 16, 512, true, 90.5, 110.5},
    {128, 64, 256, false, 229.6, 156.5},
};

void test_choice() {
  for (const Measured& m : kMeasured) {
    const TileCost large = hopper_cost(m.dim == 64 ? 192 : 128, 128, m.dim, 1);
    const TileCost small = hopper_cost(64, 64, m.dim, m.dim == 64 ? 3 : 2);
    const Lengths len{m.seqlen, m.seqlen};
    const bool takes_small = forward_time(small, m.causal, len, m.heads, kUnits) <
                             forward_time(large, m.causal, len, m.heads, kUnits);
    if (takes_small != (m.small > m.large)) {
      std::fprintf(stderr, "dim %d, %d heads, %d queries\n", m.dim, m.heads, m.seqlen);
    }
    CHECK(takes_small == (m.small > m.large));
  }
}

// Where the launcher admits them, whatever is left of the last tile.
void test_wide_tiles() {
  const TileCost plain = hopper_cost(128, 128, 128, 1), wide = hopper_cost(128, 160, 128, 1);
  for (const int32_t keys : {8192, 8193, 8321, 16384, 131072}) {
    const Lengths len{1024, keys};
    CHECK(forward_time(wide, false, len, 64, kUnits) < forward_time(plain, false, len, 64, kUnits));
  }
}

// Twice the heads on a full device take twice the time, and what hides keys saves time.
void test_proportions() {
  const TileCost cost = hopper_cost(128, 128, 128, 1);
  const Lengths len{4096, 4096};
  const int64_t once = forward_time(cost, false, len, 33, kUnits);
  CHECK(forward_time(cost, false, len, 66, kUnits) == 2 * once);
  CHECK(forward_time(cost, false, len, 32, kUnits) == once);  // the last wave is not full
  CHECK(forward_time(cost, true, len, 33, kUnits) < once * 6 / 10);
  CHECK(forward_time(cost, true, {64, 4096}, 33, kUnits) >
        forward_time(cost, false, {64, 4000}, 33, kUnits) * 98 / 100);
}

}  // namespace

int main() {
  test_choice();
  test_wide_tiles();
  test_proportions();
  return check_report();
}
