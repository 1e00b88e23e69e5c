// A block at work. For the emulator's own files.
#pragma once

#include <csetjmp>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#include "races.h"

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr uint32_t kSharedBase = 1024;  // addresses below are the system's

// What a thread waits for; ready(block state) is asked each time it could go on.
struct Wait {
  std::function<bool()> ready;
  const char* what;
  uint64_t which;
};

struct StoreGroup {
  int reading = 0, writing = 0;
  std::vector<std::shared_ptr<const Act>> acts;  // for races
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
  bool started = false, done = false, waiting = false, spinning = false;
  Wait wait;
  jmp_buf context;
  char* stack = nullptr;
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

struct Warp {
  int live = 0, arrived = 0;
  uint32_t generation = 0;
  Words words[2][32];
};

// What is known to those that arrive, and to those that have waited for them.
struct Meeting {
  Clock arriving, left;

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

// Blocks that run together, in turns.
struct Cluster {
  std::vector<Block*> blocks;
  NamedBarrier barrier;

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
  Warp warp[kMaxThreads / 32];
  NamedBarrier barriers[16];
  Races races;
  std::unordered_map<uint32_t, Meeting> mbarriers;  // by address
  std::vector<Transfer> transfers;
  std::unique_ptr<char, void (*)(char*)> stacks{nullptr, nullptr};

  Cluster* cluster = nullptr;

  Block();
  void begin(uint3 index, dim3 grid, int count, int shared_bytes, uint64_t seed, uint32_t rank);
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

// While it lives, engine_place() is for this act.
struct Acting {
  Acting(const Act* act, bool writes);
  ~Acting();
};

// Of the block: below n.
uint32_t draw(uint32_t n);
// exchange() in which the last lane does something with all words before anybody goes on.
const Words* exchange(const Words& mine, void (*act)(Words* all));
// Returns when ready() is true.
void wait_until(const char* what, uint64_t which, std::function<bool()> ready);

}  // namespace emulator
