// Which arrays share memory, against a walk over all of their bytes; and strides that nobody steps
// by, which must not count.
#include "core/arrays.h"

#include <climits>
#include <random>
#include <set>

#include "check.h"
#include "core/error.h"

using namespace flashattn;

namespace {

const char kMemory[4096] = {};

Array array_at(int64_t at, int32_t element, Use use, const int64_t (&extent)[4],
               const int64_t (&stride)[3]) {
  Array array = packed_array("x", use, kMemory + at, element, 0);
  for (int d = 0; d < 4; ++d) {
    array.extent[d] = extent[d];
    array.stride[d] = d < 3 ? stride[d] : 1;
  }
  return array;
}

std::set<uintptr_t> bytes_of(const Array& a) {
  std::set<uintptr_t> bytes;
  for (int64_t b = 0; b < a.extent[0]; ++b) {
    for (int64_t h = 0; h < a.extent[1]; ++h) {
      for (int64_t i = 0; i < a.extent[2]; ++i) {
        for (int64_t c = 0; c < a.extent[3]; ++c) {
          const int64_t at = b * a.stride[0] + h * a.stride[1] + i * a.stride[2] + c;
          for (int32_t n = 0; n < a.element; ++n) {
            bytes.insert(reinterpret_cast<uintptr_t>(a.data) +
                         static_cast<uintptr_t>(at * a.element + n));
          }
        }
      }
    }
  }
  return bytes;
}

bool accepted(Array* array) {
  try {
    check_array(array);
  } catch (const Refused&) {
    return false;
  }
  return true;
}

// The whole set of bytes, as steps and runs say.
bool described(const Array& a, const std::set<uintptr_t>& bytes) {
  std::set<uintptr_t> places{a.begin};
  for (int32_t n = 0; n < a.steps; ++n) {
    std::set<uintptr_t> more;
    for (const uintptr_t place : places) {
      for (int64_t t = 0; t < a.step[n].count; ++t) {
        more.insert(place + static_cast<uintptr_t>(t * a.step[n].bytes));
      }
    }
    places = more;
  }
  std::set<uintptr_t> found;
  for (const uintptr_t place : places) {
    for (int64_t n = 0; n < a.run; ++n) found.insert(place + static_cast<uintptr_t>(n));
  }
  return found == bytes;
}

// An output and another array of strides of their own, or of the same.
void check_random(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int32_t n) { return static_cast<int64_t>(random() % n); };
  int wrong = 0, shared = 0, apart = 0, misdescribed = 0;
  for (int round = 0; round < 60000; ++round) {
    int64_t stride[2][3], extent[2][4];
    const bool same = below(2);
    for (int x = 0; x < 2; ++x) {
      int64_t next = 1 + below(4);
      for (int d = 2; d >= 0; --d) {
        extent[x][d] = 1 + below(3);
        stride[x][d] = below(6) == 0 ? below(12) : next;
        next = stride[x][d] * (1 + below(4)) + below(3);
      }
      extent[x][3] = 1 + below(4);
      if (below(3) == 0) std::swap(stride[x][0], stride[x][2]);
    }
    if (same) std::copy(stride[0], stride[0] + 3, stride[1]);
    const int32_t element = 1 << below(3), other = same ? element : 1 << below(3);
    Array x = array_at(below(30) * 4, element, Use::kOutput, extent[0], stride[0]);
    Array y =
        array_at(below(30) * 4, other, below(2) ? Use::kOutput : Use::kInput, extent[1], stride[1]);
    if (!accepted(&x) || !accepted(&y)) continue;
    const std::set<uintptr_t> in_x = bytes_of(x), in_y = bytes_of(y);
    misdescribed += !described(x, in_x) || !described(y, in_y);
    bool truth = false;
    for (const uintptr_t byte : in_x) truth = truth || in_y.count(byte) != 0;
    wrong += share_memory(x, y) != truth || share_memory(y, x) != truth;
    shared += truth;
    apart += !truth && x.begin < y.end && y.begin < x.end;
  }
  CHECK(wrong == 0 && misdescribed == 0);
  CHECK(shared > 1000 && apart > 1000);
}

