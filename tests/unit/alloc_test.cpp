// Host memory runs out at every place where the library asks for it: a status, no leak, nothing
// written. And running a plan asks for none, and formats no text.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "check.h"

namespace {

std::atomic<int64_t> g_live{0}, g_asked{0};
std::atomic<int64_t> g_fail_at{-1};  // the how-manieth request fails; -1: none

void* allocate(size_t bytes, size_t alignment) {
  const int64_t n = g_asked++;
  const int64_t fail_at = g_fail_at;
  if (fail_at >= 0 && n >= fail_at) return nullptr;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment < sizeof(void*) ? sizeof(void*) : alignment,
                     bytes ? bytes : 1) != 0) {
    return nullptr;
  }
  ++g_live;
  return memory;
}

void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* memory = allocate(bytes, alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void release(void* memory) {
  if (memory) --g_live;
  std::free(memory);
}

std::atomic<int64_t> g_formatted{0};

}  // namespace

// The linker lets the library call these (--wrap); the last two where the compiler is told to check
// the sizes of buffers.
extern "C" {
int __real_vsnprintf(char* text, size_t size, const char* format, va_list values);
int __wrap_vsnprintf(char* text, size_t size, const char* format, va_list values) {
  ++g_formatted;
  return __real_vsnprintf(text, size, format, values);
}
int __wrap_snprintf(char* text, size_t size, const char* format, ...) {
  va_list values;
  va_start(values, format);
  const int length = __wrap_vsnprintf(text, size, format, values);
  va_end(values);
  return length;
}
int __wrap___vsnprintf_chk(char* text, size_t size, int, size_t, const char* format,
                           va_list values) {
  return __wrap_vsnprintf(text, size, format, values);
}
int __wrap___snprintf_chk(char* text, size_t size, int, size_t, const char* format, ...) {
  va_list values;
  va_start(values, format);
  const int length = __wrap_vsnprintf(text, size, format, values);
  va_end(values);
  return length;
}
}

