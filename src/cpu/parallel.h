// Runs tasks on several threads: the library's pool, or the caller's own.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// The threads that run tasks.
struct Threads {
  int32_t max;  // the largest number of threads
  // Whether the work is worth waking threads that sleep, or calling the caller's pool. Otherwise
  // only threads of the library's pool that are still awake join the calling thread.
  bool wakes = true;
  const Parallel* parallel = nullptr;  // NULL: the pool
};

// parallel_tasks without a type: body(context, task, thread).
void run_tasks(const Threads& threads, int64_t count, int64_t affinity_stride,
               void (*body)(const void*, int64_t, int32_t), const void* context);

// Runs body(task, thread) for every task in [0, count), on at most threads.max threads. The
// caller's thread is always one of them; thread is in [0, threads.max). Tasks n, n +
// affinity_stride, n + 2 affinity_stride, ... work on the same data: they go to the same threads,
// also in the next call, as long as that keeps all threads busy. They begin in ascending order, and
// the thread that begins a task finishes it. A task may therefore wait for earlier tasks n - k
// affinity_stride, but for no others: those may not begin until it ends.
template <class Body>
void parallel_tasks(const Threads& threads, int64_t count, int64_t affinity_stride,
                    const Body& body) {
  run_tasks(
      threads, count, affinity_stride,
      [](const void* context, int64_t task, int32_t thread) {
        (*static_cast<const Body*>(context))(task, thread);
      },
      &body);
}

}  // namespace flashattn::cpu
