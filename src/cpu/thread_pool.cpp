#include "cpu/thread_pool.h"

#include <algorithm>
#include <new>

#include "core/os.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kSpin = 50'000;          // nanoseconds that a thread waits before it sleeps
constexpr int64_t kRetry = 1'000'000'000;  // nanoseconds until threads that failed are tried again
// Bytes of a thread's stack. Kernels use less than 64 KiB, but more if not optimised.
constexpr size_t kStack = size_t{1} << 20;
constexpr int32_t kMaxCalls = 32;  // calls at once; further ones run on their own thread alone
constexpr int32_t kFanOut = 4;     // threads that a thread wakes, which wake others in turn

using os::now;

// Spins until the condition holds, for kSpin at the most; returns whether it holds.
template <class Condition>
bool spin_until(const Condition& holds) {
  const int64_t end = now() + kSpin;
  do {
    for (int n = 0; n < 32; ++n) {
      if (holds()) return true;
      os::pause();
    }
  } while (now() < end);
  return false;
}

// A call that asks for threads.
struct alignas(64) Call {
  // The bits of `state`: whether threads may join; how many have joined and not left. A thread that
  // tries to join is counted until it finds that it may not.
  static constexpr uint32_t kOpen = 1u << 31, kMember = 1, kMembers = kOpen - 1;

  std::atomic<uint32_t> state{0};
  std::atomic<int32_t> vacancies{0};  // how many more may join; below 0: none
  int32_t threads = 0;
  void (*work)(void*, int32_t) = nullptr;
  void* context = nullptr;
  std::atomic<int32_t> processor{-1};  // processor that runs the caller
  ThreadNumbers numbers;
  os::Sleepers caller;
};

class Pool {
 public:
  constexpr Pool() = default;

  void run(int32_t threads, bool wakes, void (*work)(void*, int32_t), void* context) {
    // If calls follow each other this soon, the first should wake threads for the next ones.
    wakes = wakes || now() - last_end_.load(std::memory_order_relaxed) < kSpin;
    if (wakes) grow(threads - 1);
    const int32_t slot = workers_.load(std::memory_order_acquire) > 0 ? reserve() : -1;
    if (slot < 0) return run_alone(work, context);
    Call& call = calls_[slot];
    call.threads = threads;
    call.work = work;
    call.context = context;
    call.processor.store(os::current_processor(), std::memory_order_relaxed);
    call.numbers.clear();
    const int32_t vacancies = threads - 1;
    // The bit is set before vacancies: the thread that joins last clears it, which then comes after
    // this.
    open_.fetch_or(1u << slot);
    call.vacancies.store(vacancies);
    call.state.fetch_or(Call::kOpen);
    if (wakes) wake(vacancies);
    work(context, 0);
    open_.fetch_and(~(1u << slot));
    if (call.state.fetch_and(~Call::kOpen) & Call::kMembers) wait_until_left(call);
    reserved_.fetch_and(~(1u << slot), std::memory_order_release);
    last_end_.store(now(), std::memory_order_relaxed);
  }

 private:
  void run_alone(void (*work)(void*, int32_t), void* context) {
    work(context, 0);
    last_end_.store(now(), std::memory_order_relaxed);
  }

  // Reserves an entry of calls_; -1: none is free.
  int32_t reserve() {
    uint32_t reserved = reserved_.load(std::memory_order_relaxed);
    while (~reserved) {
      const int32_t slot = __builtin_ctz(~reserved);
      if (reserved_.compare_exchange_weak(reserved, reserved | 1u << slot,
                                          std::memory_order_acquire)) {
        return slot;
      }
    }
    return -1;
  }

  static void wait_until_left(Call& call) {
    const auto is_left = [&] { return !(call.state.load() & Call::kMembers); };
    if (spin_until(is_left)) return;
    do {  // a thread that has left an earlier call of this entry may still wake the caller
      call.caller.announce();
      if (!is_left() || !call.caller.take_back()) call.caller.sleep();
    } while (!is_left());
  }

  // Wakes sleeping threads if too few threads spin.
  void wake(int32_t wanted) {
    wanted = std::min(wanted - spinning_.load(), kFanOut);
    if (wanted > 0) sleepers_.call(wanted);
  }

  // Wakes other threads for the calls that are open: the first thing that a woken thread does.
  void wake_others() {
    const uint32_t open = open_.load();
    int32_t wanted = -1;  // this thread joins itself
    for (int32_t slot = 0; slot < kMaxCalls; ++slot) {
      if (open >> slot & 1u) wanted += std::max(calls_[slot].vacancies.load(), 0);
    }
    wake(wanted);
  }

  // Starts threads until there are `wanted`, or the system refuses.
  void grow(int32_t wanted) {
    if (workers_.load(std::memory_order_acquire) >= wanted) return;
    if (!growing_.try_lock()) return;  // another caller starts some
    if (now() >= retry_ && prepare()) {
      while (workers_.load(std::memory_order_relaxed) < wanted && start()) {
      }
    }
    growing_.unlock();
  }

