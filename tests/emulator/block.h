// A block at work. For the emulator's own files.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#include "races.h"

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr uint32_t kSharedBase = 1024;  // addresses below are the system's

// What a thread waits for: ready(state), with state on its stack, is asked each time it could go
// on.
struct Wait {
  bool (*ready)(const void* state);
  const void* state;
  const char* what;
  uint64_t which;
};

// Where a fiber, or the scheduler, left off: for __builtin_setjmp, whose registers are few.
using Context = void* [5];

struct StoreGroup {
  int reading = 0, writing = 0;
  std::vector<std::shared_ptr<const Act>> reads, writes;  // for races
};

struct Asked {
  Product product;
  int group;
  std::shared_ptr<const Clock> known;  // to the warp, of its first lane
};

struct Block;

struct Thread {
  Block* home = nullptr;
  Place place;
  bool done = false, waiting = false, spinning = false;
  Wait wait;
  int lane = 0, warp = 0;
  uint32_t exchanges = 0;
  // cp.async: groups that are committed, and the open one at the end.
  std::deque<std::vector<std::function<void()>>> copies{1};
  std::deque<std::shared_ptr<StoreGroup>> stores;
  std::shared_ptr<StoreGroup> open_store = std::make_shared<StoreGroup>();
  std::deque<Asked> products;  // that are not done
  int64_t products_done = 0;
  uint32_t cluster_generation = 0;  // in which it arrived
  bool fenced = false;              // since the last group of products
  std::vector<uint32_t> unfenced;   // chunks of shared memory that it wrote
  int product_groups = 0;
  uint32_t products_asked = 0;
  std::vector<uint32_t> committed;  // so many were, by group that it has not waited for
  std::vector<uint32_t> asked_at;   // by product, of a warp's first lane: the warp's times
};

// A stack, which runs one thread of a kernel after the other.
struct Fiber {
  bool started = false;
  Context context;
  char* stack = nullptr;
};

struct Warp {
  int live = 0, arrived = 0;
  uint32_t generation = 0;
  Words words[2][32];
};

// What is known to those that arrive, and to those that have waited for them.
struct Meeting {
  Clock arriving, left;
  Fenced arriving_fenced, left_fenced;

  void arrive();
  void arrive(const Act& act);
  void complete();
  void leave() const;
};

struct NamedBarrier {
  int arrived = 0;
  uint32_t generation = 0;
  Meeting meeting;
};

// Of the copy engine: steps that happen some time, in order.
struct Transfer {
  std::vector<std::function<void()>> steps;
  size_t next = 0;
};

// Of a warpgroup's product, while it is computed.
constexpr int kRows = 64, kDepth = 16, kMaxColumns = 256;  // kDepth: of 16 bits, twice that of 8
struct Matrices {
  float a[kRows][2 * kDepth], b[2 * kDepth][kMaxColumns], d[kRows][kMaxColumns];
};

// A kernel at work, one at a time, or a write by the host, which counts as one.
struct Launch {
  uint32_t number = 0, ended = 0;  // the last of those that had ended when it started
  bool early = false;              // it may start before the one before has ended
  bool waited = false;             // by then it has

  void next(bool starts_early) {
    if (!starts_early) ended = number;
    ++number;
    early = starts_early;
    waited = false;
  }
};
extern Launch launch;
extern std::mutex one_at_a_time;  // of launches

// The multiprocessors at work go on one at a time, each on its own thread of the machine, in an
// order that is drawn: the same seed repeats it.
class Turns {
 public:
  Turns(uint32_t count, uint64_t seed) : state_(seed), live_(count, true), changed_(count) {
    turn_ = another();
  }
  void begin(uint32_t n);  // returns when it is its turn
  void pass(uint32_t n);   // the same, after others' perhaps
  void end(uint32_t n);

 private:
  uint32_t another();

  uint64_t state_;
  std::mutex mutex_;
  std::vector<bool> live_;
  std::vector<std::condition_variable> changed_;
  uint32_t turn_;
};

// Blocks that run together, in turns.
struct Cluster {
  std::vector<Block*> blocks;
  NamedBarrier barrier;
  Turns* turns = nullptr;
  uint32_t seat = 0;  // its multiprocessor's among them

  void run();
  // Ends the phase of the barrier when all threads that have not ended have arrived.
  void settle();
};

// Whether somebody of a block went on; spun: only those that ask again and again.
enum class Step { kWent, kSpun, kStuck };

struct Block {
  alignas(1024) char shared[kSharedBytes];
  bool unfenced[kSharedBytes / 16];  // by chunk: written, and not yet seen by the engines
  int threads_live = 0, warps = 0;
  uint64_t random_state = 1;
  std::vector<Thread> threads{kMaxThreads};
  std::vector<Fiber> fibers{kMaxThreads};  // of the threads
  Warp warp[kMaxThreads / 32];
  NamedBarrier barriers[16];
  Races races;
  std::unordered_map<uint32_t, Meeting> mbarriers;  // by address
  std::vector<Transfer> transfers;
  Matrices matrices;
  std::unique_ptr<char, void (*)(char*)> stacks{nullptr, nullptr};

  Cluster* cluster = nullptr;
  // As on a GPU, addresses tell the blocks of a cluster apart: block n has n + 1 in the upper 8
  // bits. A matrix's descriptor has no room for them. 0 where a block is alone.
  uint32_t upper_bits = 0;

  Block();
  void begin(uint3 index, dim3 grid, int count, int shared_bytes, uint64_t seed, uint32_t rank,
             uint32_t cluster_number);
  Step step();
  void end();
  void report() const;

 private:
  bool run_warp(int n);
  void step_transfer();

  int slow_ = 0;  // the warp that falls behind
};

extern thread_local Block* block;
extern thread_local Thread* running;
extern thread_local const std::function<void()>* entry;  // the kernel
void say_seed();                                         // what repeats this run

// While it lives, engine_place() is for this act.
struct Acting {
  Acting(const Act* act, bool writes);
  ~Acting();
};

uint32_t draw(uint64_t& state, uint32_t n);  // below n
uint32_t draw(uint32_t n);                   // the same, of the block
void release(NamedBarrier& barrier);
// exchange() in which the last lane does something with all words before anybody goes on.
const Words* exchange(const Words& mine, void (*act)(Words* all));
// Returns when wait.ready is true.
void wait_for(const Wait& wait);

// Returns when ready() is true.
template <class Ready>
void wait_until(const char* what, uint64_t which, const Ready& ready) {
  if (ready()) return;
  wait_for({[](const void* state) { return (*static_cast<const Ready*>(state))(); }, &ready, what,
            which});
}

}  // namespace emulator