// All forms, so that nothing escapes the count.
void* operator new(size_t n) { return allocate_or_throw(n, 16); }
void* operator new[](size_t n) { return allocate_or_throw(n, 16); }
void* operator new(size_t n, std::align_val_t a) {
  return allocate_or_throw(n, static_cast<size_t>(a));
}
void* operator new[](size_t n, std::align_val_t a) {
  return allocate_or_throw(n, static_cast<size_t>(a));
}
void* operator new(size_t n, const std::nothrow_t&) noexcept { return allocate(n, 16); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept { return allocate(n, 16); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, size_t) noexcept { release(p); }
void operator delete[](void* p, size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { release(p); }

namespace {

constexpr int kSeq = 70, kHeads = 2, kDim = 24;

flashattn_desc make_desc() {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.ops = FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD;
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = kHeads;
  desc.dim_qk = kDim;
  desc.features = FLASHATTN_FEATURE_LSE;
  desc.max_batch = 1;
  desc.max_seqlen_q = desc.max_seqlen_kv = kSeq;
  return desc;
}

// Grants a call its first n requests, for every n until it needs no more; which is how many there
// are. Whatever is refused, the call says so; nothing is left behind.
template <class Call>
int64_t count_requests(Call call) {
  for (int64_t n = 0; n < 10000; ++n) {
    const int64_t live = g_live;
    g_asked = 0;
    g_fail_at = n;
    const int32_t status = call();
    g_fail_at = -1;
    const bool refused = g_asked > n;
    CHECK(status == (refused ? FLASHATTN_ERROR_OUT_OF_MEMORY : FLASHATTN_OK));
    CHECK(g_live == live);
    if (!refused) return n;
  }
  CHECK(!"the call came to an end");
  return -1;
}

void test_create() {
  const flashattn_desc desc = make_desc();
  flashattn_plan* plan = nullptr;
  CHECK_OK(
      flashattn_plan_create(&desc, &plan, nullptr));  // what is made once a process, is made now
  flashattn_plan_destroy(plan);

  flashattn_plan* const untouched = reinterpret_cast<flashattn_plan*>(&g_live);
  const int64_t requests = count_requests([&] {
    plan = untouched;
    const int32_t status = flashattn_plan_create(&desc, &plan, nullptr);
    CHECK((plan == untouched) == (status != FLASHATTN_OK));
    if (status == FLASHATTN_OK) flashattn_plan_destroy(plan);
    return status;
  });
  CHECK(requests >= 1);
}

// One that is accepted, and one whose refusal needs no memory.
void test_check() {
  flashattn_desc desc = make_desc();
  count_requests([&] { return flashattn_check(&desc, nullptr); });
  desc.heads_q = -1;
  g_asked = 0;
  g_fail_at = 0;
  const int32_t status = flashattn_check(&desc, nullptr);
  g_fail_at = -1;
  CHECK_STATUS(status, FLASHATTN_ERROR_INVALID_ARGUMENT);
  CHECK(g_asked == 0 && std::strstr(flashattn_last_error(nullptr, nullptr), "heads_q = -1"));
}

// No call asks for memory, failing ones included; only those format text. Calls are made twice: the
// first of a process is no exception.
template <class Call>
void check_asks_nothing(Call call, int32_t wanted) {
  for (int round = 0; round < 2; ++round) {
    const int64_t live = g_live;
    g_asked = 0;
    g_fail_at = 0;
    g_formatted = 0;
    const int32_t status = call();
    const bool formatted = g_formatted > 0;
    g_fail_at = -1;
    CHECK_STATUS(status, wanted);
    CHECK(formatted == (wanted != FLASHATTN_OK));
    CHECK(g_asked == 0);
    CHECK(g_live == live);
  }
}

void test_run() {
  const flashattn_desc desc = make_desc();
  flashattn_plan* plan = nullptr;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, nullptr))) return;
  constexpr int kElements = kSeq * kHeads * kDim, kRows = kSeq * kHeads;
  std::vector<float> x(8 * kElements + 2 * kRows, 0.25f);
  float* const data = x.data();
  const auto part = [&](int n) { return data + n * kElements; };

  flashattn_args forward;
  flashattn_args_init(&forward, sizeof forward);
  forward.batch = 1;
  forward.seqlen_q = forward.seqlen_kv = kSeq;
  forward.q.data = part(0);
  forward.k.data = part(1);
  forward.v.data = part(2);
  forward.o.data = part(3);
  forward.lse = part(8);
  flashattn_args backward = forward;
  backward.dout.data = part(4);
  backward.dq.data = part(5);
  backward.dk.data = part(6);
  backward.dv.data = part(7);
  flashattn_merge_args merge;
  flashattn_merge_args_init(&merge, sizeof merge);
  const flashattn_tensor part_o = forward.o;
  const float* const part_lse = forward.lse;
  merge.parts = 1;
  merge.batch = 1;
  merge.seqlen_q = kSeq;
  merge.part_o = &part_o;
  merge.part_lse = &part_lse;
  merge.o.data = part(5);
  merge.lse = part(8) + kRows;
  std::vector<uint8_t> keep(static_cast<size_t>(kRows) * kSeq);
  int64_t bytes = 0, more = 0;
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, nullptr, &bytes));
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_BACKWARD, nullptr, &more));
  if (more > bytes) bytes = more;
  std::vector<char> workspace(static_cast<size_t>(bytes) + 1);

  check_asks_nothing(
      [&] { return flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &forward, &more); },
      FLASHATTN_OK);
  check_asks_nothing(
      [&] { return flashattn_forward(plan, &forward, workspace.data(), bytes, nullptr); },
      FLASHATTN_OK);
  check_asks_nothing(
      [&] { return flashattn_backward(plan, &backward, workspace.data(), bytes, nullptr); },
      FLASHATTN_OK);
  check_asks_nothing([&] { return flashattn_merge(plan, &merge, nullptr); }, FLASHATTN_OK);
  check_asks_nothing([&] { return flashattn_dropout_mask(plan, &forward, keep.data(), nullptr); },
                     FLASHATTN_OK);
  check_asks_nothing([&] { return flashattn_forward(plan, nullptr, nullptr, 0, nullptr); },
                     FLASHATTN_ERROR_INVALID_ARGUMENT);
  flashattn_plan_destroy(plan);
}