  // Done once a process, before the first thread starts. Returns false if the system refuses.
  bool prepare() {
    if (prepared_) return true;
    max_spinning_ = os::usable_processors() - 1;
    prepared_ = os::after_fork_in_child(forget);
    return prepared_;
  }
  // In a child made by fork no thread of the pool exists, and locks may be held by those of the
  // parent.
  static void forget();

  bool start() {
    const bool started = os::start_thread(main, this, kStack, "flashattn");
    if (started) {
      workers_.fetch_add(1, std::memory_order_release);
    } else {
      retry_ = now() + kRetry;
    }
    return started;
  }

  static void* main(void* argument) {
    Pool& pool = *static_cast<Pool*>(argument);
    os::use_all_processors();
    pool.serve(pool.numbered_.fetch_add(1) + 1);
    return nullptr;
  }

  // Runs in a thread of the pool: joins calls, waits for more.
  [[noreturn]] void serve(int32_t own) {
    int32_t caller_processor = -1;  // the caller's processor in the last call that it joined
    for (bool slept = true; true; slept = wait_for_calls(caller_processor)) {
      while (take_part(own, slept, caller_processor)) slept = false;
    }
  }

  // Joins one call, if there is an open one.
  bool take_part(int32_t own, bool slept, int32_t& caller_processor) {
    const uint32_t open = open_.load();
    for (int32_t n = 0; open && n < kMaxCalls; ++n) {
      const int32_t slot = (own + n) % kMaxCalls;  // spread over calls
      if (!(open >> slot & 1u)) continue;
      Call& call = calls_[slot];
      // The thread leaves the caller's processor before it joins, because it may have to wait for
      // another processor.
      caller_processor = call.processor.load(std::memory_order_relaxed);
      if (slept && os::current_processor() == caller_processor &&
          os::avoid_processor(caller_processor))
        os::allow_processor(caller_processor);
      if (!(call.state.load() & Call::kOpen) || call.vacancies.load() <= 0) continue;
      // Additions, unlike exchanges, succeed at once however many threads join.
      const bool joins = call.state.fetch_add(Call::kMember) & Call::kOpen;
      const int32_t vacancies = joins ? call.vacancies.fetch_sub(1) : 0;
      if (vacancies > 0) join(call, slot, vacancies - 1, own);
      leave(call);
      if (vacancies > 0) return true;
    }
    return false;
  }

  void join(Call& call, int32_t slot, int32_t vacancies, int32_t own) {
    if (vacancies == 0) {
      open_.fetch_and(~(1u << slot));
    } else {
      wake(vacancies);
    }
    int32_t number = own < call.threads ? own : 1;
    while (!call.numbers.take(number)) number = number + 1 < call.threads ? number + 1 : 1;
    call.work(call.context, number);
    // work() has returned: nothing is left to begin.
    if (open_.load() >> slot & 1u) open_.fetch_and(~(1u << slot));
  }

  static void leave(Call& call) {
    const uint32_t before = call.state.fetch_sub(Call::kMember);
    if ((before & Call::kMembers) == 1 && !(before & Call::kOpen)) call.caller.call(1);
  }

  // Spins, then sleeps until it is called, perhaps too late for a call. Returns whether it slept.
  // caller_processor: if processors share no cache, Linux may wake a thread on the processor that
  // wakes it, where it waits for milliseconds behind the caller, though others are idle. The thread
  // therefore sleeps with that processor removed from its affinity mask.
  bool wait_for_calls(int32_t caller_processor) {
    const auto is_open = [&] { return open_.load() != 0; };
    // More spinning threads would take processors from those that work.
    const bool spins = spinning_.fetch_add(1) < max_spinning_;
    const bool found = spins && spin_until(is_open);
    spinning_.fetch_sub(1);
    if (found) return false;
    const bool avoids = os::avoid_processor(caller_processor);
    sleepers_.announce();
    if (!is_open() || !sleepers_.take_back()) {
      sleepers_.sleep();
      wake_others();
    }
    if (avoids) os::allow_processor(caller_processor);
    return true;
  }

  alignas(64) std::atomic<uint32_t> open_{0};      // bit n: threads may join calls_[n]
  alignas(64) std::atomic<uint32_t> reserved_{0};  // bit n: calls_[n] is in use
  std::atomic<int64_t> last_end_{0};               // when the last call ended
  alignas(64) std::atomic<int32_t> spinning_{0};
  alignas(64) os::Sleepers sleepers_;
  os::Mutex growing_;
  std::atomic<int32_t> workers_{0}, numbered_{0};
  int32_t max_spinning_ = 0;
  bool prepared_ = false;
  int64_t retry_ = 0;  // no thread is started before this time
  Call calls_[kMaxCalls];
};

// Never destroyed: its threads sleep on when the process ends.
Pool pool;

void Pool::forget() {
  const int32_t spinners = pool.max_spinning_;
  new (&pool) Pool;
  pool.max_spinning_ = spinners;
  pool.prepared_ = true;  // fork handlers are inherited
}

}  // namespace

void run_on_pool(int32_t threads, bool wakes, void (*work)(void*, int32_t), void* context) {
  pool.run(threads, wakes, work, context);
}

}  // namespace flashattn::cpu