// Equal strides are decided at any size: heads of q, k and v side by side in each of many tokens.
void check_large() {
  constexpr int64_t kTokens = 1 << 20, kBatch = 64, kDim = 128, kRow = 3 * 16 * kDim;
  const auto part = [](int64_t heads, int64_t at, int64_t tokens) {
    const int64_t extent[] = {kBatch, heads, tokens, kDim};
    Array array = array_at(0, 2, Use::kOutput, extent, {kTokens * kRow, kDim, kRow});
    array.data = reinterpret_cast<const void*>(uintptr_t{1} << 40);
    array.data = static_cast<const char*>(array.data) + at * 2;
    check_array(&array);
    return array;
  };
  const Array dq = part(16, 0, kTokens);
  CHECK(!share_memory(dq, part(16, 16 * kDim, kTokens)));
  CHECK(!share_memory(dq, part(32, 16 * kDim, kTokens - 5)));
  CHECK(share_memory(dq, part(16, 15 * kDim, kTokens)));
  CHECK(share_memory(dq, part(16, 16 * kDim - 1, kTokens)));
  CHECK(share_memory(dq, part(33, 16 * kDim, kTokens)));
  CHECK(!share_memory(dq, part(16, kTokens * kRow / 2 * 3 + 16 * kDim, kTokens / 2)));
  CHECK(share_memory(dq, part(1, kTokens * kRow * 63 + 777 * kRow + kDim, 1)));
  CHECK(!share_memory(dq, part(1, kTokens * kRow * 63 + 777 * kRow + 16 * kDim, 1)));
  // Without gaps, anywhere: between two tokens' heads, and over them.
  const auto dense = [](int64_t at, int64_t count) {
    Array array = packed_array(
        "y", Use::kInput, reinterpret_cast<const char*>((uintptr_t{1} << 40) + at * 2), 2, count);
    check_array(&array);
    return array;
  };
  CHECK(!share_memory(dq, dense(kRow * 12345 + 16 * kDim, 32 * kDim)));
  CHECK(share_memory(dq, dense(kRow * 12345 + 16 * kDim, 32 * kDim + 1)));
}

void check_strides() {
  const int64_t one[] = {1, 4, 1, 8}, none[] = {2, 4, 0, 8}, all[] = {3, 4, 5, 8};
  const auto is = [](const flashattn_tensor& t, int64_t batch, int64_t head, int64_t seq) {
    return t.stride_batch == batch && t.stride_head == head && t.stride_seq == seq;
  };
  const flashattn_tensor packed = {nullptr, -1, -1, -1};
  CHECK(is(resolve_strides(packed, all, Order::kTokens), 160, 8, 32));
  CHECK(is(resolve_strides(packed, all, Order::kHeads), 160, 40, 8));
  // As they stand; each of its own.
  CHECK(is(resolve_strides({nullptr, 1000, 0, -1}, all, Order::kTokens), 1000, 0, 8));
  CHECK(is(resolve_strides({nullptr, -1, -1, 64}, all, Order::kHeads), 160, 40, 64));
  // Packed without the indices that repeat.
  CHECK(is(resolve_strides({nullptr, -1, 0, -1}, all, Order::kHeads), 40, 0, 8));
  CHECK(is(resolve_strides({nullptr, 0, -1, 0}, all, Order::kHeads), 0, 8, 0));
  // Idle: with elements, those of extents of 1; without, all.
  CHECK(is(resolve_strides({nullptr, INT64_MAX, 8, -3}, one, Order::kTokens), 0, 8, 0));
  CHECK(is(resolve_strides({nullptr, INT64_MAX, 8, -1}, none, Order::kTokens), 0, 0, 0));
  // Of a sum 0 has a meaning.
  flashattn_tensor sum = {nullptr, INT64_MAX, 8, 0};
  strided_array("dbias", Use::kSum, &sum, none, Order::kHeads, 4);
  CHECK(is(sum, 1, 1, 0));
}

}  // namespace

int main() {
  check_random(1);
  check_large();
  check_strides();
  return check_report();
}