// Into a cache of 8 bits, whose descales the call makes: the calls beside attention that make
// numbers of q, k and v.
void test_cache() {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F8E4M3;
  desc.dtype_o = FLASHATTN_DTYPE_F32;
  desc.heads_q = kHeads;
  desc.dim_qk = 32;
  desc.descale_block = 16;
  flashattn_plan* plan = nullptr;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, nullptr))) return;
  constexpr int kElements = kSeq * kHeads * 32, kBlocks = (kSeq + 15) / 16;
  std::vector<float> x(4 * kElements + kHeads * (3 * kBlocks + 32 + kSeq), 0.25f);
  std::vector<uint8_t> codes(3 * kElements);
  float* more = x.data() + 4 * kElements;
  const auto take = [&](int n) { return std::exchange(more, more + n); };

  flashattn_quantize_args quantize;
  flashattn_quantize_args_init(&quantize, sizeof quantize);
  quantize.batch = 1;
  quantize.seqlen_q = quantize.seqlen_kv = kSeq;
  quantize.dtype = FLASHATTN_DTYPE_F32;
  quantize.transform = FLASHATTN_TRANSFORM_ROTATE | FLASHATTN_TRANSFORM_SMOOTH_K;
  flashattn_tensor* const from[] = {&quantize.q, &quantize.k, &quantize.v};
  flashattn_tensor* const to[] = {&quantize.q_out, &quantize.k_out, &quantize.v_out};
  flashattn_tensor* const by[] = {&quantize.descale_q, &quantize.descale_k, &quantize.descale_v};
  for (int n = 0; n < 3; ++n) {
    from[n]->data = x.data() + n * kElements;
    to[n]->data = codes.data() + n * kElements;
    by[n]->data = take(kHeads * kBlocks);
  }
  quantize.k_mean.data = take(kHeads * 32);
  quantize.lse_shift = take(kHeads * kSeq);
  check_asks_nothing([&] { return flashattn_quantize(plan, &quantize, nullptr); }, FLASHATTN_OK);

  int32_t lens[] = {0}, lens_out[] = {0};
  flashattn_append_kv_args append;
  flashattn_append_kv_args_init(&append, sizeof append);
  append.batch = 1;
  append.seqlen_q = append.seqlen_kv = kSeq;
  append.dtype = FLASHATTN_DTYPE_F32;
  append.rotary_dim = 32;
  append.rotary_base = 10000.0f;
  append.lens_kv = lens;
  append.lens_out = lens_out;
  append.q = quantize.q;
  append.k = quantize.k;
  append.v = quantize.v;
  append.q_out.data = x.data() + 3 * kElements;
  append.k_cache = quantize.k_out;
  append.v_cache = quantize.v_out;
  append.descale_k = quantize.descale_k;
  append.descale_v = quantize.descale_v;
  append.update_descales = 1;
  check_asks_nothing([&] { return flashattn_append_kv(plan, &append, nullptr); }, FLASHATTN_OK);
  append.lens_kv = nullptr;
  check_asks_nothing([&] { return flashattn_append_kv(plan, &append, nullptr); },
                     FLASHATTN_ERROR_INVALID_ARGUMENT);
  flashattn_plan_destroy(plan);
}

}  // namespace

int main() {
  test_create();
  test_check();
  test_run();
  test_cache();
  return check_report();
}
