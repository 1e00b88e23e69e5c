// PlanRows chooses among rows that are made up here: which runs a call, and why.
#include "cuda/host/plan_rows.h"

#include <cstdlib>

#include "check.h"

using namespace flashattn;
using namespace flashattn::cuda;

namespace {

// Takes queries up to `longest`, and only calls whose k has a pointer if needs_k.
struct FakeRow : ForwardRow {
  const char* name;
  double time;
  int32_t longest;
  bool needs_k;
  int64_t bytes;

  FakeRow(const char* name_, double time_, int32_t longest_ = INT32_MAX, bool needs_k_ = false,
          int64_t bytes_ = 0)
      : name(name_), time(time_), longest(longest_), needs_k(needs_k_), bytes(bytes_) {}
  const char* title() const override { return name; }
  bool supports(const Shape& shape, const char** why_not) const override {
    *why_not = "too long";
    return shape.seqlen_q <= longest;
  }
  bool accepts(const ForwardArgs& args) const override { return !needs_k || args.inputs.k.data; }
  RowCost cost(const Shape&) const override { return {time, time > 1 ? "slow" : nullptr}; }
  int64_t workspace(const Shape&) const override { return bytes; }
  std::string describe(const Shape&, flashattn_plan_properties*) const override { return ", rest"; }
  int32_t launch(const ForwardArgs&, void*, CUstream_st*) const override { return FLASHATTN_OK; }
};

PlanRows<ForwardRow> rows_of(std::initializer_list<FakeRow> list) {
  PlanRows<ForwardRow> plan;
  for (const FakeRow& row : list) plan.rows.emplace_back(new FakeRow(row));
  return plan;
}

std::string chosen(const PlanRows<ForwardRow>& plan, int32_t seqlen_q,
                   const ForwardArgs* args = nullptr) {
  return plan.choose({1, seqlen_q, 64, 0, 0}, args).title();
}

std::string why(const PlanRows<ForwardRow>& plan, int32_t seqlen_q) {
  flashattn_plan_properties properties{};
  return plan.why({1, seqlen_q, 64, 0, 0}, &properties);
}

void test_the_cheapest_runs() {
  const auto plan = rows_of({{"first", 0.8, 100}, {"second", 0.5, 10}, {"last", 1}});
  CHECK(chosen(plan, 10) == "second");
  CHECK(chosen(plan, 11) == "first");
  CHECK(chosen(plan, 101) == "last");
  // Among rows of equal cost the first one runs.
  CHECK(chosen(rows_of({{"first", 1}, {"last", 1}}), 1) == "first");
  CHECK(plan.workspace({1, 1, 1, 0, 0}) == 0);
  CHECK(rows_of({{"a", 1, 0, false, 7}, {"b", 1, 0, false, 9}}).workspace({}) == 9);
}

void test_arrays() {
  const auto plan = rows_of({{"first", 0.5, INT32_MAX, true}, {"last", 1}});
  ForwardArgs args{};
  CHECK(chosen(plan, 1) == "first");  // without a call: of one that it accepts
  CHECK(chosen(plan, 1, &args) == "last");
  args.inputs.k.data = &args;
  CHECK(chosen(plan, 1, &args) == "first");
}

void test_a_forced_backend() {
  auto plan = rows_of({{"own", 2, 10}, {"other", 1}});
  plan.own = 1;
  CHECK(chosen(plan, 1) == "other");
  plan.forced = true;
  CHECK(chosen(plan, 1) == "own");
  CHECK(chosen(plan, 11) == "other");  // its own row cannot run it
}

void test_reasons() {
  auto plan = rows_of({{"first", 1, 10}, {"last", 1}});
  CHECK(why(plan, 1) == "first, rest");
  CHECK(why(plan, 11) == "last (too long), rest");
  CHECK(why(rows_of({{"first", 3}, {"last", 1}}), 1) == "last (slow), rest");
  CHECK(why(rows_of({{"first", 1}, {"last", 0.5}}), 1) == "last, rest");
  CHECK(plan.why_of_unknown_shape() == "first or last; the shape decides, ask with one");
  plan.passed_over = "no TMA";
  CHECK(why(plan, 1) == "first (no TMA), rest");
}

template <int kNumber>
bool takes_dim(const Problem& problem, const char** why_not) {
  *why_not = "small heads";
  return problem.dim_qk > kNumber;
}

template <int kBytes>
std::unique_ptr<const ForwardRow> make_fake(const Problem&, const Device&) {
  return std::unique_ptr<const ForwardRow>(
      new FakeRow(kBytes ? "large" : "plain", 1, INT32_MAX, false, kBytes));
}

void test_the_rows_of_a_plan() {
  static const Registration<ForwardRow> registrations[] = {
      {{"fast"}, takes_dim<64>, make_fake<1000>},
      {{"slow", "fast"}, takes_dim<0>, make_fake<0>},
      {{"slow"}, takes_dim<0>, make_fake<0>},
  };
  const Registry<ForwardRow> registry = {registrations, 3};
  const auto made = [&](const char* backend, int32_t dim, int64_t limit) {
    Problem problem{};
    problem.dim_qk = dim;
    problem.workspace_limit = limit;
    PlanRows<ForwardRow> plan;
    plan.make(registry, backend, "", problem, {});
    return plan;
  };
  const auto fast = made("fast", 128, 0);
  CHECK(fast.rows.size() == 2 && fast.own == 1 && fast.passed_over.empty() && !fast.forced);
  const auto slow = made("slow", 128, 0);
  CHECK(slow.rows.size() == 2 && slow.own == 2);
  const auto small = made("fast", 64, 0);
  CHECK(small.rows.size() == 1 && small.own == 0 && small.passed_over == "small heads");
  // The last row stays, whatever it needs.
  const auto limited = made("fast", 128, 999);
  CHECK(limited.rows.size() == 1 && limited.own == 0);
  CHECK(limited.passed_over == "large need more than workspace_limit");
  CHECK(made("fast", 128, 1000).rows.size() == 2);
}

}  // namespace

int main() {
  unsetenv("FLASHATTN_BACKEND");
  test_the_cheapest_runs();
  test_arrays();
  test_a_forced_backend();
  test_reasons();
  test_the_rows_of_a_plan();
  return check_report();
}
