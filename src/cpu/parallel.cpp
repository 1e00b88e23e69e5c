#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>

#include "core/float_environment.h"
#include "core/mask_geometry.h"

namespace flashattn::cpu {
namespace {

// Queues of tasks. Each has threads of its own, which take tasks from other queues once theirs is
// empty.
class Queues {
 public:
  Queues(int32_t threads, int64_t count, int64_t affinity_stride,
         void (*body)(const void*, int64_t, int32_t), const void* context)
      : queues_(static_cast<int32_t>(std::gcd(affinity_stride, threads))),
        count_(count),
        body_(body),
        context_(context) {
    for (int32_t q = 0; q < queues_; ++q) new (&begun(q)) std::atomic<int64_t>(0);
  }

  // Runs on each thread; returns when all tasks have begun.
  void work(int32_t thread) {
    const FloatEnvironment environment;  // each thread has its own
    const int32_t own = thread % queues_;
    for (int32_t queue = own; queue >= 0; queue = longest()) {
      do {
        const int64_t n = begun(queue).fetch_add(1, std::memory_order_relaxed);
        if (n >= size(queue)) break;
        body_(context_, n * queues_ + queue, thread);
      } while (queue == own);
    }
  }

 private:
  // Where there is room, each lies in a cache line of its own.
  std::atomic<int64_t>& begun(int32_t queue) {
    return begun_[queues_ <= kMaxThreads / 8 ? 8 * queue : queue];
  }
  int64_t size(int32_t queue) const { return ceil_div(count_ - queue, queues_); }

  // The queue with the most tasks that have not begun; -1: none has any.
  int32_t longest() {
    int32_t found = -1;
    int64_t most = 0;
    for (int32_t q = 0; q < queues_; ++q) {
      const int64_t left = size(q) - begun(q).load(std::memory_order_relaxed);
      if (left > most) found = q, most = left;
    }
    return found;
  }

  const int32_t queues_;
  const int64_t count_;
  void (*const body_)(const void*, int64_t, int32_t);
  const void* const context_;
  union {  // only queues_ of them are constructed
    std::atomic<int64_t> begun_[kMaxThreads];
  };
};

// Queues for the caller's threads, which may pass a number twice, or a wrong one.
struct OfferedQueues {
  Queues queues;
  int32_t threads;
  ThreadNumbers numbers;
};

}  // namespace

void run_tasks(const Threads& threads, int64_t count, int64_t affinity_stride,
               void (*body)(const void*, int64_t, int32_t), const void* context) {
  const auto most = static_cast<int32_t>(std::min<int64_t>(threads.max, count));
  if (most <= 1 || (threads.parallel && !threads.wakes)) {
    for (int64_t task = 0; task < count; ++task) body(context, task, 0);
    return;
  }
  if (!threads.parallel) {
    Queues queues(most, count, affinity_stride, body, context);
    run_on_pool(
        most, threads.wakes,
        [](void* all, int32_t thread) { static_cast<Queues*>(all)->work(thread); }, &queues);
    return;
  }
  OfferedQueues offered{{most, count, affinity_stride, body, context}, most, {}};
  const auto take_part = [](void* all, int32_t thread) {
    auto& own = *static_cast<OfferedQueues*>(all);
    if (thread < 0 || thread >= own.threads || !own.numbers.take(thread)) return;
    own.queues.work(thread);
  };
  threads.parallel->run(threads.parallel->user, most, take_part, &offered);
  // Begins what the caller's function did not, though it must run all.
  offered.queues.work(0);
}

}  // namespace flashattn::cpu
