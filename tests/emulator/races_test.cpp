// Kernels with and without a race in shared memory.
#include <vector_functions.h>

#include <cstring>

#include "cuda/ptx/tma.cuh"
#include "programs.h"

using namespace emulator;

namespace {

int thread() { return static_cast<int>(place().thread.x); }
int warp() { return thread() / 32; }
uint32_t at(uint32_t offset) { return shared_address(dynamic_shared()) + offset; }

constexpr uint32_t kFull = 0, kEmpty = 8, kTile = 1024, kTileBytes = 64 * 128;
constexpr int kAll = 0;

void begin_barriers(uint32_t readers) {
  if (thread() == 0) {
    mbarrier_init(at(kFull), 1);
    mbarrier_init(at(kEmpty), readers);
  }
  barrier(0, kAll, true);
}

void load_tile() {
  mbarrier_arrive(at(kFull), kTileBytes);
  const uint32_t to = at(kTile);
  engine_load(at(kFull), kTileBytes, [to] {
    for (uint32_t n = 0; n < kTileBytes; n += 16) std::memset(engine_place(to + n, 16), 1, 16);
  });
}

uint32_t own_word() { return at(kTile + static_cast<uint32_t>(thread()) * 4); }
uint32_t next_word() { return at(kTile + static_cast<uint32_t>((thread() + 32) % 64) * 4); }

// ---- warps and named barriers

template <bool kRace>
void store_then_load() {
  store(own_word(), 1);
  if (!kRace) barrier(0, kAll, true);
  load<int>(next_word());
}

template <bool kRace>
void load_then_store() {
  load<int>(next_word());
  if (!kRace) barrier(0, kAll, true);
  store(own_word(), 1);
}

// Whoever only arrives learns nothing.
template <bool kRace>
void arrive_then_load() {
  const bool writer = (warp() == 0) != kRace;
  if (writer) store(at(kTile + thread() % 32 * 4), 1);
  barrier(1, 64, warp() == 1);
  if (!writer) load<int>(at(kTile + thread() % 32 * 4));
}

// Of four warps the first and the third store the same, or not; the others wait for one of them.
template <bool kRace>
void store_twice() {
  const uint32_t word = at(kTile + thread() % 32 * 4);
  if (warp() % 2 == 0) store(word, kRace ? warp() : 0);
  barrier(1 + warp() / 2, 64, true);
  if (warp() % 2 == 1) load<int>(word);
}

template <bool kRace>
void store_twice_and_change() {
  const uint32_t word = at(kTile + thread() % 32 * 4);
  if (warp() % 2 == 0) store(word, 0);
  barrier(kRace ? 1 + warp() / 2 : 0, kRace ? 64 : kAll, true);
  if (warp() == 1) store(word, 1);
}

template <bool kRace>
void copy_by_threads() {
  alignas(16) static const char from[16] = {};
  copy_async(at(kTile + static_cast<uint32_t>(thread()) * 16), from, 16);
  copy_commit();
  if (!kRace) copy_wait(0);
  barrier(0, kAll, true);
  load<int>(at(kTile + static_cast<uint32_t>((thread() + 32) % 64) * 16));
  copy_wait(0);
}

// ---- elect

// The elected lane goes on only when the whole warp has come.
template <bool kRace>
void elect_one() {
  if (thread() == 0) mbarrier_init(at(kFull), 32);
  barrier(0, kAll, true);
  for (uint32_t parity = 0; parity < 8; ++parity) {
    mbarrier_arrive(at(kFull), 0);
    const bool elected = kRace ? lane() == 0 : flashattn::cuda::ptx::elect();
    if (elected && !mbarrier_test(at(kFull), parity % 2)) fail("a lane is missing");
    warp_sync();
  }
}

// ---- the copy engine

template <bool kRace>
void load_by_engine() {
  begin_barriers(1);
  if (thread() == 0) load_tile();
  if (!kRace) mbarrier_wait(at(kFull), 0);
  load<int>(own_word());
  mbarrier_wait(at(kFull), 0);
}

template <bool kRace>
void load_again() {
  begin_barriers(64);
  if (thread() == 0) load_tile();
  mbarrier_wait(at(kFull), 0);
  load<int>(own_word());
  mbarrier_arrive(at(kEmpty), 0);
  if (thread() == 0) {
    if (!kRace) mbarrier_wait(at(kEmpty), 0);
    load_tile();
  }
  mbarrier_wait(at(kFull), 1);
}

// Two copies, the second to where the first comes from.
template <bool kRace>
void store_by_engine() {
  begin_barriers(1);
  store(own_word(), 1);
  fence_async();
  barrier(0, kAll, true);
  if (thread() == 0) {
    engine_store(at(kTile), 256, [](const char*) {});
    engine_commit();
    if (!kRace) engine_wait(0, false);
    load_tile();
    engine_wait(0, true);
  }
  mbarrier_wait(at(kFull), 0);
}

// The fence is of the other proxy.
template <bool kRace>
void store_by_engine_fenced() {
  store(own_word(), 1);
  kRace ? fence_async_global() : fence_async();
  barrier(0, kAll, true);
  if (thread() != 0) return;
  engine_store(at(kTile), 256, [](const char*) {});
  engine_commit();
  engine_wait(0, true);
}

// Of two that are on their way the second is waited for, or the first alone.
template <bool kRace>
void store_two_by_engine() {
  if (thread() >= 32) return;
  if (thread() == 0) {
    for (uint32_t n = 0; n < 2; ++n) {
      engine_store(at(kTile + n * 256), 256, [](const char*) {});
      engine_commit();
    }
    for (int n = 0; n < 16; ++n) {  // the second may be done then
      engine_wait(1, false);
      yield();
    }
    engine_wait(kRace ? 1 : 0, false);
    store(at(kTile + 256), 1);
    fence_async();
    engine_wait(0, true);
  }
}

// ---- products of a warpgroup

void multiply_tile(float (&sums)[4], bool transpose = false) {
  const auto matrix = [](uint32_t first) {
    return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | (first & 0x3ffff) >> 4;
  };
  multiply_fence();
  multiply({sums, nullptr, matrix(at(kTile)), matrix(at(kTile + 1024)), 8, Number::kF16, false,
            transpose, false});
  multiply_commit();
}

template <bool kRace>
void multiply_loaded() {
  float sums[4];
  begin_barriers(1);
  if (thread() == 0) load_tile();
  if (!kRace) mbarrier_wait(at(kFull), 0);
  multiply_tile(sums);
  mbarrier_wait(at(kFull), 0);
  multiply_wait(0);
}

// The second product is on its way when the tile is overwritten.
template <bool kRace>
void multiply_then_store() {
  float sums[2][4];
  multiply_tile(sums[0]);
  multiply_tile(sums[1]);
  multiply_wait(kRace ? 1 : 0);
  barrier(0, kAll, true);
  store(own_word(), 1);
  fence_async();
  warp_sync();  // the lanes that store what the product reads may be the last
  multiply_wait(0);
}

template <bool kRace>
void multiply_stored() {
  float sums[4];
  store(own_word(), 1);
  fence_async();
  // All but the last warp have waited for all.
  barrier(1, 128, !kRace || warp() != 3);
  multiply_tile(sums);
  multiply_wait(0);
}

// A warp clears a row of which the product makes a result of its own, or adds to all.
template <bool kRace>
void multiply_cleared() {
  float sums[4];
  begin_barriers(1);
  if (thread() == 0) load_tile();
  mbarrier_wait(at(kFull), 0);
  if (warp() < 4) {
    multiply_tile(sums, kRace);
    multiply_wait(0);
  } else if (thread() % 32 < 8) {
    store(at(kTile + 12 * 128 + thread() % 32 * 16), make_uint4(0, 0, 0, 0));
    fence_async();
  }
}

// ---- clusters

template <bool kRace>
void send() {
  begin_barriers(1);
  if (thread() == 0) mbarrier_arrive(at(kFull), 4);
  cluster_arrive();
  cluster_wait();
  const uint32_t other = 1 - cluster_rank();
  if (thread() == 0) st_async(mapa(at(kTile), other), 1, mapa(at(kFull), other));
  if (!kRace) mbarrier_wait(at(kFull), 0);
  load<int>(at(kTile));
  mbarrier_wait(at(kFull), 0);
  cluster_arrive();
  cluster_wait();
}

// Everybody sends to everybody, and reads when all has come.
template <bool kRace>
void send_to_all() {
  begin_barriers(1);
  const uint32_t rank = cluster_rank();
  if (thread() == 0) mbarrier_arrive(at(kFull), 16 * 4);
  cluster_arrive();
  cluster_wait();
  const uint32_t to = static_cast<uint32_t>(thread());
  if (to < 16) st_async(mapa(at(kTile + rank * 4), to), rank, mapa(at(kFull), to));
  if (!kRace || rank != 14) mbarrier_wait(at(kFull), 0);
  if (to < 16 && load<uint32_t>(at(kTile + to * 4)) != to && !kRace) fail("another word");
  mbarrier_wait(at(kFull), 0);
  cluster_arrive();
  cluster_wait();
}

// The first block sends to where the last has stored.
template <bool kRace>
void arrive_relaxed() {
  begin_barriers(1);
  const bool is_last = cluster_rank() == 15;
  if (thread() == 0 && is_last) mbarrier_arrive(at(kFull), 4);
  if (thread() == 0 && is_last) store(at(kTile), 1);
  fence_async();
  cluster_arrive(!kRace);
  cluster_wait();
  if (thread() == 0 && cluster_rank() == 0) {
    st_async(mapa(at(kTile), 15), 2, mapa(at(kFull), 15));
  }
  if (is_last) mbarrier_wait(at(kFull), 0);
}

void check(const char* name, void (*good)(), void (*bad)(), int threads, int cluster = 1,
           const char* finds = ": a race: ") {
  const auto program = [=](void (*kernel)()) {
    return [=] {
      run_grid(dim3(static_cast<unsigned>(cluster)), threads, kTile + kTileBytes, kernel, cluster);
    };
  };
  check_programs(name, program(good), program(bad), finds);
}

}  // namespace

