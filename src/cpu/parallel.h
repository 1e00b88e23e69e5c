// Threads of the CPU family.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

// No plan uses more.
constexpr int32_t kMostThreads = 1024;

// Threads that OpenMP offers to the first thread that asks, OMP_NUM_THREADS included; in a child
// made by fork one.
int32_t machine_threads();

// parallel_tasks without a type: body(context, task, thread).
void run_tasks(int32_t threads, int64_t count, void (*body)(const void*, int64_t, int32_t),
               const void* context);

// Runs body(task, thread) for every task in [0, count), on at most `threads` threads, and no more
// than the system gives, thread in [0, threads). Tasks start in ascending order: one that waits for
// an earlier one waits for something that runs. In a child made by fork the caller's thread does
// everything, for the others did not follow it there.
template <class Body>
void parallel_tasks(int32_t threads, int64_t count, const Body& body) {
  run_tasks(
      threads, count,
      [](const void* context, int64_t task, int32_t thread) {
        (*static_cast<const Body*>(context))(task, thread);
      },
      &body);
}

}  // namespace flashattn::cpu
