// Where new tokens go, whatever lengths say: inside the cache and its tables. And the cosines and
// sines of angles in turns, against those of the C library.
#include "core/append_rows.h"

#include <climits>
#include <cmath>
#include <random>

#include "check.h"

using namespace flashattn;

namespace {

constexpr int32_t kBatch = 3;

// Angles near the ends of quarters and eighths of a turn, and anywhere.
void test_cos_sin() {
  std::mt19937_64 random(1);
  double worst = 0, norm = 0;
  for (int n = 0; n < 200000; ++n) {
    const uint64_t edge = (random() & 7) << 61;
    const uint64_t turns = n % 2 ? random() : edge + (random() >> (random() % 64)) - (random() & 1);
    const double angle = std::ldexp(static_cast<double>(turns >> 11), -53) * 2 * M_PI;
    const CosSin x = cos_sin_of_turns(turns);
    worst = std::max({worst, std::abs(double{x.cos} - std::cos(angle)),
                      std::abs(double{x.sin} - std::sin(angle))});
    norm = std::max(norm, std::abs(double{x.cos} * x.cos + double{x.sin} * x.sin - 1));
  }
  // fp32 rounds by 3e-8.
  CHECK(worst < 3.5e-8);
  CHECK(norm < 9e-8);
  constexpr CosSin kQuarter = cos_sin_of_turns(uint64_t{1} << 62);
  static_assert(kQuarter.cos == 0 && kQuarter.sin == 1, "computed by compilers, too");
}

struct Call {
  Problem problem{};
  AppendArgs args{};
  int32_t cu_q[kBatch + 1], cu_kv[kBatch + 1], lens_q[kBatch], lens[kBatch], starts[kBatch],
      positions[kBatch];

  Call(bool packs_q, bool packs_kv, bool has_starts, bool has_positions) {
    problem.layout =
        (packs_q ? FLASHATTN_LAYOUT_VARLEN_Q : 0) | (packs_kv ? FLASHATTN_LAYOUT_VARLEN_KV : 0);
    args.shape = {kBatch, 9, 40, packs_q ? 20 : 0, packs_kv ? 70 : 0};
    args.inputs.cu_seqlens_q = packs_q ? cu_q : nullptr;
    args.inputs.cu_seqlens_kv = packs_kv ? cu_kv : nullptr;
    args.inputs.lens_kv = lens;
    args.inputs.lens_q = has_positions ? lens_q : nullptr;
    args.inputs.starts_kv = has_starts ? starts : nullptr;
    args.positions = has_positions ? positions : nullptr;
  }
};

void test_sense() {
  Call call(false, false, true, false);
  const int32_t lens[] = {0, 31, 38}, starts[] = {0, 5, 38};
  std::copy_n(lens, kBatch, call.lens);
  std::copy_n(starts, kBatch, call.starts);
  const int32_t stored[] = {9, 9, 2};
  for (int32_t b = 0; b < kBatch; ++b) {
    const AppendRows r = append_rows(call.problem, call.args, b);
    CHECK(r.tokens == 9 && r.stored == stored[b] && r.end == lens[b] + stored[b]);
    CHECK(r.sequence.offset_kv + r.sequence.len.kv == lens[b]);
    CHECK(r.position == lens[b] - starts[b]);
  }
}

void test_hostile() {
  std::mt19937 random(2);
  const int32_t values[] = {INT_MIN, -1, 0, 1, 9, 20, 40, 41, 69, 70, 71, INT_MAX};
  const auto any = [&] {
    return random() % 3 ? values[random() % (sizeof values / sizeof *values)]
                        : static_cast<int32_t>(random() % 75);
  };
  float table = 0;
  for (int n = 0; n < 20000; ++n) {
    Call call(n & 1, n & 2, n & 4, n & 8);
    for (int32_t* list : {call.cu_q, call.cu_kv}) {
      for (int32_t b = 0; b <= kBatch; ++b) list[b] = any();
    }
    for (int32_t* list : {call.lens_q, call.lens, call.starts, call.positions}) {
      for (int32_t b = 0; b < kBatch; ++b) list[b] = any();
    }
    const Shape& shape = call.args.shape;
    for (int32_t b = 0; b < kBatch; ++b) {
      const AppendRows r = append_rows(call.problem, call.args, b);
      const int64_t first = r.sequence.offset_kv + r.sequence.len.kv;
      CHECK(r.tokens >= 0 && r.tokens <= shape.seqlen_q && r.stored >= 0 && r.stored <= r.tokens);
      CHECK(first >= 0 && first + r.stored <= (n & 2 ? shape.total_kv : shape.seqlen_kv));
      CHECK(r.sequence.offset_q >= 0 &&
            r.sequence.offset_q + r.tokens <= (n & 1 ? shape.total_q : shape.seqlen_q));
      CHECK(r.end >= r.stored && r.end <= shape.seqlen_kv);
      CHECK(rotary_position(call.args, r.position, 8) >= 0);
      call.args.rotary_cos.data = &table;
      call.args.rotary_positions = 12;
      const int64_t row = rotary_position(call.args, r.position, 8);
      CHECK(row >= 0 && row < 12);
      call.args.rotary_cos.data = nullptr;
    }
  }
}

}  // namespace

int main() {
  test_cos_sin();
  test_sense();
  test_hostile();
  return check_report();
}
