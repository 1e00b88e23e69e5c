// The target of libFuzzer, of AFL and of main.cpp.
#include "target.h"

namespace fuzz {
namespace {

struct Destroy {
  void operator()(flashattn_plan* plan) const { flashattn_plan_destroy(plan); }
};
using Plan = std::unique_ptr<flashattn_plan, Destroy>;

// check and plan_create, which must agree; NULL where they refuse.
Plan make_plan(Round* round) {
  Input* const in = round->in;
  flashattn_desc* const desc = draw_sized(in, round->request.desc, &round->structs, "desc");
  flashattn_error* const errors[2] = {draw_error(in, &round->structs),
                                      draw_error(in, &round->structs)};
  const bool same_errors =
      (errors[0] ? errors[0]->struct_size : 1) == 1 || errors[0]->struct_size >= sizeof *errors[0];
  const Answer checked = ask("check", errors[0], [&] { return flashattn_check(desc, errors[0]); });
  flashattn_plan* plan = nullptr;
  const Answer made =
      ask("plan_create", errors[1], [&] { return flashattn_plan_create(desc, &plan, errors[1]); });
  FUZZ_CHECK((made.status == FLASHATTN_OK) == (plan != nullptr), "status %d, plan %p", made.status,
             static_cast<void*>(plan));
  if (!in->careless) {
    FUZZ_CHECK(checked == made, "check: %s", checked.message.c_str());
    FUZZ_CHECK(plan, "a good descriptor");
  }
  const bool about_error = checked.message.find("struct_size of error") == 0 ||
                           made.message.find("struct_size of error") == 0;
  FUZZ_CHECK(checked == made || about_error || !same_errors, "check: %s", checked.message.c_str());
  return Plan(plan);
}

}  // namespace

Round run_input(const uint8_t* data, size_t size) {
  Input in(data, size);
  Round round{};
  round.in = &in;
  in.careless = in.one_in(3);
  round.request = draw_request(&in);
  const Plan plan = make_plan(&round);
  if (!plan) {
    round.deeds = kRefusedPlan;
    return round;
  }
  round.plan = plan.get();
  round.seen = round.request.desc;
  flashattn_desc other = round.request.desc;
  other.struct_size = sizeof other;
  other.threads = other.threads % 3 + 1;
  flashattn_plan* twin = nullptr;
  FUZZ_CHECK(flashattn_plan_create(&other, &twin, nullptr) == FLASHATTN_OK,
             "the same with %d threads", other.threads);
  const Plan owner(twin);
  round.twin = twin;
  question_plan(&round);
  run_operations(&round);
  if (in.one_in(3)) run_merge(&round);
  if (in.one_in(4)) run_dropout_mask(&round);
  if (in.one_in(3)) run_append(&round);
  if (in.one_in(3)) run_quantize(&round);
  round.in = nullptr;
  return round;
}

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::run_input(data, size);
  return 0;
}
