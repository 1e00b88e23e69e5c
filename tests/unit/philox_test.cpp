// The random numbers: known answers of Philox4x32-7 (the authors' kat_vectors), the layout of the
// dropout mask against its description in the header, and golden numbers that freeze it.
#include "core/philox.h"

#include "check.h"

using namespace flashattn;

namespace {

void test_known_answers() {
  const struct {
    PhiloxWords counter;
    uint32_t key[2];
    PhiloxWords output;
  } rows[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {0xffffffff, 0xffffffff},
       {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      // Digits of pi.
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (const auto& row : rows) {
    const PhiloxWords got = philox4x32_7(row.counter, row.key[0], row.key[1]);
    for (int w = 0; w < 4; ++w) CHECK(got.word[w] == row.output.word[w]);
  }
}

// The header's sentence, written out anew.
uint32_t described(uint64_t seed, uint64_t offset, uint32_t head, uint32_t i, uint32_t j) {
  const PhiloxWords words =
      philox4x32_7({{((j >> 4) << 5) | ((i & 7) << 2) | ((j & 7) >> 1), i >> 4, head,
                     static_cast<uint32_t>(offset & 0xffffffffu)}},
                   static_cast<uint32_t>(seed & 0xffffffffu),
                   static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
  const uint32_t word = words.word[((j >> 3) & 1) * 2 + ((i >> 3) & 1)];
  return (j % 2 == 0) ? (word & 0xffffu) : (word >> 16);
}

void test_layout() {
  const uint64_t seed = 0x0123456789abcdefu, offset = 0xfedcba9876543210u;
  const DropoutStream stream = DropoutStream::make(seed, offset, 11);
  bool same = true, distinct = true;
  for (uint32_t i = 0; i < 50; ++i) {
    for (uint32_t j = 0; j < 70; ++j) {
      same = same && stream.number(i, j) == described(seed, offset, 11, i, j);
    }
  }
  // Within a 16 x 16 tile, every half word of every call is used exactly once.
  bool used[32][8] = {};
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t j = 0; j < 16; ++j) {
      const uint32_t call = ((i & 7) << 2) | ((j & 7) >> 1);
      const uint32_t half = (((j >> 3) & 1) * 2 + ((i >> 3) & 1)) * 2 + (j & 1);
      distinct = distinct && !used[call][half];
      used[call][half] = true;
    }
  }
  CHECK(same);
  CHECK(distinct);
}

// Part of the ABI: these never change.
void test_golden() {
  const DropoutStream stream = DropoutStream::make(42, 7, 3);
  const struct {
    uint32_t i, j, number;
  } rows[] = {
      {0, 0, 18894},      {0, 1, 26849},
      {0, 2, 15215},      {1, 0, 61928},
      {8, 0, 35606},      {0, 8, 11036},
      {8, 9, 32361},      {15, 15, 32346},
      {16, 0, 12879},     {0, 16, 108},
      {7, 31, 25428},     {123, 456, 1874},
      {1023, 4095, 4231}, {2147483646, 2147483646, 63888},
  };
  for (const auto& row : rows) CHECK(stream.number(row.i, row.j) == row.number);
}

}  // namespace

int main() {
  test_known_answers();
  test_layout();
  test_golden();
  return check_report();
}
