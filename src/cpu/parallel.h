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
void run_tasks(int32_t threads, int64_t count, int64_t strands,
               void (*body)(const void*, int64_t, int32_t), const void* context);

// Runs body(task, thread) for every task in [0, count), on at most `threads` threads, and no more
// than the system gives, thread in [0, threads). Tasks n and n + strands, n + 2 strands, ... work
// on the same data: as far as it comes out even, some threads have them first, the same ones in
// every call, which find it in their caches. These start them in ascending order, so that the first
// task of all that has not ended runs or is about to start: a task may wait for earlier ones. In a
// child made by fork the caller's thread does everything, for the others did not follow it there.
template <class Body>
void parallel_tasks(int32_t threads, int64_t count, int64_t strands, const Body& body) {
  run_tasks(
      threads, count, strands,
      [](const void* context, int64_t task, int32_t thread) {
        (*static_cast<const Body*>(context))(task, thread);
      },
      &body);
}

}  // namespace flashattn::cpu
