// Selection among backends that are made up here, the defaults of a Problem, and the guard.
#include "core/select.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "api/guard.h"
#include "check.h"
#include "core/cost.h"
#include "core/device.h"
#include "core/validate_desc.h"
#include "cpu/device.h"

using namespace flashattn;

namespace {

template <int32_t kMost>
bool wide(const Problem& p, const Device&) {
  return p.dim_qk > kMost;
}

template <int32_t kMost>
void explain_wide(const Problem& p, const Device&, char* text, size_t capacity) {
  std::snprintf(text, capacity, "dim_qk = %d is above %d", p.dim_qk, kMost);
}

bool softcapped(const Problem& p, const Device&) { return p.softcap > 0; }

void explain_softcap(const Problem& p, const Device&, char* text, size_t capacity) {
  std::snprintf(text, capacity, "softcap = %g is not offered", static_cast<double>(p.softcap));
}

std::unique_ptr<Launcher> no_plan(const Problem&, const Device&, const std::string&) {
  return nullptr;
}

const Predicate kNarrow[] = {
    {softcapped, FLASHATTN_REASON_SOFTCAP, "softcap", explain_softcap},
    {wide<64>, FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk", explain_wide<64>},
};
const Predicate kBroad[] = {
    {softcapped, FLASHATTN_REASON_SOFTCAP, "softcap", explain_softcap},
    {wide<256>, FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk", explain_wide<256>},
};
const Backend kFast = {"fast", FLASHATTN_DEVICE_CPU, kNarrow, 2, no_plan};
const Backend kSlow = {"slow", FLASHATTN_DEVICE_CPU, kBroad, 2, no_plan};
const Backend kOther = {"other", FLASHATTN_DEVICE_CUDA, nullptr, 0, no_plan};
// Needs the slow one.
const Predicate kNeeding[] = {
    {[](const Problem& p, const Device& d) { return softcapped(p, d) || wide<256>(p, d); },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "device",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "the slow backend refuses");
     },
     true},
};
const Backend kNeedy = {"needy", FLASHATTN_DEVICE_CPU, kNeeding, 1, no_plan};
const Backend* const kList[] = {&kOther, &kFast, &kSlow};
const BackendList kFamilies = {kList, 3};

const Device kDevice = {FLASHATTN_DEVICE_CPU, 0, {0, 0, 4, 0, "Some CPU", "baseline", 0, 0, 0}};

flashattn_desc make_desc(int32_t dim) {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_BF16;
  desc.heads_q = 8;
  desc.dim_qk = dim;
  return desc;
}

Problem problem_of(flashattn_desc desc) { return make_problem(desc); }

int32_t refusal_of(const Problem& problem, BackendList list) {
  return guard("test", [&](ErrorOut&) {
    select_backend(problem, kDevice, list, nullptr);
    return FLASHATTN_OK;
  });
}

void note(void* user, int32_t, const char* message) {
  char* text = static_cast<char*>(user);
  std::strncat(text, message, 300);
  std::strncat(text, "|", 2);
}

void test_select() {
  std::string passed_over;
  CHECK(&select_backend(problem_of(make_desc(64)), kDevice, kFamilies, &passed_over) == &kFast);
  CHECK(passed_over.empty());
  CHECK(&select_backend(problem_of(make_desc(65)), kDevice, kFamilies, &passed_over) == &kSlow);
  CHECK(passed_over == std::string("backend ") + kFast.name + " refuses: dim_qk = 65 is above 64");

  char lines[1024] = "";
  set_log(FLASHATTN_LOG_DEBUG, note, lines);
  CHECK(refusal_of(problem_of(make_desc(300)), kFamilies) == FLASHATTN_ERROR_UNSUPPORTED);
  set_log(FLASHATTN_LOG_OFF, nullptr, nullptr);
  CHECK(std::strstr(lines, "backend fast refuses: dim_qk = 300 is above 64|") != nullptr);
  CHECK(std::strstr(lines, "backend slow refuses: dim_qk = 300 is above 256|") != nullptr);
  CHECK(std::strstr(last_error().text, "Some CPU") != nullptr);

  // Of the two, the broad one came closer: it has only the softcap against this.
  flashattn_desc desc = make_desc(100);
  desc.softcap = 2;
  CHECK(refusal_of(problem_of(desc), kFamilies) == FLASHATTN_ERROR_UNSUPPORTED);
  CHECK(last_error().reason == FLASHATTN_REASON_SOFTCAP);
  CHECK(std::strcmp(last_error().field, "softcap") == 0);
  CHECK(std::strstr(last_error().text, "softcap = 2 is not offered") != nullptr);

  // Who needs it has one reason less, but says nothing.
  const Backend* const needy[] = {&kNeedy, &kSlow};
  desc.dim_qk = 300;
  CHECK(refusal_of(problem_of(desc), {needy, 2}) == FLASHATTN_ERROR_UNSUPPORTED);
  CHECK(last_error().reason == FLASHATTN_REASON_SOFTCAP);
  CHECK(refusal_of(problem_of(desc), {needy, 1}) == FLASHATTN_ERROR_UNSUPPORTED);
  CHECK(std::strstr(last_error().text, "the slow backend refuses") != nullptr);

  CHECK(refusal_of(problem_of(desc), {kList, 1}) == FLASHATTN_ERROR_UNSUPPORTED);
  CHECK(last_error().reason == FLASHATTN_REASON_NOT_IN_THIS_BUILD);
}

void test_defaults() {
  flashattn_desc desc = make_desc(64);
  desc.bias = FLASHATTN_BIAS_DENSE;
  const Problem p = problem_of(desc);
  CHECK(p.ops == FLASHATTN_OP_FORWARD && p.dtype_o == FLASHATTN_DTYPE_BF16);
  CHECK(p.heads_kv == 8 && p.q_heads_per_kv_head() == 1 && p.dim_v == 64);
  CHECK(p.dtype_bias == FLASHATTN_DTYPE_BF16 && p.scale == 0.125f);
  CHECK(p.dropout == 0 && p.struct_size == sizeof(flashattn_desc));
  CHECK(problem_of(make_desc(64)).dtype_bias == FLASHATTN_DTYPE_DEFAULT);
  desc.dropout = 0.5f;
  CHECK(problem_of(desc).dropout_threshold() == 32768);
  desc.heads_kv = 2;
  desc.scale = -3;
  CHECK(problem_of(desc).q_heads_per_kv_head() == 4 && problem_of(desc).scale == -3);
  // Kernels take the bits of a softcap that is off for zeros.
  desc.softcap = desc.dropout = -0.0f;
  CHECK(!std::signbit(problem_of(desc).softcap) && !std::signbit(problem_of(desc).dropout));
}

// Masks, sequences without keys, and bytes of pages.
void test_cost() {
  flashattn_desc desc = make_desc(64);
  desc.mask = FLASHATTN_MASK_WINDOW;
  desc.window_left = 3;
  const Problem window = problem_of(desc);
  const Shape shape = {2, 100, 100, 0, 0};
  const int64_t pairs = 1 + 2 + 3 + 97 * 4;
  CHECK(operation_cost(window, FLASHATTN_OP_FORWARD, shape).flops == 2 * 8 * pairs * 2 * 128);
  CHECK(operation_cost(window, FLASHATTN_OP_BACKWARD, shape).flops == 2 * 8 * pairs * 5 * 128);
  CHECK(operation_cost(window, FLASHATTN_OP_FORWARD, {2, 100, 0, 0, 0}).flops == 0);
  desc = make_desc(64);
  desc.heads_kv = 1;
  desc.layout = FLASHATTN_LAYOUT_PAGED_KV;
  desc.page_size = 16;
  const Cost paged = operation_cost(problem_of(desc), FLASHATTN_OP_FORWARD, {3, 1, 40, 0, 0});
  CHECK(paged.bytes == 3 * (8 * 64 * 2 * 2 + 40 * 64 * 2 * 2 + 3 * 4));
  desc = make_desc(64);
  desc.layout = FLASHATTN_LAYOUT_VARLEN_Q;
  // Two sequences of 4 and one of 2, each with 10 keys; the fourth gets nothing.
  CHECK(operation_cost(problem_of(desc), FLASHATTN_OP_FORWARD, {4, 4, 10, 10, 0}).flops ==
        8 * 100 * 2 * 128);
}

void test_guard() {
  CHECK(guard("test", [](ErrorOut&) { return FLASHATTN_OK; }) == FLASHATTN_OK);
  CHECK(guard("test", [](ErrorOut&) -> int32_t { throw std::bad_alloc(); }) ==
        FLASHATTN_ERROR_OUT_OF_MEMORY);
  CHECK(guard("test", [](ErrorOut&) -> int32_t { throw std::runtime_error("what it says"); }) ==
        FLASHATTN_ERROR_INTERNAL);
  CHECK(std::strstr(last_error().text, "what it says") != nullptr);
  CHECK(guard("test", [](ErrorOut&) -> int32_t { throw 1; }) == FLASHATTN_ERROR_INTERNAL);
  CHECK(guard("test", [](ErrorOut&) -> int32_t {
          return fail(FLASHATTN_ERROR_DEVICE, FLASHATTN_REASON_NONE, "", "%s", "broken");
        }) == FLASHATTN_ERROR_DEVICE);
  CHECK(std::strcmp(last_error().text, "broken") == 0);
}

void test_instruction_sets() {
  using cpu::is_preferred;
  CHECK(is_preferred("avx512", "GenuineIntel", 6));
  CHECK(is_preferred("neon", "", 0) && is_preferred("sve", "", 0) &&
        is_preferred("neon_bf16", "", 0));
  CHECK(is_preferred("avx512_bf16", "AuthenticAMD", 25) &&
        is_preferred("avx512_bf16", "AuthenticAMD", 26));
  CHECK(!is_preferred("avx512_bf16", "GenuineIntel", 6));
  CHECK(is_preferred("avx512_amx", "GenuineIntel", 6) && !is_preferred("avx512_amx", "", 0));
}

}  // namespace

int main() {
  test_select();
  test_defaults();
  test_cost();
  test_guard();
  test_instruction_sets();
  return check_report();
}
