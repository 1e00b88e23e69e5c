// Starts, lengths and page numbers that change between the check and the run, as another thread
// may change them, and between the tasks of a run: the CPU's launcher, which comes after the check,
// gets values out of a hat. It touches nothing but the arrays, and comes to an end.
#include <climits>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/plan.h"

using namespace flashattn;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 0;  // it watches the ends itself
#else
constexpr size_t kGuard = 256;
#endif

// Exactly so many elements.
template <class T>
class Exact {
 public:
  explicit Exact(int64_t count)
      : bytes_(static_cast<size_t>(count) * sizeof(T) + 2 * kGuard), memory_(new char[bytes_]) {
    fill();
  }

  void fill() const { std::fill_n(memory_.get(), bytes_, char{0x3b}); }  // as fp32 small and finite
  std::string bytes() const { return {memory_.get(), bytes_}; }

  T* data() const { return reinterpret_cast<T*>(memory_.get() + kGuard); }

  bool ends_untouched() const {
    for (size_t n = 0; n < kGuard; ++n) {
      if (memory_[n] != 0x3b || memory_[bytes_ - 1 - n] != 0x3b) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  std::unique_ptr<char[]> memory_;
};

constexpr int32_t kBatch = 3, kHeads = 4, kHeadsKv = 2, kDim = 16, kPage = 16, kPages = 5;
constexpr int32_t kLongestQ = 70, kLongestKv = 150;
constexpr int64_t kTotalQ = 100, kTotalKv = 200;

std::mt19937 random_numbers(1);
int32_t below(int32_t n) {
  return static_cast<int32_t>(random_numbers() % static_cast<uint32_t>(n));
}

int32_t any_number(int64_t usual) {
  switch (below(6)) {
    case 0: return static_cast<int32_t>(random_numbers());
    case 1: return static_cast<int32_t>(usual) + below(20) - 10;
    case 2: return -below(300);
    case 3: return below(2) ? INT_MAX : INT_MIN;
    default: return below(static_cast<int32_t>(usual) + 1);
  }
}

void draw_before_each(void* draw, int32_t count, flashattn_task_fn task, void* context) {
  for (int32_t n = 0; n < count; ++n) {
    (*static_cast<std::function<void()>*>(draw))();
    task(context, n);
  }
}

void test(uint32_t layout, bool lens, int32_t queries, int32_t threads, bool direct) {
  flashattn_desc desc;
  CHECK_OK(flashattn_desc_init(&desc, sizeof desc));
  const bool paged = layout & FLASHATTN_LAYOUT_PAGED_KV;
  const bool backward = !paged && !direct;
  desc.ops = FLASHATTN_OP_FORWARD;
  if (backward) desc.ops |= FLASHATTN_OP_BACKWARD;
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = kHeads;
  desc.heads_kv = kHeadsKv;
  desc.dim_qk = kDim;
  desc.layout = layout;
  desc.page_size = paged ? kPage : 0;
  desc.mask = below(2) ? FLASHATTN_MASK_CAUSAL : 0;
  desc.splits = direct ? below(4) : 0;
  desc.features = FLASHATTN_FEATURE_LSE | FLASHATTN_FEATURE_SINK;
  if (backward) desc.features |= FLASHATTN_FEATURE_DSINK;
  desc.threads = threads;
  const std::unique_ptr<Plan> plan = make_plan(desc);
  const bool varlen_q = layout & FLASHATTN_LAYOUT_VARLEN_Q;
  const bool varlen_kv = layout & FLASHATTN_LAYOUT_VARLEN_KV;
  const int64_t rows_q = varlen_q ? kTotalQ : kBatch * queries;
  const int64_t rows_kv = varlen_kv ? kTotalKv : paged ? kPages * kPage : kBatch * kLongestKv;
  const int64_t tokens = paged ? kPage : kLongestKv, pages = (kLongestKv + kPage - 1) / kPage;

  Exact<float> q(rows_q * kHeads * kDim), k(rows_kv * kHeadsKv * kDim),
      v(rows_kv * kHeadsKv * kDim);
  Exact<float> o(rows_q * kHeads * kDim), dout(rows_q * kHeads * kDim), lse(rows_q * kHeads);
  Exact<float> dq(rows_q * kHeads * kDim), dk(rows_kv * kHeadsKv * kDim);
  Exact<float> dv(rows_kv * kHeadsKv * kDim), sink(kHeads), dsink(kHeads);
  Exact<int32_t> cu_q(kBatch + 1), cu_kv(kBatch + 1), lens_q(kBatch), lens_kv(kBatch);
  Exact<int32_t> starts_kv(kBatch);
  Exact<int32_t> table(kBatch * pages);
  const auto at_q = [&](const Exact<float>& x) {
    return flashattn_tensor{x.data(), varlen_q ? 0 : int64_t{queries} * kHeads * kDim, kDim,
                            kHeads * kDim};
  };
  const auto at_kv = [&](const Exact<float>& x) {
    return flashattn_tensor{x.data(), varlen_kv ? 0 : tokens * kHeadsKv * kDim, kDim,
                            kHeadsKv * kDim};
  };
  BackwardArgs args{};
  args.shape.batch = kBatch;
  args.shape.seqlen_q = queries;
  args.shape.seqlen_kv = kLongestKv;
  args.shape.total_q = varlen_q ? kTotalQ : 0;
  args.shape.total_kv = varlen_kv ? kTotalKv : 0;
  args.inputs.q = at_q(q);
  args.inputs.k = at_kv(k);
  args.inputs.v = at_kv(v);
  args.inputs.sink = sink.data();
  if (varlen_q) args.inputs.cu_seqlens_q = cu_q.data();
  if (varlen_kv) args.inputs.cu_seqlens_kv = cu_kv.data();
  if (lens) args.inputs.lens_q = lens_q.data();
  if (lens || paged) args.inputs.lens_kv = lens_kv.data();
  if (!paged && below(2)) args.inputs.starts_kv = starts_kv.data();
  if (paged) {
    args.inputs.page_table = table.data();
    args.inputs.page_table_stride = pages;
    args.inputs.pages = kPages;
  }
  args.o = at_q(o);
  args.dout = at_q(dout);
  args.lse = lse.data();
  args.dq = at_q(dq);
  args.dk = at_kv(dk);
  args.dv = at_kv(dv);
  args.dsink = dsink.data();
  ForwardArgs forward{};
  forward.shape = args.shape;
  forward.inputs = args.inputs;
  forward.o = args.o;
  forward.lse = lse.data();
  const Exact<char> workspace(plan->launcher->workspace(FLASHATTN_OP_FORWARD, args.shape));
  const Exact<char> scratch(backward ? plan->launcher->workspace(FLASHATTN_OP_BACKWARD, args.shape)
                                     : 0);
  std::function<void()> draw = [&] {
    for (int32_t b = 0; b <= kBatch; ++b) {
      cu_q.data()[b] = any_number(kTotalQ);
      cu_kv.data()[b] = any_number(kTotalKv);
    }
    for (int32_t b = 0; b < kBatch; ++b) {
      lens_q.data()[b] = any_number(kLongestQ);
      lens_kv.data()[b] = any_number(kLongestKv);
      starts_kv.data()[b] = any_number(kLongestKv);
    }
    for (int64_t n = 0; n < kBatch * pages; ++n) table.data()[n] = any_number(kPages);
  };
  const auto run = [&](const Executor& on) {
    for (const Exact<float>* x : {&o, &lse, &dq, &dk, &dv, &dsink}) x->fill();
    CHECK_OK(plan->launcher->forward(forward, workspace.data(), on));
    if (backward) CHECK_OK(plan->launcher->backward(args, scratch.data(), on));
    return std::vector<std::string>{o.bytes(), lse.bytes(), dq.bytes(), dk.bytes(), dv.bytes()};
  };
  for (int round = 0; round < 30; ++round) {
    draw();
    const auto results = run({});
    if (backward) {  // each of its calls resolves them anew
      run({nullptr, {draw_before_each, &draw}});
    } else {
      CHECK(run({nullptr, {draw_before_each, &draw}}) == results);
    }
  }
  for (const Exact<float>* x : {&q, &k, &v, &o, &dout, &lse, &dq, &dk, &dv, &sink, &dsink}) {
    CHECK(x->ends_untouched());
  }
  CHECK(workspace.ends_untouched() && scratch.ends_untouched());
}

}  // namespace

int main() {
  const uint32_t q = FLASHATTN_LAYOUT_VARLEN_Q, kv = FLASHATTN_LAYOUT_VARLEN_KV;
  const uint32_t paged = FLASHATTN_LAYOUT_PAGED_KV;
  for (const uint32_t layout : {0u, q, kv, q | kv, paged, q | paged}) {
    for (const bool lens : {false, true}) {
      for (const int32_t threads : {1, 4}) {
        test(layout, lens, kLongestQ, threads, false);
        test(layout, lens, 3, threads, true);
      }
    }
  }
  return check_report();
}
