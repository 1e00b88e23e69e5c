// The library's threads: started by the first call that needs them, kept, shared by all callers.
#pragma once

#include <atomic>
#include <cstdint>

namespace flashattn::cpu {

// No plan uses more.
constexpr int32_t kMaxThreads = 1024;

// The numbers [0, kMaxThreads) of the threads that take part in one call, each taken once.
class ThreadNumbers {
 public:
  void clear() {
    for (std::atomic<uint64_t>& word : words_) word.store(0, std::memory_order_relaxed);
  }
  // Whether nobody had taken it.
  bool take(int32_t number) {
    const uint64_t bit = uint64_t{1} << number % 64;
    return !(words_[number / 64].fetch_or(bit, std::memory_order_relaxed) & bit);
  }

 private:
  std::atomic<uint64_t> words_[kMaxThreads / 64] = {};
};

// Runs work(context, 0) on the caller's thread, and meanwhile work(context, number), number in
// [1, threads), on as many of the pool's threads as are free and the system gives: perhaps none,
// each number at most once, and a thread has the same number in every call as far as it is free.
// Any of these has to return only when there is nothing left to begin. Returns when all that began
// have ended. wakes: also wakes threads that sleep, or starts them, which takes tens of
// microseconds; otherwise only those are asked that are awake, unless another call has just ended.
// Any number of threads may call it at once. A child made by fork starts a pool of its own.
void run_on_pool(int32_t threads, bool wakes, void (*work)(void*, int32_t), void* context);

}  // namespace flashattn::cpu
