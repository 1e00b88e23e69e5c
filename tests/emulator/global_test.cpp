// Programs with and without a fault in global memory: between blocks, between kernels of which one
// starts early, and before the copy engine.
#include <cuda.h>

#include <cstring>
#include <set>

#include "prelude/builtins.h"

#include "cuda/ptx/tma.cuh"
#include "programs.h"

using namespace emulator;

namespace {

constexpr int kBlocks = kMultiprocessors, kThreads = 64, kBytes = 8192;
constexpr Order kRelaxed = Order::kRelaxed, kAcquire = Order::kAcquire, kRelease = Order::kRelease;

int thread() { return static_cast<int>(place().thread.x); }
int block_number() { return static_cast<int>(place().block.x); }
bool leads() { return thread() == 0; }
uint32_t shared_at(uint32_t offset) { return shared_address(dynamic_shared()) + offset; }

// Global memory: flags, and a number of each thread.
struct Memory {
  int32_t flag, count;
  int64_t stamp;
  alignas(16) volatile int32_t numbers[kBlocks * kThreads];
};
Memory* memory;

volatile int32_t& own() { return memory->numbers[block_number() * kThreads + thread()]; }

// Of all threads of a block, or of all blocks.
int sum(int block) {
  int x = 0;
  for (int n = 0; n < kThreads; ++n) x += memory->numbers[block * kThreads + n];
  return x;
}
int sum_all() {
  int x = 0;
  for (int block = 0; block < kBlocks; ++block) x += sum(block);
  return x;
}

template <class Kernel>
void start(Kernel kernel, bool early = false, int blocks = kBlocks) {
  run_grid(dim3(static_cast<unsigned>(blocks)), kThreads, kBytes, kernel, 1, early);
}

void begin() {
  CUdeviceptr address = 0;
  cuMemAlloc(&address, sizeof(Memory));
  cuMemsetD8(address, 0, sizeof(Memory));
  memory = reinterpret_cast<Memory*>(address);
}

void wait_for(const int32_t* flag, int32_t value, Order order) {
  while (load_as_one(flag, order) != value) yield();
}

void sync() { barrier(0, 0, true); }

// ---- a block tells another

enum class Tells { kWell, kNoRelease, kNoAcquire, kNoFence, kNoFenceThere, kNoBarrier };

// By a store with release, and by a fence before it.
template <Tells kHow, bool kFences>
void tell() {
  start([] {
    if (block_number() == 0) {
      own() = 1;
      if (kHow != Tells::kNoBarrier) sync();
      if (!leads()) return;
      if (kFences && kHow != Tells::kNoFence) fence_gpu();
      store_as_one(&memory->flag, 1, kFences || kHow == Tells::kNoRelease ? kRelaxed : kRelease);
    } else {
      if (leads()) {
        wait_for(&memory->flag, 1, kFences || kHow == Tells::kNoAcquire ? kRelaxed : kAcquire);
        if (kFences && kHow != Tells::kNoFenceThere) fence_gpu();
      }
      sync();
      sum(0);
    }
  });
}

// Blocks leave their numbers; who comes last adds up all: pieces of a tile of keys.
template <Tells kHow>
void unite() {
  start([] {
    own() = 1;
    if (kHow != Tells::kNoFence) fence_gpu();
    if (kHow != Tells::kNoBarrier) sync();
    if (leads()) {
      const bool last = fetch_add(&memory->count, 1, kRelaxed) == kBlocks - 1;
      store(shared_at(0), last);
    }
    sync();
    if (!load<bool>(shared_at(0))) return;
    if (kHow != Tells::kNoFenceThere) fence_gpu();
    sum_all();
  });
}

// Blocks change the same numbers one after the other: sums in a fixed order.
template <Tells kHow>
void take_turns() {
  start([] {
    if (leads()) {
      wait_for(&memory->count, block_number(), kHow == Tells::kNoAcquire ? kRelaxed : kAcquire);
    }
    sync();
    memory->numbers[thread()] = memory->numbers[thread()] + 1;
    if (kHow != Tells::kNoBarrier) sync();
    if (leads()) fetch_add(&memory->count, 1, kHow == Tells::kNoRelease ? kRelaxed : kRelease);
  });
}

// The first block clears a counter, whatever lay there; the others see so by a stamp.
template <Tells kHow>
void count_tiles() {
  start([] {
    if (!leads()) return;
    if (block_number() == 0) {
      const_cast<volatile int32_t&>(memory->count) = 0;
      store_as_one(&memory->stamp, int64_t{7}, kHow == Tells::kNoRelease ? kRelaxed : kRelease);
    }
    while (load_as_one(&memory->stamp, kHow == Tells::kNoAcquire ? kRelaxed : kAcquire) != 7) {
      yield();
    }
    fetch_add(&memory->count, 1, kRelaxed);
  });
}

// A plain store of a flag.
template <bool kBad>
void store_flag() {
  start([] {
    if (!leads()) return;
    if (block_number() != 0) {
      wait_for(&memory->flag, 1, kAcquire);
    } else if (kBad) {
      const_cast<volatile int32_t&>(memory->flag) = 1;
    } else {
      store_as_one(&memory->flag, 1, kRelease);
    }
  });
}

// ---- the copy engine

constexpr uint32_t kFull = 0, kTile = 1024, kTileBytes = 4 * kThreads;

void load_tile(int block) {
  mbarrier_init(shared_at(kFull), 1);
  mbarrier_arrive(shared_at(kFull), kTileBytes);
  flashattn::cuda::ptx::bulk_load(shared_at(kTile),
                                  const_cast<int32_t*>(memory->numbers) + block * kThreads,
                                  kTileBytes, shared_at(kFull));
  mbarrier_wait(shared_at(kFull), 0);
}

// It reads what another block's threads wrote. The bad fence is of the other proxy.
template <bool kBad>
void load_what_others_wrote() {
  start([] {
    if (block_number() == 0) {
      own() = 1;
      sync();
      if (leads()) store_as_one(&memory->flag, 1, kRelease);
    } else if (leads()) {
      wait_for(&memory->flag, 1, kAcquire);
      kBad ? fence_async() : fence_async_global();
      load_tile(0);
    }
  });
}

// The first to come stores and opens the sums for others, who add: dQ. Bad: before it is there.
template <bool kBad>
void claim() {
  start([] {
    if (!leads()) return;
    int32_t* const sums = const_cast<int32_t*>(memory->numbers);
    const int32_t state = fetch_or(&memory->flag, 1, kAcquire);
    if (state & 1) {
      while (!(load_as_one(&memory->flag, kAcquire) & 2)) yield();
    }
    fence_async_global();
    if (state & 1) {
      flashattn::cuda::ptx::bulk_reduce_add(reinterpret_cast<float*>(sums), shared_at(kTile),
                                            kTileBytes, 0);
    } else {
      flashattn::cuda::ptx::bulk_store(sums, shared_at(kTile), kTileBytes);
    }
    engine_commit();
    if (!(state & 1)) {
      engine_wait(0, !kBad);
      fetch_add(&memory->flag, 2, kRelease);
    }
    engine_wait(0, true);
  });
}

// A map that nobody has encoded.
template <bool kBad>
void prefetch() {
  static CUtensorMap map;
  const TensorMap made{nullptr, {64, 1, 1, 1}, {2, 128, 128, 128}, 64, 128};
  if (!kBad) std::memcpy(&map, &made, sizeof made);
  start([] {
    if (leads()) flashattn::cuda::ptx::tma_prefetch(&map);
  });
}

// ---- kernels that start early

void leave_numbers() { own() = 1; }

enum class Waits { kWell, kLate, kOneThread, kNever };

// Reads what the kernel before wrote, or the host: before it waits, or where another thread does.
template <Waits kHow, bool kOfHost>
void follow() {
  if (!kOfHost) start(leave_numbers);
  start(
      [] {
        if (kHow == Waits::kLate) sum_all();
        if (kHow != Waits::kNever && (kHow != Waits::kOneThread || thread() == 32)) {
          griddep_wait();
        }
        if (kHow != Waits::kNever && kHow != Waits::kLate && thread() < 32) sum_all();
      },
      true);
}

// What the kernel before read is overwritten.
template <bool kBad>
void overwrite() {
  start([] { sum_all(); });
  start(
      [] {
        if (!kBad) griddep_wait();
        own() = 2;
        if (kBad) griddep_wait();
      },
      true);
}

// What had ended when the kernel before started has, too.
template <bool kBad>
void follow_two() {
  start(leave_numbers);
  start([] { griddep_wait(); }, kBad);
  start(
      [] {
        sum_all();
        griddep_wait();
      },
      true);
}

// A kernel starts under the one before, whose flags say how far it is. Bad: they are cleared before
// it may start, no more.
template <bool kBad>
void start_under() {
  start(
      [] {
        griddep_wait();
        if (leads() && block_number() == 0) const_cast<volatile int32_t&>(memory->flag) = 0;
        own() = 1;
        if (kBad) fence_gpu();
        sync();
        if (kBad || !leads()) return;
        if (fetch_add(&memory->count, 1, Order::kBoth) == kBlocks - 1) {
          store_as_one(&memory->stamp, int64_t{7}, kRelease);
        }
      },
      true);
  start(
      [] {
        if (leads()) {
          while (!kBad && load_as_one(&memory->stamp, kAcquire) != 7) yield();
          load_as_one(&memory->flag, kRelaxed);
        }
        sync();
        sum_all();
        griddep_wait();
      },
      true);
}

// ---- orders

std::string text;

// Who comes first, of a warp's lanes, a block's warps, a grid's blocks.
std::string order_of(const char* test, int seed, int blocks, int threads, int step) {
  setenv("PYTEST_CURRENT_TEST", test, 1);
  setenv("FLASHATTN_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
  text.clear();
  run_grid(dim3(static_cast<unsigned>(blocks)), threads, kBytes, [=] {
    if (thread() % step == 0) text += std::to_string(block_number() * 1000 + thread()) + " ";
  });
  return text;
}

void check_orders(int blocks, int threads, int step) {
  std::set<std::string> seen;
  for (int seed = 0; seed < 10; ++seed) {
    const std::string first = order_of("one", seed, blocks, threads, step);
    CHECK(order_of("another", seed, blocks, threads, step) != "");
    CHECK(order_of("one", seed, blocks, threads, step) == first);
    CHECK(order_of("another", seed, blocks, threads, step) != "");
    seen.insert(first);
  }
  CHECK(seen.size() > 5);
}

template <class Good, class Bad>
void check(const char* name, Good good, Bad bad, const char* finds = ": a race: ") {
  check_programs(name, [=] { begin(), good(); }, [=] { begin(), bad(); }, finds);
}

}  // namespace

#define CHECK_PROGRAM(good, bad) check(#bad, good, bad)

int main() {
  warm_up();
  using T = Tells;
  CHECK_PROGRAM((tell<T::kWell, false>), (tell<T::kNoRelease, false>));
  CHECK_PROGRAM((tell<T::kWell, false>), (tell<T::kNoAcquire, false>));
  CHECK_PROGRAM((tell<T::kWell, false>), (tell<T::kNoBarrier, false>));
  CHECK_PROGRAM((tell<T::kWell, true>), (tell<T::kNoFence, true>));
  CHECK_PROGRAM((tell<T::kWell, true>), (tell<T::kNoFenceThere, true>));
  CHECK_PROGRAM(unite<T::kWell>, unite<T::kNoFence>);
  CHECK_PROGRAM(unite<T::kWell>, unite<T::kNoFenceThere>);
  CHECK_PROGRAM(unite<T::kWell>, unite<T::kNoBarrier>);
  CHECK_PROGRAM(take_turns<T::kWell>, take_turns<T::kNoRelease>);
  CHECK_PROGRAM(take_turns<T::kWell>, take_turns<T::kNoAcquire>);
  CHECK_PROGRAM(take_turns<T::kWell>, take_turns<T::kNoBarrier>);
  CHECK_PROGRAM(count_tiles<T::kWell>, count_tiles<T::kNoRelease>);
  CHECK_PROGRAM(count_tiles<T::kWell>, count_tiles<T::kNoAcquire>);
  CHECK_PROGRAM(store_flag<false>, store_flag<true>);
  CHECK_PROGRAM(load_what_others_wrote<false>, load_what_others_wrote<true>);
  CHECK_PROGRAM(claim<false>, claim<true>);
  CHECK_PROGRAM((follow<Waits::kWell, false>), (follow<Waits::kLate, false>));
  CHECK_PROGRAM((follow<Waits::kWell, true>), (follow<Waits::kLate, true>));
  CHECK_PROGRAM((follow<Waits::kWell, false>), (follow<Waits::kOneThread, false>));
  CHECK_PROGRAM(overwrite<false>, overwrite<true>);
  CHECK_PROGRAM(follow_two<false>, follow_two<true>);
  CHECK_PROGRAM(start_under<false>, start_under<true>);
  check("a kernel that never waits", follow<Waits::kWell, false>, follow<Waits::kNever, false>,
        "without griddepcontrol.wait");
  check("an empty map", prefetch<false>, prefetch<true>, "nobody has encoded");
  check_orders(1, 32, 1);     // lanes
  check_orders(1, 1024, 32);  // warps
  check_orders(16, 32, 32);   // blocks
  return check_report();
}
