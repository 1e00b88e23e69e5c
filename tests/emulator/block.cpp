// Fibers, the barriers between them, and who of a block goes on when.
#include "block.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulator {

thread_local Block* block;
thread_local Thread* running;
thread_local const std::function<void()>* entry;

namespace {

constexpr size_t kStackBytes = 256 * 1024, kGuardBytes = 4096;

thread_local Context scheduler;
// Fibers go from one thread of the machine to another, and __builtin_longjmp keeps few registers:
// callers know nothing of what these do, and each looks up anew what is thread_local.
#if __has_attribute(noipa)
#define ANEW __attribute__((noipa))
#else
#define ANEW __attribute__((noinline))
#endif

ANEW Fiber& own_fiber() { return running->home->fibers[running->place.thread.x]; }

ANEW void leave() {
  if (!__builtin_setjmp(own_fiber().context)) __builtin_longjmp(scheduler, 1);
}

ANEW void run_thread() {
  (*entry)();
  running->done = true;
}

void body() {
  for (;;) {
    run_thread();
    leave();
  }
}

// Until the thread leaves or ends.
ANEW void resume(Thread& thread, Fiber& fiber) {
  running = &thread;
  if (!__builtin_setjmp(scheduler)) {
    if (fiber.started) __builtin_longjmp(fiber.context, 1);
    fiber.started = true;
    mprotect(fiber.stack, kGuardBytes, PROT_NONE);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
  }
  running = nullptr;
}

}  // namespace

void fail(const char* format, ...) {
  std::fprintf(stderr, "emulator: ");
  if (running) {
    std::fprintf(stderr, "block %u, thread %u: ", running->place.block.x, running->place.thread.x);
  }
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  say_seed();
  std::abort();
}

uint32_t draw(uint64_t& x, uint32_t n) {
  x ^= x << 13;  // xorshift64
  x ^= x >> 7;
  x ^= x << 17;
  return static_cast<uint32_t>(x >> 33) % n;
}

uint32_t draw(uint32_t n) { return draw(block->random_state, n); }

const Place& place() { return running->place; }

void wait_for(const Wait& wait) {
  running->wait = wait;
  running->waiting = true;
  leave();
}

void yield() {
  running->spinning = true;
  leave();
}

// ---- barriers

namespace {

void release_warp(Warp& warp) {
  warp.arrived = 0;
  ++warp.generation;
}

}  // namespace

void release(NamedBarrier& barrier) {
  barrier.meeting.complete();
  barrier.arrived = 0;
  ++barrier.generation;
}

void Meeting::arrive() {
  if (!finds_races) return;
  Races& races = running->home->races;
  arriving.join(races.of_warp(running->warp));
  arriving_fenced.join(races.fenced(running->warp));
  races.advance(running->warp);
}

void Meeting::arrive(const Act& act) { arriving.join(act.known); }

void Meeting::complete() {
  if (!finds_races) return;
  left = std::move(arriving);
  left_fenced = std::move(arriving_fenced);
  arriving = {};
  arriving_fenced = {};
}

void Meeting::leave() const {
  if (!finds_races) return;
  Races& races = running->home->races;
  races.of_warp(running->warp).join(left);
  races.fenced(running->warp).join(left_fenced);
}

void warp_sync() {
  Warp& warp = block->warp[running->warp];
  const uint32_t generation = warp.generation;
  if (++warp.arrived == warp.live) return release_warp(warp);
  wait_until("the other lanes", 0, [&warp, generation] { return warp.generation != generation; });
}

const Words* exchange(const Words& mine, void (*act)(Words* all)) {
  Warp& warp = block->warp[running->warp];
  // Two sets: nobody writes the second next before all have left this one.
  Words* words = warp.words[running->exchanges++ % 2];
  words[running->lane] = mine;
  if (act && warp.arrived + 1 == warp.live) act(words);
  warp_sync();
  return words;
}

const Words* exchange(const Words& mine) { return exchange(mine, nullptr); }

void barrier(int number, int threads, bool wait) {
  NamedBarrier& named = block->barriers[number];
  const uint32_t generation = named.generation;
  const int wanted = threads ? threads : block->threads_live;
  if (++named.arrived > wanted) fail("barrier %d has more than %d arrivals", number, wanted);
  named.meeting.arrive();
  if (named.arrived == wanted) release(named);
  if (!wait) return;
  wait_until("barrier", static_cast<uint64_t>(number),
             [&named, generation] { return named.generation != generation; });
  named.meeting.leave();
}

// ---- the scheduler

Block::Block() {
  const size_t bytes = kMaxThreads * kStackBytes;
  char* memory = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) fail("no memory for stacks");
  stacks = {memory, [](char* p) { munmap(p, kMaxThreads * kStackBytes); }};
  for (int n = 0; n < kMaxThreads; ++n) {
    fibers[n].stack = memory + n * kStackBytes;
  }
}

// Lets every lane of a warp go on that can, in some order: whether one could.
bool Block::run_warp(int n) {
  bool some = false;
  const uint32_t first = draw(32), step = 2 * draw(16) + 1;
  for (uint32_t k = 0; k < 32; ++k) {
    const int lane = static_cast<int>((first + k * step) % 32);
    Thread& thread = threads[n * 32 + lane];
    if (thread.done || (thread.waiting && !thread.wait.ready(thread.wait.state))) continue;
    thread.waiting = thread.spinning = false;
    resume(thread, fibers[n * 32 + lane]);
    if (thread.done) {
      --threads_live;
      if (--warp[n].live > 0 && warp[n].arrived == warp[n].live) release_warp(warp[n]);
      if (barriers[0].arrived > 0 && barriers[0].arrived == threads_live) release(barriers[0]);
      cluster->settle();
    }
    some |= !thread.spinning;
  }
  return some;
}

