#include "cpu/parallel.h"

#include <unistd.h>

#include <atomic>

#if FLASHATTN_OPENMP
#include <omp.h>
#else
#include <pthread.h>

#include <algorithm>
#endif

namespace flashattn::cpu {
namespace {

// The process that loaded the library.
pid_t owner;

__attribute__((constructor)) void remember_owner() { owner = getpid(); }

// Whether this process is a fork of it. The threads of the OpenMP runtime, which others in the
// process may have used before, did not follow it here, and a parallel region would wait for them.
bool is_forked_child() { return getpid() != owner; }

}  // namespace

int32_t machine_threads() {
#if FLASHATTN_OPENMP
  static const int32_t threads = omp_get_max_threads();
#else
  static const int32_t threads = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
#endif
  return threads < 1 ? 1 : threads;
}

void run_tasks(int32_t threads, int64_t count, void (*body)(const void*, int64_t, int32_t),
               const void* context) {
  if (count < threads) threads = static_cast<int32_t>(count);
  if (threads <= 1 || is_forked_child()) {
    for (int64_t task = 0; task < count; ++task) body(context, task, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&](int32_t thread) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      body(context, task, thread);
    }
  };
#if FLASHATTN_OPENMP
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
#else
  // Threads of this call alone, on plain POSIX so that nothing is allocated here.
  constexpr int32_t kMost = 256;
  struct Helper {
    decltype(work)* run;
    int32_t thread;
    pthread_t id;
  } helpers[kMost];
  int32_t started = 1;
  for (; started < std::min(threads, kMost); ++started) {
    Helper& helper = helpers[started];
    helper = {&work, started, {}};
    const auto main = [](void* argument) -> void* {
      const Helper* self = static_cast<const Helper*>(argument);
      (*self->run)(self->thread);
      return nullptr;
    };
    // No more threads to be had: those that run share the work.
    if (pthread_create(&helper.id, nullptr, main, &helper) != 0) break;
  }
  work(0);
  for (int32_t thread = 1; thread < started; ++thread) pthread_join(helpers[thread].id, nullptr);
#endif
}

}  // namespace flashattn::cpu
