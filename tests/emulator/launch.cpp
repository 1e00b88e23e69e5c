// Kernels from start to end: which blocks are at work, and whose turn it is.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>

#include "block.h"

namespace emulator {

Launch launch;
std::mutex one_at_a_time;

// ---- whose turn it is

uint32_t Turns::another() {
  std::vector<uint32_t> all;
  for (uint32_t n = 0; n < live_.size(); ++n) {
    if (live_[n]) all.push_back(n);
  }
  return all.empty() ? 0 : all[draw(state_, static_cast<uint32_t>(all.size()))];
}

void Turns::begin(uint32_t n) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_[n].wait(lock, [&] { return turn_ == n; });
}

void Turns::pass(uint32_t n) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_ = another();
  if (turn_ == n) return;
  changed_[turn_].notify_one();
  changed_[n].wait(lock, [&] { return turn_ == n; });
}

void Turns::end(uint32_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_[n] = false;
  turn_ = another();
  changed_[turn_].notify_one();
}

// ---- clusters

void Cluster::settle() {
  int live = 0;
  for (const Block* b : blocks) live += b->threads_live;
  if (barrier.arrived > 0 && barrier.arrived == live) release(barrier);
}

void Cluster::run() {
  constexpr uint32_t kMostSteps = 1024;  // in a turn
  const uint32_t count = static_cast<uint32_t>(blocks.size());
  uint32_t left = count, slow = 0, steps = 0;
  const auto step = [&left](Block* chosen) {
    const Step done = chosen->step();
    if (chosen->threads_live > 0) return done;
    chosen->end();
    --left;
    return Step::kWent;
  };
  while (left > 0) {
    block = blocks[0];
    if (steps-- == 0) {
      turns->pass(seat);
      steps = draw(kMostSteps);
    }
    uint32_t n = 0;
    // Like a warp of a block, a block may fall far behind.
    if (count > 1) {
      n = draw(count);
      if (draw(1024) == 0) slow = draw(count + 1);
      if (n == slow && draw(64) != 0) continue;
    }
    if (blocks[n]->threads_live == 0 || step(blocks[n]) == Step::kWent) continue;
    bool went = false, spun = false;
    const uint32_t first = draw(count);
    for (uint32_t k = 0; k < count; ++k) {
      Block* const b = blocks[(first + k) % count];
      if (b->threads_live == 0) continue;
      const Step done = step(b);
      went |= done == Step::kWent;
      spun |= done == Step::kSpun;
    }
    if (went) continue;
    if (!spun) {
      for (const Block* b : blocks) b->report();
      say_seed();
      std::abort();
    }
    steps = 0;
  }
  block = nullptr;
}

// ---- grids

namespace {

// Blocks keep their stacks from launch to launch.
std::vector<std::unique_ptr<Block>> idle;

std::unique_ptr<Block> take_block() {
  if (idle.empty()) return std::make_unique<Block>();
  std::unique_ptr<Block> taken = std::move(idle.back());
  idle.pop_back();
  return taken;
}

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? text : "";
}

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;

// Of a launch: of so many since a test began, which pytest names in the environment.
uint64_t new_seed() {
  static std::string test;
  static uint64_t launches = 0;
  const std::string now = text_of("PYTEST_CURRENT_TEST");
  if (now != test) launches = 0;
  test = now;
  const uint64_t first = std::strtoull(text_of("FLASHATTN_EMULATOR_SEED").c_str(), nullptr, 10);
  return first * kOdd + std::hash<std::string>()(test) + (launches++ << 32) + 1;
}

struct Grid {
  dim3 size;
  int threads, shared_bytes;
  uint32_t cluster;
  const std::function<void()>& kernel;
  uint64_t seed;
  std::vector<uint32_t> order;  // of its clusters
  size_t started = 0;
};

// A multiprocessor, or as many as a cluster takes, until no cluster is left.
void work(Grid& grid, Turns& turns, uint32_t seat) {
  turns.begin(seat);
  entry = &grid.kernel;
  std::vector<std::unique_ptr<Block>> mine;
  for (uint32_t rank = 0; rank < grid.cluster; ++rank) mine.push_back(take_block());
  while (grid.started < grid.order.size()) {
    const uint32_t number = grid.order[grid.started++];
    Cluster together;
    together.turns = &turns;
    together.seat = seat;
    for (const std::unique_ptr<Block>& each : mine) together.blocks.push_back(each.get());
    for (uint32_t rank = 0; rank < grid.cluster; ++rank) {
      const uint32_t b = number * grid.cluster + rank;
      mine[rank]->cluster = &together;
      mine[rank]->upper_bits = grid.cluster > 1 ? (rank + 1) << 24 : 0;
      mine[rank]->begin(
          {b % grid.size.x, b / grid.size.x % grid.size.y, b / grid.size.x / grid.size.y},
          grid.size, grid.threads, grid.shared_bytes, (grid.seed + b) * 0xbf58476d1ce4e5b9u | 1,
          rank, number);
    }
    together.run();
  }
  for (std::unique_ptr<Block>& each : mine) idle.push_back(std::move(each));
  turns.end(seat);
}

}  // namespace

void say_seed() {
  const std::string seed = text_of("FLASHATTN_EMULATOR_SEED");
  std::fprintf(stderr, "emulator: FLASHATTN_EMULATOR_SEED=%s repeats this order\n",
               seed.empty() ? "0" : seed.c_str());
}

void run_grid(dim3 size, int threads, int shared_bytes, const std::function<void()>& kernel,
              int cluster, bool early) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (size.x % static_cast<unsigned>(cluster) != 0) {
    fail("a grid of %u blocks in clusters of %d", size.x, cluster);
  }
  launch.next(early);
  Grid grid{size, threads, shared_bytes, static_cast<uint32_t>(cluster), kernel, new_seed(), {}, 0};
  grid.order.resize(size.x * size.y * size.z / grid.cluster);
  std::iota(grid.order.begin(), grid.order.end(), 0);
  uint64_t state = grid.seed * kOdd | 1;
  for (size_t n = grid.order.size(); n > 1; --n) {
    std::swap(grid.order[n - 1], grid.order[draw(state, static_cast<uint32_t>(n))]);
  }
  const size_t at_once =
      std::min<size_t>(std::max(kMultiprocessors / grid.cluster, 1u), grid.order.size());
  if (at_once == 0) return;
  Turns turns(static_cast<uint32_t>(at_once), state);
  std::vector<std::thread> multiprocessors;
  for (uint32_t seat = 0; seat < at_once; ++seat) {
    multiprocessors.emplace_back([&grid, &turns, seat] { work(grid, turns, seat); });
  }
  for (std::thread& thread : multiprocessors) thread.join();
  if (early && !launch.waited) {
    fail(
        "a kernel that was started early ended without griddepcontrol.wait: who waits for it "
        "does not wait for those before");
  }
}

void griddep_wait() {
  launch.waited = true;
  if (!finds_races) return;
  Races& races = running->home->races;
  Clock& known = races.of_warp(running->warp);
  known.ended = launch.number - 1;
  // What ended is seen by the copy engine, too.
  Clock all;
  all.home = known.home;
  all.ended = known.ended;
  join(races.fenced(running->warp).proxied, std::make_shared<const Clock>(all));
}

}  // namespace emulator
