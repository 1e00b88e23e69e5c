#include "cpu/parallel.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/float_environment.h"
#include "core/geometry.h"

#if FLASHATTN_OPENMP
#include <omp.h>
#endif

namespace flashattn::cpu {
namespace {

// The process that loaded the library.
pid_t owner;

__attribute__((constructor)) void remember_owner() { owner = getpid(); }

// Whether this process is a fork of it. The threads of the OpenMP runtime, which others in the
// process may have used before, did not follow it here, and a parallel region would wait for them.
bool is_forked_child() { return getpid() != owner; }

// Threads beside the caller's, on plain POSIX so that nothing is allocated here. All of them exist
// at once, until they are joined, and none begins before open().
class Helpers {
 public:
  // Starts up to so many that will run(argument, 1), (argument, 2), ... each.
  Helpers(int32_t count, void (*run)(void*, int32_t), void* argument)
      : run_(run), argument_(argument) {
    pthread_mutex_lock(&gate_);
    for (; started_ < count; ++started_) {
      Helper& helper = helpers_[started_];
      helper = {this, started_ + 1, {}};
      const auto main = [](void* given) -> void* {
        const Helper* self = static_cast<const Helper*>(given);
        Helpers& all = *self->all;
        pthread_mutex_lock(&all.gate_);
        pthread_mutex_unlock(&all.gate_);
        all.run_(all.argument_, self->thread);
        return nullptr;
      };
      // No more threads to be had: those that run share the work.
      if (pthread_create(&helper.id, nullptr, main, &helper) != 0) break;
    }
  }
  ~Helpers() {
    for (int32_t n = 0; n < started_; ++n) pthread_join(helpers_[n].id, nullptr);
  }
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  int32_t started() const { return started_; }
  void open() { pthread_mutex_unlock(&gate_); }

 private:
  struct Helper {
    Helpers* all;
    int32_t thread;
    pthread_t id;
  };
  void (*const run_)(void*, int32_t);
  void* const argument_;
  pthread_mutex_t gate_ = PTHREAD_MUTEX_INITIALIZER;
  Helper helpers_[kMostThreads - 1];
  int32_t started_ = 0;
};

// Tasks in queues, each with threads of its own, who look into the others when theirs is empty.
class Queues {
 public:
  Queues(int64_t count, int64_t strands) : count_(count), strands_(strands) {}

  // What one of so many threads does.
  void work(int32_t thread, int32_t threads, void (*body)(const void*, int64_t, int32_t),
            const void* context) {
    const FloatEnvironment environment;  // helpers have that of whoever made them
    const auto queues = static_cast<int32_t>(std::gcd(strands_, threads));
    const int32_t own = thread % queues;
    for (int32_t queue = own; queue >= 0; queue = longest(queues)) {
      do {
        const int64_t turn = started_[queue].fetch_add(1, std::memory_order_relaxed);
        if (turn >= size(queue, queues)) break;
        body(context, turn * queues + queue, thread);
      } while (queue == own);
    }
  }

 private:
  int64_t size(int32_t queue, int32_t queues) const { return ceil_div(count_ - queue, queues); }

  // The queue with most tasks that have not started; -1: none has any.
  int32_t longest(int32_t queues) const {
    int32_t found = -1;
    int64_t most = 0;
    for (int32_t q = 0; q < queues; ++q) {
      const int64_t left = size(q, queues) - started_[q].load(std::memory_order_relaxed);
      if (left > most) found = q, most = left;
    }
    return found;
  }

  const int64_t count_, strands_;
  std::atomic<int64_t> started_[kMostThreads] = {};  // of each queue
};

#if FLASHATTN_OPENMP
// Threads of the team that this thread had last: GNU's OpenMP runtime keeps those, and no more, for
// the next one.
thread_local int32_t kept = 1;

// That runtime ends the process where the system gives it no more threads. So the system is asked
// first when the team is to grow. Others may take what it gave before the runtime does.
int32_t startable(int32_t threads) {
  if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;  // none would be started
  if (threads > kept) {
    Helpers helpers(threads - 1, [](void*, int32_t) {}, nullptr);
    threads = std::min(threads, std::max(kept, helpers.started() + 1));
    helpers.open();
  }
  return threads;
}
#endif

}  // namespace

int32_t machine_threads() {
  if (is_forked_child()) return 1;
#if FLASHATTN_OPENMP
  static const int32_t threads = omp_get_max_threads();
#else
  static const int32_t threads = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
#endif
  return threads < 1 ? 1 : threads;
}

void run_tasks(int32_t threads, int64_t count, int64_t strands,
               void (*body)(const void*, int64_t, int32_t), const void* context) {
  if (count < threads) threads = static_cast<int32_t>(count);
  if (threads > 1 && is_forked_child()) threads = 1;
#if FLASHATTN_OPENMP
  if (threads > 1) threads = startable(threads);
#endif
  if (threads <= 1) {
    for (int64_t task = 0; task < count; ++task) body(context, task, 0);
    return;
  }
#if FLASHATTN_OPENMP
  Queues queues(count, strands);
#pragma omp parallel num_threads(threads)
  queues.work(omp_get_thread_num(), omp_get_num_threads(), body, context);
  kept = threads;
#else
  struct Team {
    Queues queues;
    void (*body)(const void*, int64_t, int32_t);
    const void* context;
    int32_t threads;
    void work(int32_t thread) { queues.work(thread, threads, body, context); }
  } team{{count, strands}, body, context, 1};
  const auto run = [](void* argument, int32_t thread) {
    static_cast<Team*>(argument)->work(thread);
  };
  Helpers helpers(threads - 1, run, &team);
  team.threads = helpers.started() + 1;
  helpers.open();
  team.work(0);
#endif
}

}  // namespace flashattn::cpu
