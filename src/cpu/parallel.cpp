#include "cpu/parallel.h"

#include <unistd.h>

#include <atomic>

#if FLASHATTN_OPENMP
#include <omp.h>
#else
#include <memory>
#include <system_error>
#include <thread>
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
  static const int32_t threads = static_cast<int32_t>(std::thread::hardware_concurrency());
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
  const std::unique_ptr<std::thread[]> helpers(new std::thread[static_cast<size_t>(threads)]);
  try {
    for (int32_t thread = 1; thread < threads; ++thread) helpers[thread] = std::thread(work, thread);
  } catch (const std::system_error&) {
    // No more threads to be had: those that run share the work.
  }
  work(0);
  for (int32_t thread = 1; thread < threads; ++thread) {
    if (helpers[thread].joinable()) helpers[thread].join();
  }
#endif
}

}  // namespace flashattn::cpu
