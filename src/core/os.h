// The operating system: POSIX, and Linux where that offers more. Only os.cpp and this header
// include headers of either.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace flashattn::os {

// The value of an environment variable; NULL if it is not set, or empty.
const char* environment(const char* name) noexcept;

// ---- Time and waiting ----

// Nanoseconds of a clock that never goes back.
int64_t now() noexcept;

// Tells the processor that this thread waits for another one.
inline __attribute__((always_inline)) void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// One step of a loop that waits for another thread. The loop spins for some 50 us; after that it
// sleeps 50 us a step, because the other thread may be without a core. *waited: 0 before the loop.
void back_off(int32_t* waited) noexcept;

// ---- Threads ----

// A lock whose constructor needs no code when the library is loaded. A child made by fork makes its
// copy anew by constructing it again.
class Mutex {
 public:
  constexpr Mutex() = default;
  void lock() noexcept { pthread_mutex_lock(&mutex_); }
  bool try_lock() noexcept { return pthread_mutex_trylock(&mutex_) == 0; }
  void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

 private:
  friend class Condition;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Condition {
 public:
  constexpr Condition() = default;
  void wait(Mutex& locked) { pthread_cond_wait(&condition_, &locked.mutex_); }
  void signal() noexcept { pthread_cond_signal(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

// Threads that sleep until others call them. As many are woken as are called. A child made by fork
// makes its copy anew by constructing it again.
class Sleepers {
 public:
  constexpr Sleepers() = default;
  // A thread that is about to sleep announces it, and then checks once more what it waits for.
  void announce() noexcept { uncalled_.fetch_add(1); }
  // If it need not sleep, it takes the announcement back. Returns false if the thread has been
  // called: it must then sleep(), though not for long.
  bool take_back() noexcept { return take(1) == 1; }
  // If it must wait, it sleeps until it is called.
  void sleep() noexcept;
  // Calls up to `threads` of the threads that have announced themselves.
  void call(int32_t threads) noexcept {
    const int32_t called = uncalled_.load() > 0 ? take(threads) : 0;
    if (called > 0) wake(called);
  }

 private:
  // Lowers uncalled_ by at most `threads`; returns by how much.
  int32_t take(int32_t threads) noexcept {
    int32_t uncalled = uncalled_.load();
    while (uncalled > 0) {
      const int32_t taken = threads < uncalled ? threads : uncalled;
      if (uncalled_.compare_exchange_weak(uncalled, uncalled - taken)) return taken;
    }
    return 0;
  }
  void wake(int32_t threads) noexcept;

  std::atomic<int32_t> uncalled_{0};
  std::atomic<uint32_t> permits_{0};  // threads that were called and have not returned from sleep()
#if !defined(__linux__)
  Mutex mutex_;
  Condition has_permit_;
#endif
};

// Starts a detached thread with a stack of `stack` bytes, named `name` for top and debuggers. It
// receives no signals but those that a fault of its own raises. Returns whether it was started.
bool start_thread(void* (*main)(void*), void* argument, size_t stack, const char* name) noexcept;

// Calls handler() in every child made by fork from now on. Returns whether there was memory for it.
bool after_fork_in_child(void (*handler)()) noexcept;

// ---- Processors ----

// The number of processors that this process may use, at least 1: those in its affinity mask, which
// is that of its first thread, and no more than the CPU quota of its cgroups pays for. Read once a
// process: later changes are not seen.
int32_t usable_processors();

// Gives the calling thread the whole affinity mask of the process. A thread starts with the mask of
// the thread that starts it, which may be smaller.
void use_all_processors() noexcept;

// The processor that runs this thread; -1: unknown.
int32_t current_processor() noexcept;

// Removes a processor from the calling thread's affinity mask; if the thread runs there, it moves
// to another. Returns whether it did so: not if processor is -1, if the mask lacks it, or if the
// mask has no other.
bool avoid_processor(int32_t processor) noexcept;

// Undoes avoid_processor().
void allow_processor(int32_t processor) noexcept;

// The CPU quota of this process in processors: the least of its cgroup and of those above it, of
// versions 1 and 2; infinite if there is none. root: the root of the file system that holds proc
// and the mounts that proc names, "" outside of tests.
double cpu_quota(const char* root);

// Asks for AMX tile registers. Linux demands it once a process, before the first thread uses them,
// because their 8 KB would not fit every signal stack. Returns whether they may be used.
bool request_tile_registers() noexcept;

// Linux describes the processor by the words AT_HWCAP and AT_HWCAP2, whose bits each architecture
// defines. They are 0 where that is unknown.
struct ProcessorFlags {
  uint64_t first, second;
};
ProcessorFlags processor_flags() noexcept;
// Bytes of an SVE vector in the calling thread and in threads that it starts. 0: no SVE.
int32_t sve_vector_bytes() noexcept;

// ---- Memory ----

int64_t memory_bytes() noexcept;
int64_t l2_cache_bytes() noexcept;  // per core; 0: unknown

}  // namespace flashattn::os
