// Every task runs once, on a thread of those asked for, however many queues the threads have; and a
// task may wait for earlier ones, its own strand's or others'.
#include "cpu/parallel.h"

#include <atomic>
#include <initializer_list>
#include <thread>
#include <vector>

#include "check.h"

using namespace flashattn::cpu;

namespace {

// Each task waits for the one `back` before it, if there is one; back 0: for none.
bool right(int32_t threads, int64_t count, int64_t strands, int64_t back) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
  std::atomic<bool> good{true};
  parallel_tasks(threads, count, strands, [&](int64_t task, int32_t thread) {
    if (thread < 0 || thread >= threads) good = false;
    if (back > 0 && task >= back) {
      while (!runs[static_cast<size_t>(task - back)]) std::this_thread::yield();
    }
    ++runs[static_cast<size_t>(task)];
  });
  for (const std::atomic<int>& each : runs) {
    if (each != 1) good = false;
  }
  return good;
}

}  // namespace

int main() {
  for (const int32_t threads : {1, 2, 3, 4, 16}) {
    for (const int64_t strands : {1, 2, 3, 4, 6, 16, 40}) {
      for (const int64_t count : {0, 1, 5, 48, 1000}) {
        for (const int64_t back : {int64_t{0}, int64_t{1}, int64_t{3}, strands}) {
          CHECK(right(threads, count, strands, back));
        }
      }
    }
  }
  CHECK(right(kMostThreads, 3000, kMostThreads, 1));
  return check_report();
}
