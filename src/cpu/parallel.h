// Tasks on several threads: those of the library's pool, or the caller's own.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// Who runs tasks.
struct Threads {
  int32_t max;
  // Whether the work is worth waking threads that sleep, or asking the caller's. Otherwise only
  // threads of the pool take part that have just ended other work.
  bool wakes = true;
  const Parallel* parallel = nullptr;  // NULL: the pool
};

// parallel_tasks without a type: body(context, task, thread).
void run_tasks(const Threads& threads, int64_t count, int64_t affinity_stride,
               void (*body)(const void*, int64_t, int32_t), const void* context);

// Runs body(task, thread) for every task in [0, count), on at most threads.max threads, and no
// more than there are, the caller's always among them, thread in [0, threads.max). Tasks n and
// n + strands, n + 2 strands, ... work on the same data: as far as it comes out even, some threads
// have them first, the same ones in every call, which find it in their caches. They are begun in
// ascending order, each by a thread that then runs it to its end: a task may wait for earlier ones
// of its strand, but for no others, which perhaps no thread begins before it ends.
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