void Block::step_transfer() {
  const uint32_t n = draw(static_cast<uint32_t>(transfers.size()));
  Transfer& transfer = transfers[n];
  transfer.steps[transfer.next++]();
  if (transfer.next < transfer.steps.size()) return;
  std::swap(transfer, transfers.back());
  transfers.pop_back();
}

void Block::report() const {
  std::fprintf(stderr, "emulator: nobody can go on in block %u\n", threads[0].place.block.x);
  for (int n = 0; n < warps; ++n) {
    std::map<std::string, int> states;
    for (int lane = 0; lane < 32; ++lane) {
      const Thread& thread = threads[n * 32 + lane];
      ++states[thread.done ? "done"
               : !thread.waiting
                   ? "running"
                   : std::string(thread.wait.what) + " " + std::to_string(thread.wait.which)];
    }
    std::fprintf(stderr, "  warp %d:", n);
    for (const auto& state : states) {
      std::fprintf(stderr, " %d lanes: %s;", state.second, state.first.c_str());
    }
    std::fprintf(stderr, "\n");
  }
}

void Block::begin(uint3 index, dim3 grid, int count, int shared_bytes, uint64_t seed, uint32_t rank,
                  uint32_t cluster_number) {
  if (count > kMaxThreads || count % 32 != 0) fail("a block of %d threads", count);
  block = this;
  random_state = seed;
  draw(2);
  // NaN, as nobody has written it.
  std::memset(shared, 0xff, static_cast<size_t>(shared_bytes));
  std::memset(unfenced, 0, sizeof unfenced);
  threads_live = count;
  warps = count / 32;
  for (NamedBarrier& named : barriers) named = {};
  mbarriers.clear();
  if (finds_races) {
    races.begin(rank, static_cast<uint32_t>(cluster->blocks.size()),
                static_cast<uint32_t>(shared_bytes), home_of(launch.number, cluster_number),
                launch.ended);
  }
  for (int n = 0; n < count; ++n) {
    threads[n] = Thread();
    threads[n].home = this;
    threads[n].place = {
        {static_cast<unsigned>(n), 0, 0}, index, dim3(static_cast<unsigned>(count)), grid};
    threads[n].lane = n % 32;
    threads[n].warp = n / 32;
    warp[n / 32].live = 32;
    warp[n / 32].arrived = 0;
  }
  slow_ = static_cast<int>(draw(static_cast<uint32_t>(warps)));
}

// Mostly one warp for a while, sometimes another, sometimes a copy.
Step Block::step() {
  block = this;
  bool some = false;
  const int chosen = static_cast<int>(draw(static_cast<uint32_t>(warps)));
  // For a time one warp falls far behind: those that it does not hold up run on.
  if (draw(1024) == 0) slow_ = static_cast<int>(draw(static_cast<uint32_t>(warps)));
  if (chosen == slow_ && draw(64) != 0) return Step::kWent;
  for (uint32_t times = 1 + draw(64); times > 0 && run_warp(chosen); --times) some = true;
  // What another block waits for may have come.
  if (!transfers.empty() && draw(4) == 0) {
    step_transfer();
    some = true;
  }
  if (some) return Step::kWent;
  bool spins = false;
  const int first = static_cast<int>(draw(static_cast<uint32_t>(warps)));
  for (int k = 0; k < warps && !some; ++k) {
    const int n = (first + k) % warps;
    some = run_warp(n);
    for (int lane = 0; lane < 32; ++lane) spins |= threads[n * 32 + lane].spinning;
  }
  if (some || threads_live == 0) return Step::kWent;
  if (transfers.empty()) return spins ? Step::kSpun : Step::kStuck;
  step_transfer();
  return Step::kWent;
}

void Block::end() {
  for (Transfer& transfer : transfers) {
    // What still reads shared memory when the block ends reads somebody else's.
    if (transfer.next == 0) fail("the block ended before a copy of its shared memory");
    while (transfer.next < transfer.steps.size()) transfer.steps[transfer.next++]();
  }
  transfers.clear();
  for (int n = 0; n < warps * 32; ++n) {
    for (const auto& group : threads[n].copies) {
      if (!group.empty()) fail("thread %d ended with copies on their way", n);
    }
    if (!threads[n].products.empty()) fail("thread %d ended with products on their way", n);
  }
}

// ---- clusters

uint32_t cluster_rank() {
  const std::vector<Block*>& all = block->cluster->blocks;
  return static_cast<uint32_t>(std::find(all.begin(), all.end(), block) - all.begin());
}

void cluster_arrive(bool releases) {
  Cluster& cluster = *block->cluster;
  running->cluster_generation = cluster.barrier.generation;
  ++cluster.barrier.arrived;
  if (releases) cluster.barrier.meeting.arrive();
  cluster.settle();
}

void cluster_wait() {
  const NamedBarrier& barrier = block->cluster->barrier;
  const uint32_t generation = running->cluster_generation;
  wait_until("the cluster", 0, [&barrier, generation] { return barrier.generation != generation; });
  barrier.meeting.leave();
}

}  // namespace emulator