#define CHECK_KERNEL(kernel, ...) check(#kernel, kernel<false>, kernel<true>, __VA_ARGS__)

int main() {
  warm_up();
  CHECK_KERNEL(store_then_load, 64);
  CHECK_KERNEL(load_then_store, 64);
  CHECK_KERNEL(arrive_then_load, 64);
  CHECK_KERNEL(store_twice, 128);
  CHECK_KERNEL(store_twice_and_change, 128);
  CHECK_KERNEL(copy_by_threads, 64);
  CHECK_KERNEL(elect_one, 32, 1, "a lane is missing");
  CHECK_KERNEL(load_by_engine, 64);
  CHECK_KERNEL(load_again, 64);
  CHECK_KERNEL(store_by_engine, 64);
  CHECK_KERNEL(store_by_engine_fenced, 64, 1, "without a fence");
  CHECK_KERNEL(store_two_by_engine, 32);
  CHECK_KERNEL(multiply_loaded, 128);
  CHECK_KERNEL(multiply_then_store, 128);
  CHECK_KERNEL(multiply_stored, 128);
  CHECK_KERNEL(multiply_cleared, 160);
  CHECK_KERNEL(send, 64, 2);
  CHECK_KERNEL(send_to_all, 32, 16);
  CHECK_KERNEL(arrive_relaxed, 32, 16);
  return check_report();
}
