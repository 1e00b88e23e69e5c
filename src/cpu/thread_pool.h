// The library's threads: the first call that needs them starts them, later calls of any thread
// share them.
#pragma once

#include <atomic>
#include <cstdint>

namespace flashattn::cpu {

// No plan uses more threads.
constexpr int32_t kMaxThreads = 1024;

// The thread numbers [0, kMaxThreads) of one call, each given once.
class ThreadNumbers {
 public:
  void clear() {
    for (std::atomic<uint64_t>& word : words_) word.store(0, std::memory_order_relaxed);
  }
  // Returns whether no other thread had taken the number.
  bool take(int32_t number) {
    const uint64_t bit = uint64_t{1} << number % 64;
    return !(words_[number / 64].fetch_or(bit, std::memory_order_relaxed) & bit);
  }

 private:
  std::atomic<uint64_t> words_[kMaxThreads / 64] = {};
};

// Runs work(context, 0) on the caller's thread, and meanwhile work(context, number), number in [1,
// threads), on as many threads of the pool as are free, perhaps none. Each number is used at most
// once; a thread has the same number in every call if that is free. work() returns when there is
// nothing left to begin; run_on_pool() returns when every work() has returned. wakes: also wakes
// sleeping threads and starts missing ones, which takes tens of microseconds; otherwise only
// threads that are awake join, unless another call has just ended. Any number of threads may call
// it at once. A child made by fork starts a pool of its own.
void run_on_pool(int32_t threads, bool wakes, void (*work)(void*, int32_t), void* context);

}  // namespace flashattn::cpu
