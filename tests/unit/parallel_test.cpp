// Every task runs once, on a thread of those asked for, however many queues the threads have; a
// task may wait for earlier ones of its strand; and the caller's own threads may be any.
#include "cpu/parallel.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/os.h"

using namespace flashattn::cpu;
using flashattn::Parallel;

namespace {

// Each task waits for the one `back` strands before it, if there is one; back 0: for none.
bool right(const Threads& threads, int64_t count, int64_t affinity_stride, int64_t back) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
  std::vector<std::atomic<int>> inside(static_cast<size_t>(threads.max));
  std::atomic<bool> good{true};
  parallel_tasks(threads, count, affinity_stride, [&](int64_t task, int32_t thread) {
    if (thread < 0 || thread >= threads.max) {
      good = false;
      return;
    }
    // Scratch memory is by this number.
    if (inside[static_cast<size_t>(thread)]++ != 0) good = false;
    const int64_t earlier = task - back * affinity_stride;
    if (back > 0 && earlier >= 0) {
      while (!runs[static_cast<size_t>(earlier)]) std::this_thread::yield();
    }
    ++runs[static_cast<size_t>(task)];
    --inside[static_cast<size_t>(thread)];
  });
  for (const std::atomic<int>& each : runs) {
    if (each != 1) good = false;
  }
  return good;
}

// The caller's own threads: ways to run what they are given.
struct Own {
  const char* name;
  void (*parallel)(void* user, int32_t n, void (*task)(void*, int32_t), void* context);
};
const Own kOwn[] = {
    {"one after the other",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) {
       for (int32_t i = 0; i < n; ++i) task(context, i);
     }},
    {"backwards",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) {
       for (int32_t i = n - 1; i >= 0; --i) task(context, i);
     }},
    {"a thread for each",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) {
       std::vector<std::thread> threads;
       for (int32_t i = 0; i < n; ++i) threads.emplace_back(task, context, i);
       for (std::thread& thread : threads) thread.join();
     }},
    {"another thread alone",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) {
       std::thread([=] {
         for (int32_t i = 0; i < n; ++i) task(context, i);
       }).join();
     }},
    // Against what it promised.
    {"some twice, at once, and some that are none",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) {
       std::vector<std::thread> threads;
       for (int32_t i = -1; i <= n; ++i) {
         for (int times = 0; times < 2; ++times) threads.emplace_back(task, context, i);
       }
       for (std::thread& thread : threads) thread.join();
     }},
    {"one of them",
     [](void*, int32_t n, void (*task)(void*, int32_t), void* context) { task(context, n / 2); }},
    {"none", [](void*, int32_t, void (*)(void*, int32_t), void*) {}},
};

void test_shapes(const Parallel* parallel) {
  for (const int32_t most : {1, 2, 3, 4, 16}) {
    for (const int64_t affinity_stride : {1, 2, 3, 4, 6, 16, 40}) {
      for (const int64_t count : {0, 1, 5, 48, 300}) {
        for (const int64_t back : {0, 1, 3}) {
          CHECK(right({most, true, parallel}, count, affinity_stride, back));
        }
      }
    }
  }
}

// More threads at once than the pool serves, some of which ask for more than others.
void test_many_callers() {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int32_t n = 0; n < 100; ++n) {
    callers.emplace_back([&wrong, n] {
      for (int times = 0; times < 20; ++times) {
        wrong += !right({2 + n % 7, n % 3 != 0, nullptr}, 40 + n, 1 + n % 5, n % 2);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

// Threads of the pool whose affinity mask has so many processors fewer than this thread's.
int pool_threads_without(int processors) {
  cpu_set_t all, mask;
  CPU_ZERO(&all);
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    CPU_ZERO(&mask);
    if (name != "flashattn" ||
        sched_getaffinity(atoi(task.path().filename().c_str()), sizeof mask, &mask) != 0)
      continue;
    found += CPU_COUNT(&mask) == CPU_COUNT(&all) - processors;
  }
  return found;
}

// Linux cannot wake a thread of the pool behind the caller whom it is to help.
void test_sleeping_threads_avoid_the_caller() {
  if (flashattn::os::usable_processors() < 2) return;
  bool awake = false, asleep = false;  // seen with the right mask; it joins only while a call lasts
  for (int n = 0; n < 1000 && !(awake && asleep); ++n) {
    parallel_tasks({2}, 50, 1, [&](int64_t, int32_t thread) {
      if (thread == 1 && !awake) awake = pool_threads_without(0) == 1;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (pool_threads_without(1) == 1) asleep = true;
  }
  CHECK(awake && asleep);
}

}  // namespace

int main() {
  test_sleeping_threads_avoid_the_caller();
  test_shapes(nullptr);
  CHECK(right({kMaxThreads}, 3000, kMaxThreads, 1));
  CHECK(right({kMaxThreads}, 3000, 1, 1));
  test_many_callers();
  for (const Own& own : kOwn) {
    const Parallel parallel{own.parallel, nullptr};
    const int before = check_failed;
    test_shapes(&parallel);
    if (check_failed != before) printf("with the caller's threads: %s\n", own.name);
  }
  // Work that is not worth it stays on the caller's thread.
  bool asked = false;
  const Parallel parallel{[](void* user, int32_t, void (*)(void*, int32_t), void*) {
                            *static_cast<bool*>(user) = true;
                          },
                          &asked};
  CHECK(right({4, false, &parallel}, 100, 1, 1) && !asked);
  CHECK(right({4, true, &parallel}, 100, 1, 1) && asked);
  return check_report();
}
