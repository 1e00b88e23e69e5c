// Which kernel the model of a forward pass's time takes, beside which was faster on an H200.
#include "core/tile_cost.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <iterator>

#include "check.h"

using namespace flashattn;

namespace {

constexpr int32_t kUnits = 132;

// Of bf16 kernels, TFLOP/s.
struct Measured {
  int32_t heads, seqlen;
  bool causal;
  double speed[3];  // by kernel
  int32_t window = -1;
};

constexpr MaskRule masked(bool causal, int32_t window = -1) {
  const int mask = (causal ? FLASHATTN_MASK_CAUSAL : 0) | (window >= 0 ? FLASHATTN_MASK_WINDOW : 0);
  return {static_cast<uint32_t>(mask), window, -1, 0};
}

constexpr TileCost kSmallHeads[] = {hopper_cost(192, 128, 64, 1), hopper_cost(64, 64, 64, 3)};
constexpr Measured kSmallHeadsMeasured[] = {
    {32768, 64, false, {49.4, 125.2}},       {16384, 128, false, {184.7, 225.5}},
    {10624, 197, false, {157.3, 196.0}},     {8192, 256, false, {288.4, 335.0}},
    {5440, 384, false, {440.3, 390.7}},      {4096, 512, false, {452.8, 424.4}},
    {2048, 1024, false, {531.3, 489.5}},     {1024, 2048, false, {600.4, 531.6}},
    {128, 16384, false, {653.5, 569.7}},     {16384, 128, true, {85.4, 118.1}},
    {8192, 256, true, {141.0, 202.4}},       {5440, 384, true, {242.1, 255.9}},
    {4096, 512, true, {272.6, 301.7}},       {2048, 1024, true, {377.5, 395.6}},
    {1024, 2048, true, {497.4, 468.9}},      {128, 16384, true, {641.6, 559.0}},
    {16, 512, false, {94.8, 123.1}},         {16, 1024, false, {263.3, 298.8}},
    {16, 2048, false, {370.0, 437.0}},       {96, 512, false, {280.4, 335.5}},
    {96, 2048, false, {590.1, 495.0}},       {16, 512, true, {51.8, 61.0}},
    {16, 1024, true, {134.0, 165.4}},        {96, 512, true, {163.0, 217.3}},
    {96, 1024, true, {317.8, 348.5}},        {96, 2048, true, {470.0, 452.0}},
    {64, 8192, true, {76.7, 100.8}, 63},     {64, 8192, true, {143.4, 168.8}, 127},
    {64, 8192, true, {233.6, 265.3}, 255},   {64, 8192, true, {347.6, 362.4}, 511},
    {64, 8192, true, {460.9, 438.7}, 1023},  {64, 8192, true, {546.4, 491.0}, 2047},
    {256, 2048, true, {77.5, 100.6}, 63},    {256, 2048, true, {139.0, 167.1}, 127},
    {256, 2048, true, {225.9, 261.7}, 255},  {256, 2048, true, {331.9, 355.4}, 511},
    {256, 2048, true, {434.4, 426.9}, 1023}, {256, 2048, true, {495.7, 465.2}, 2047},
    {32, 2048, true, {100.4, 124.5}, 127},   {32, 2048, true, {254.8, 299.1}, 511},
    {32, 1024, true, {66.6, 77.9}, 127},     {32, 1024, true, {178.7, 220.4}, 511},
    {8, 1024, true, {68.6, 90.7}},           {24, 1024, true, {203.3, 218.0}},
    {32, 1024, true, {239.6, 240.7}},        {48, 1024, true, {284.1, 311.3}},
    {64, 1024, true, {299.8, 331.8}},        {4, 2048, true, {87.9, 119.3}},
    {8, 2048, true, {173.9, 212.5}},         {16, 2048, true, {357.8, 294.5}},
    {24, 2048, true, {418.3, 397.9}},        {32, 2048, true, {419.2, 425.1}},
    {64, 2048, true, {441.8, 439.9}},        {4, 4096, true, {192.3, 249.4}},
    {8, 4096, true, {384.6, 329.1}},         {16, 4096, true, {502.2, 485.8}},
    {4, 8192, true, {421.2, 342.9}},         {8, 8192, true, {556.8, 520.5}},
};

constexpr TileCost kHeadsOf96[] = {hopper_cost(192, 112, 96, 1), hopper_cost(192, 64, 96, 1)};
constexpr Measured kHeadsOf96Measured[] = {
    {1344, 256, false, {285.0, 343.4}}, {672, 512, false, {476.0, 503.5}},
    {336, 1024, false, {556.7, 589.1}}, {84, 4096, false, {732.9, 708.2}},
    {21, 16384, false, {763.6, 727.4}}, {336, 1024, true, {415.0, 449.7}},
    {84, 4096, true, {653.8, 645.2}},   {16, 512, false, {118.5, 130.6}},
    {96, 512, false, {331.0, 355.3}},   {96, 2048, true, {552.9, 562.4}},
};

constexpr TileCost kHeadsOf128[] = {hopper_cost(128, 128, 128, 1), hopper_cost(192, 64, 128, 1),
                                    hopper_cost(64, 64, 128, 2)};
constexpr Measured kHeadsOf128Measured[] = {
    {4096, 64, false, {81.7, 92.7, 127.6}},         {2048, 128, false, {240.4, 250.4, 233.2}},
    {1024, 256, false, {430.1, 391.0, 385.0}},      {512, 512, false, {569.1, 578.6, 508.7}},
    {256, 1024, false, {678.1, 673.9, 605.4}},      {128, 2048, false, {741.1, 754.4, 675.6}},
    {32, 8192, false, {780.1, 788.6, 748.7}},       {16, 16384, false, {786.3, 790.0, 757.3}},
    {2048, 128, true, {118.3, 124.7, 120.4}},       {1024, 256, true, {227.4, 216.0, 218.2}},
    {512, 512, true, {361.8, 383.6, 347.6}},        {256, 1024, true, {505.7, 521.2, 464.4}},
    {32, 8192, true, {764.0, 785.5, 643.8}},        {16, 16384, true, {785.5, 799.6, 688.3}},
    {16, 256, false, {59.5, 53.3, 70.0}},           {16, 512, false, {186.8, 156.3, 214.6}},
    {16, 1024, false, {504.6, 409.9, 507.0}},       {16, 2048, false, {696.9, 518.1, 668.6}},
    {64, 512, false, {457.8, 380.5, 429.2}},        {64, 4096, false, {780.4, 782.4, 715.9}},
    {96, 256, false, {242.0, 203.8, 238.6}},        {96, 1024, false, {649.4, 607.1, 583.6}},
    {144, 1024, false, {660.2, 639.1, 588.0}},      {144, 4096, false, {790.1, 802.3, 716.8}},
    {16, 1024, true, {249.5, 215.2, 260.0}},        {16, 2048, true, {553.7, 505.5, 467.7}},
    {64, 1024, true, {424.7, 451.8, 397.3}},        {96, 512, true, {283.1, 287.7, 280.4}},
    {144, 256, true, {137.1, 137.6, 156.0}},        {4, 512, false, {47.9, 39.8, 56.7}},
    {4, 2048, false, {332.5, 251.2, 401.1}},        {32, 8192, true, {100.6, 118.3, 113.0}, 63},
    {32, 8192, true, {195.5, 217.9, 204.7}, 127},   {32, 8192, true, {313.3, 348.5, 322.7}, 255},
    {32, 8192, true, {451.2, 494.7, 438.5}, 511},   {32, 8192, true, {578.4, 621.7, 526.2}, 1023},
    {32, 8192, true, {674.8, 715.3, 586.0}, 2047},  {128, 2048, true, {100.2, 120.3, 112.1}, 63},
    {128, 2048, true, {194.0, 216.0, 201.4}, 127},  {128, 2048, true, {309.7, 343.8, 319.6}, 255},
    {128, 2048, true, {444.2, 486.8, 432.4}, 511},  {128, 2048, true, {557.4, 600.9, 511.9}, 1023},
    {128, 2048, true, {630.0, 662.1, 552.7}, 2047}, {4, 1024, true, {67.3, 57.0, 80.0}},
    {8, 1024, true, {133.3, 113.3, 155.3}},         {32, 1024, true, {396.5, 391.4, 365.7}},
    {64, 1024, true, {428.3, 456.4, 390.9}},        {4, 2048, true, {167.4, 134.5, 199.9}},
    {8, 2048, true, {326.8, 267.3, 331.1}},         {32, 2048, true, {578.3, 594.9, 492.8}},
    {4, 4096, true, {380.2, 284.0, 373.5}},         {8, 4096, true, {686.7, 544.6, 559.1}},
    {16, 4096, true, {683.4, 674.5, 575.0}},        {64, 4096, true, {715.2, 741.9, 584.7}},
};

// Packed sequences, of lengths up to the longest.
struct PackedMeasured {
  int32_t heads, mean, longest;
  bool causal;
  double speed[3];
};

constexpr PackedMeasured kSmallHeadsPacked[] = {
    {384, 512, 993, false, {333, 342}},   {384, 512, 993, true, {235, 265}},
    {512, 1024, 1927, false, {474, 451}}, {512, 1024, 1927, true, {385, 387}},
    {1024, 256, 504, false, {226, 257}},
};
constexpr PackedMeasured kHeadsOf128Packed[] = {
    {512, 512, 993, true, {338, 378, 342}},
    {1024, 256, 504, false, {312, 364, 333}},
    {256, 2048, 3640, true, {632, 676, 554}},
};

template <size_t kKernels, class Time>
const TileCost* fastest(const TileCost (&kernels)[kKernels], Time time) {
  return std::min_element(std::begin(kernels), std::end(kernels),
                          [&](const TileCost& a, const TileCost& b) { return time(a) < time(b); });
}

template <size_t kKernels, size_t kCases>
void test_packed(const TileCost (&kernels)[kKernels], const PackedMeasured (&cases)[kCases]) {
  for (const PackedMeasured& m : cases) {
    const TileCost* chosen = fastest(kernels, [&m](const TileCost& cost) {
      return packed_time(cost, masked(m.causal), {m.mean, m.mean}, {m.longest, m.longest}, m.heads,
                         kUnits);
    });
    const bool good =
        m.speed[chosen - kernels] >= 0.98 * *std::max_element(m.speed, m.speed + kKernels);
    if (!good) std::fprintf(stderr, "packed: %d heads, %d queries\n", m.heads, m.mean);
    CHECK(good);
  }
}

template <size_t kKernels, size_t kCases>
void test_choice(const TileCost (&kernels)[kKernels], const Measured (&cases)[kCases]) {
  for (const Measured& m : cases) {
    const TileCost* chosen = fastest(kernels, [&m](const TileCost& cost) {
      return forward_time(cost, masked(m.causal, m.window), {m.seqlen, m.seqlen}, m.heads, kUnits);
    });
    const double most = *std::max_element(m.speed, m.speed + kKernels);
    const bool good = m.speed[chosen - kernels] >= 0.955 * most;
    if (!good) std::fprintf(stderr, "%d heads, %d queries, %d\n", m.heads, m.seqlen, m.window);
    CHECK(good);
    // Packed sequences one of which is a token shorter take as long.
    if (m.window >= 0 || m.seqlen <= 64) continue;
    const Lengths longest{m.seqlen, m.seqlen}, mean{m.seqlen - 1, m.seqlen - 1};
    const TileCost* nearly = fastest(kernels, [&](const TileCost& cost) {
      return packed_time(cost, masked(m.causal), mean, longest, m.heads, kUnits);
    });
    CHECK(m.speed[nearly - kernels] >= 0.955 * most);
  }
}

// Where an integer overflowed this would not compile.
static_assert(forward_time(kSmallHeads[1], masked(true), {INT32_MAX, INT32_MAX}, 1 << 30, kUnits) >
              forward_time(kSmallHeads[1], masked(true), {INT32_MAX, INT32_MAX}, 1, kUnits));

static_assert(packed_time(kSmallHeads[1], masked(true), {INT32_MAX, INT32_MAX},
                          {INT32_MAX, INT32_MAX}, 1 << 30, kUnits) > 0);

// Twice the heads on a full device take twice the time, and what hides keys saves time.
void test_proportions() {
  const TileCost cost = hopper_cost(128, 128, 128, 1);
  const Lengths len{4096, 4096};
  const double once = forward_time(cost, masked(false), len, 33, kUnits);
  CHECK(forward_time(cost, masked(false), len, 66, kUnits) == 2 * once);
  CHECK(forward_time(cost, masked(false), len, 32, kUnits) == once);  // the last wave is not full
  CHECK(forward_time(cost, masked(true), len, 33, kUnits) < once * 0.6);
  CHECK(forward_time(cost, masked(true), {64, 4096}, 33, kUnits) >
        forward_time(cost, masked(false), {64, 4000}, 33, kUnits) * 0.98);
  // However few: one tile sees all keys.
  CHECK(forward_time(cost, masked(true), len, 1, kUnits) ==
        forward_time(cost, masked(false), len, 1, kUnits));
}

}  // namespace

int main() {
  test_choice(kSmallHeads, kSmallHeadsMeasured);
  test_choice(kHeadsOf96, kHeadsOf96Measured);
  test_choice(kHeadsOf128, kHeadsOf128Measured);
  test_packed(kSmallHeads, kSmallHeadsPacked);
  test_packed(kHeadsOf128, kHeadsOf128Packed);
  test_proportions();
  return check_report();
}
